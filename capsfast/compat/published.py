"""What published layers share: sizes by the names of their arguments, weights in their axes, old state dicts."""

from itertools import permutations
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from .. import kinds
from ..calls import checks
from ..environment.names import ours
from ..kinds import Layout
from ..nn import _arguments
from ..nn._layer import Layer


class PublishedLayer(Layer):
    """A layer with the arguments, the parameters and the result of a published one. It holds its arguments."""

    _others = kinds.FORMS
    _layout: Layout
    # One for each constructor.
    _layouts: ClassVar[tuple[Layout, ...]]
    _forms: ClassVar[tuple[kinds.Form, ...]]
    # The shape in which the weight was loaded and is saved; None if that is its own.
    _stored: tuple[int, ...] | None = None

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if ours(cls) and {"_layout", "_layouts"} & {*vars(cls)}:
            cls._layouts = vars(cls).get("_layouts") or (cls._layout,)
            cls._forms = kinds.forms_of(cls)

    def _sizes(self) -> dict[str, int]:
        sizes = {letter: getattr(self, name) for letter, name in self._layout.names().items()}
        return {letter: size for letter, size in sizes.items() if size is not None}

    def _empty(self, axes: tuple[str, ...]) -> nn.Parameter:
        return nn.Parameter(torch.empty(kinds.shape_of(axes, self._sizes())))

    def _make_weight(self, shared: bool = False) -> None:
        layout = self._layout
        self.register_parameter(layout.weight, self._empty(layout.shared if shared else layout.axes))
        self._initialise()

    def _initialise(self) -> None:
        if self._layout.weight:
            nn.init.normal_(getattr(self, self._layout.weight), std=self._layout.std)

    def _weight_ijdk(self) -> Tensor:
        """A view of the weight with the axes ``[I, J, D, K]``, ``[1, J, D, K]`` if the input capsules share it."""
        axes = [axis for axis in self._layout.axes if axis != "1"]
        weight: Tensor = getattr(self, self._layout.weight)
        return weight.flatten(0, -4).permute([axes.index(letter) for letter in "IJDK"])

    def _check_capsules(self, name: str, value: Tensor) -> None:
        _arguments.floats(self._op, name, value, "[B, I, K]")
        caps, dim, got = self._layout.I, self._layout.K, list(value.shape[1:])
        wanted = [getattr(self, caps), getattr(self, dim)]
        if got == wanted:
            return
        sizes = self._sizes()
        if len(sizes) == 4 and got != wanted[::-1] and got in map(list, permutations(sizes.values(), 2)):
            raise ValueError(
                f"{self._op}: {name} must be [B, {caps}={wanted[0]}, {dim}={wanted[1]}], got {checks.shape_of(value)}; "
                f"the sizes seem to be in another order: give them by name, {caps}={got[0]} and {dim}={got[1]}"
            )
        checks.refuse_capsules(self._op, name, value, **{caps: wanted[0], dim: wanted[1]})

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        weight, key = self._parameters.get(self._layout.weight), f"{prefix}{self._layout.weight}"
        if weight is not None:
            loaded, shape = state_dict.get(key), tuple(weight.shape)
            stored = tuple(loaded.shape) if isinstance(loaded, Tensor) else ()
            if stored in ((1, *shape), shape[1:] if shape[0] == 1 else None):
                # The parameter keeps its shape, because an optimizer and copies of the parameter depend on it.
                state_dict[key], self._stored = state_dict[key].view(shape), stored
            elif stored == shape:
                self._stored = None
            else:
                lists[-1].extend(self._foreign(state_dict, prefix))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._stored is not None:
            key = f"{prefix}{self._layout.weight}"
            destination[key] = destination[key].view(self._stored)

    def _foreign(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """For weights with the layer's sizes in another order: a message for each with the constructors that fit."""
        calls: dict[str, list[str]] = {}
        for form, axes in [(call, axes) for call in self._forms for axes in call.layout.loads()]:
            layout = form.layout
            value: Any = state_dict.get(f"{prefix}{layout.weight}")
            shape = getattr(value, "shape", ())
            sizes = dict(zip(axes, shape, strict=False)) if len(axes) == len(shape) else {"1": 0}
            if sizes.pop("1", 1) == 1 and sorted(sizes.values()) == sorted(self._sizes().values()):
                by_name = {name: sizes[letter] for letter, name in layout.names().items() if letter in sizes}
                arguments = [f"{name}={by_name[name]}" for name in form.call.parameters if name in by_name]
                weight = f"{layout.weight} {checks.shape_of(value)}"
                calls.setdefault(weight, []).append(f"{form.name}({', '.join(arguments)})")
        return [
            f"{self._op}: got {weight}, which is the weight of {' or '.join(fitting)}; see {kinds.TABLE}"
            for weight, fitting in calls.items()
        ]


class SharedName(PublishedLayer):
    """A class whose name several published layers have: the overloads of ``__init__``, one for each layout."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The arguments of the overload."""

    def _take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Holds and returns the arguments, and holds the layout of the overload that takes them."""
        form = self._overload(args, kwargs)
        bound = form.call.bind(*args, **kwargs)
        bound.apply_defaults()
        self._layout, self._taken = form.layout, tuple(form.published().parameters)
        for name, value in bound.arguments.items():
            _arguments.option(self._op, name, form.call.parameters[name].annotation, value)
            setattr(self, name, value)
        return bound.arguments

    def _overload(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> kinds.Form:
        """The overload that a call means."""
        got = ", ".join([*map(checks.shown, args), *(f"{name}={checks.shown(kwargs[name])}" for name in kwargs)])
        assert self._others is not None
        fitting = [form for form in self._others if form.name == self._forms[0].name and form.fits(args, kwargs)]
        if kinds.ambiguous(fitting, len(args)):
            calls = " and ".join(str(form.published()) for form in fitting)
            raise TypeError(
                f"{self._op}: arguments by position must mean the same in all layers with this name, got ({got}), "
                f"which fits {calls}; give them by name; see {kinds.TABLE}"
            )
        # If no overload fits the values, the first one with these arguments reports the error.
        taking = [form for form in self._forms if form.takes(args, kwargs) is not None]
        for form in [form for form in taking if form in fitting] + taking:
            return form
        calls = " or ".join(str(form.published()) for form in self._forms)
        raise TypeError(f"{self._op}: takes {calls}, got ({got}){kinds.lead(self._op, self._others, args, kwargs)}")

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of forward in the order of the layout."""
        names = self._layout.inputs
        inputs = (*args, *[kwargs[name] for name in names[len(args) :] if name in kwargs])
        if not 0 < len(inputs) <= len(names) or any(name not in names for name in kwargs):
            raise TypeError(f"{self._op}: is called with ({', '.join(names)}), got {len(inputs)} {[*kwargs]}")
        return inputs

    def extra_repr(self) -> str:
        arguments = [(name, getattr(self, name)) for name in self._taken]
        return ", ".join(f"{name}={value!r}" for name, value in arguments if isinstance(value, (int, str)))
