"""Layers of other code, made from the table in capsfast/kinds.py."""

import inspect
import math
from itertools import permutations
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import kinds
from ..calls import checks
from ..environment.names import ours
from ..functional import dynamic_routing, route_votes, squash
from ..nn import _arguments
from ..nn._layer import Layer, hooked
from ..passes import routing_pass


def _described(text: str, forms: tuple[kinds.Form, ...]) -> str:
    """The docstring of a class: the constructor, weight, input and result of each form."""
    arguments: dict[str, str] = {}
    lines = [text, "\nThe arguments tell which layer is meant:\n" if len(forms) > 1 else ""]
    for form in forms:
        u, *more = form.inputs
        said = [f"has ``{form.weight_name} {' or '.join(map(kinds.spelled, form.orders))}``"] if form.weight else []
        said += [f"starts the weight as ``{form.std} * torch.randn``"] if form.std else []
        said += [f"takes ``{u} {'[B, I, J, D]' if form.of_votes else '[B, I, K]'}``"]
        said += [f"may take ``{name}``" for name in more]
        said += ["returns ``(v [B, J, D], c [B, I, J])``" if form.result == "v, c" else f"returns ``{form.result}``"]
        said += [f"routes with ``{name}={value!r}``" for name, value in form.options.items()]
        lines.append(f"* ``{form.name}{form.call}`` {', '.join(said[:-1])}, and {said[-1]}.")
        arguments |= {name: kinds.MEANINGS[each] for name, each in form.letters.items() if each not in "?."}
    lines += ["\nArgs:", *(f"    {name}: {meaning}." for name, meaning in arguments.items())]
    lines += ["    eps: eps of the squash, by keyword."] if any(form.eps is not None for form in forms) else []
    lines += ["\nRaises:", "    ValueError, TypeError: sizes below 1, arguments of no form, inputs that do not fit."]
    return "\n".join(lines) + "\n"


class FormLayer(Layer):
    """A layer with the class name of one or several rows of the table: the arguments decide which row is meant.

    The layer has its arguments as attributes and its weight as a parameter, with the names in the row.
    """

    _op: ClassVar[str]
    _forms: ClassVar[tuple[kinds.Form, ...]]
    _others: tuple[kinds.Form, ...] = kinds.FORMS
    # The shape in which the weight was loaded and is saved; None if that is its own.
    _stored: tuple[int, ...] | None = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The arguments of the row."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if not ours(cls):
            return
        cls._op = f"capsfast.compat.{cls.__name__}"
        cls._forms = tuple(form for form in cls._others if form.name == cls.__name__ and not form.instead)
        if cls._others is kinds.FORMS:
            cls.__doc__ = _described(inspect.cleandoc(cls.__doc__ or ""), cls._forms)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        form = self._form_of(args, kwargs)
        bound = form.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        self._form, self._named = form, {**form.named}
        self._check(form, given)
        for name, value in given.items():
            if name != "bias":  # bias becomes a parameter or None
                setattr(self, name, value)
        self._start(given)

    def _form_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> kinds.Form:
        got = ", ".join([*map(checks.shown, args), *(f"{name}={checks.shown(kwargs[name])}" for name in kwargs)])
        of_name = [form for form in self._others if form.name == self._forms[0].name]
        fitting = [form for form in of_name if kinds.fits(form, args, kwargs)]
        if kinds.ambiguous(fitting, len(args)):
            raise TypeError(
                f"{self._op}: arguments by position must mean the same in all layers with this name, got ({got}), "
                f"which fits {' and '.join(str(form.call) for form in fitting)}; give them by name; see {kinds.TABLE}"
            )
        # If no form fits the values, the first form with these arguments reports the error.
        taken = [form for form in self._forms if kinds.given(form, args, kwargs) is not None]
        for form in [form for form in taken if form in fitting] + taken:
            return form
        takes = " or ".join(str(form.call) for form in self._forms)
        raise TypeError(f"{self._op}: takes {takes}, got ({got}){kinds.lead(self._op, self._others, args, kwargs)}")

    def _check(self, form: kinds.Form, given: dict[str, Any]) -> None:
        for name, letter in form.letters.items():
            if letter in "IJKDrn+":
                checks.integer(self._op, name, given[name], least=0 if letter == "+" else 1)
            if letter in "?s":
                checks.boolean(self._op, name, given[name])
            if letter == "n" and given[name] > kinds.MOST:
                raise ValueError(
                    f"{self._op}: {name} must be at most {kinds.MOST}, got {given[name]}; if that is a size, give all "
                    f"of {self._forms[0].call}; more iterations: capsfast.nn.RoutingByAgreement({name}={given[name]})"
                )
        if "eps" in given:
            checks.positive_eps(self._op, given["eps"])

    def _start(self, given: dict[str, Any]) -> None:
        """Makes the parameters."""
        form = self._form
        if form.weight:
            shape = kinds.shape_of(form.orders[1 if given.get(form.named.get("s", "")) else 0], self._sizes())
            self.register_parameter(form.weight_name, nn.Parameter(torch.empty(shape)))
            self._initialise()

    def _initialise(self) -> None:
        std = self._form.std
        for parameter in self.parameters(recurse=False):
            nn.init.normal_(parameter, std=std) if std else nn.init.zeros_(parameter)

    def _sizes(self) -> dict[str, int]:
        return {letter: getattr(self, self._named[letter]) for letter in "IJKD" if letter in self._named}

    def _check_capsules(self, name: str, value: Tensor) -> None:
        _arguments.floats(self._op, name, value, "[B, I, K]")
        sizes, (caps, dim), got = self._sizes(), (self._named["I"], self._named["K"]), list(value.shape[1:])
        wanted = [sizes["I"], sizes["K"]]
        if got == wanted:
            return
        if len(sizes) == 4 and got != wanted[::-1] and got in map(list, permutations(sizes.values(), 2)):
            raise ValueError(
                f"{self._op}: {name} must be [B, {caps}={wanted[0]}, {dim}={wanted[1]}], got {checks.shape_of(value)}; "
                f"the sizes seem to be in another order: give them by name, {caps}={got[0]} and {dim}={got[1]}"
            )
        checks.refuse_capsules(self._op, name, value, **{caps: wanted[0], dim: wanted[1]})

    def _sums(self) -> int:
        """How many weighted sums to form."""
        form = self._form
        return form.sums or getattr(self, form.iterations) + ("+" in self._named)

    def _inputs(self, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of forward, in the order of the row."""
        takes = self._form.inputs
        given = (*given, *[named[name] for name in takes[len(given) :] if name in named])
        if not 0 < len(given) <= len(takes) or any(name not in takes for name in named):
            raise TypeError(f"{self._op}: is called with ({', '.join(takes)}), got {len(given)} {[*named]}")
        return given

    def forward(self, *given: Any, **named: Any) -> Tensor | tuple[Tensor, Tensor]:
        form = self._form
        u, *more = self._inputs(given, named)
        if form.of_votes:
            _arguments.floats(self._op, form.inputs[0], u, "[B, I, J, D]")
            _arguments.batch_size(self._op, more[0] if more else None, u)
            return route_votes(u, self._sums(), logits=self.b if form.weight else None, eps=self.eps)
        self._check_capsules(form.inputs[0], u)
        own = form.orders[0].removeprefix("1")
        weight = getattr(self, form.weight_name).flatten(0, -4).permute([own.index(letter) for letter in "IJDK"])
        pair = form.result == "v, c"
        return dynamic_routing(u, weight, self._sums(), eps=self.eps, return_coupling=pair, **form.options)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        own, key = self._parameters.get(self._form.weight_name), f"{prefix}{self._form.weight_name}"
        if own is not None:
            given, here = state_dict.get(key), tuple(own.shape)
            there = tuple(given.shape) if isinstance(given, Tensor) else ()
            if there in ((1, *here), here[1:] if here[0] == 1 else None):
                # The parameter keeps its shape, because an optimizer and copies of the parameter depend on it.
                state_dict[key], self._stored = state_dict[key].view(here), there
            elif there == here:
                self._stored = None
            else:
                lists[-1].extend(self._foreign(state_dict, prefix))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._stored is not None:
            key = f"{prefix}{self._form.weight_name}"
            destination[key] = destination[key].view(self._stored)

    def _foreign(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """For weights with the layer's sizes in another order: a message for each with the constructors that fit."""
        calls: dict[str, list[str]] = {}
        for form, order in [(each, order) for each in self._forms for order in each.orders]:
            value: Any = state_dict.get(f"{prefix}{form.weight_name}")
            shape = getattr(value, "shape", ())
            read = dict(zip(order, shape, strict=False)) if len(order) == len(shape) else {"1": 0}
            if read.pop("1", 1) == 1 and sorted(read.values()) == sorted(self._sizes().values()):
                given = [f"{each}={read[letter]}" for each, letter in form.letters.items() if letter in read]
                got = f"{form.weight_name} {checks.shape_of(value)}"
                calls.setdefault(got, []).append(f"{form.name}({', '.join(given)})")
        return [
            f"{self._op}: got {got}, which is the weight of {' or '.join(fitting)}; see {kinds.TABLE}"
            for got, fitting in calls.items()
        ]

    def extra_repr(self) -> str:
        given = [(name, getattr(self, name)) for name in self._form.letters]
        return ", ".join(f"{name}={value!r}" for name, value in given if isinstance(value, (int, str)))


class _OneTensor(FormLayer):
    """Layers whose rows all return v alone."""

    if TYPE_CHECKING:

        def forward(self, *given: Any, **named: Any) -> Tensor: ...


class DynamicRouting(FormLayer):
    """Dynamic routing (Sabour, Frosst, Hinton 2017, procedure 1)."""


class DynamicRoutingLayer(_OneTensor):
    """Dynamic routing whose gradient goes through the last iteration only."""


class DigitCaps(_OneTensor):
    """Dynamic routing (Sabour, Frosst, Hinton 2017, procedure 1).

    By position the sizes are ambiguous, which is an error.
    """


class DigitCapsules(_OneTensor):
    """Dynamic routing (Sabour, Frosst, Hinton 2017, procedure 1) with eps added to the norm."""


class Router(_OneTensor):
    """Dynamic routing with a softmax over the input capsules."""


class DenseCapsule(_OneTensor):
    """Dynamic routing whose gradient goes through the last iteration only, with eps added to the norm."""


class AgreementRouting(_OneTensor):
    """Dynamic routing of votes with learned logits b."""


class CapsLayer(FormLayer):
    """Makes votes, which ``routing_module`` routes. The weights start uniform between plus and minus ``1 / sqrt(I)``.

    If the module is this package's :class:`AgreementRouting`, without hooks and with its own forward, the votes are not
    stored.
    """

    def _start(self, given: dict[str, Any]) -> None:
        routing, sizes = given["routing_module"], self._sizes()
        if not isinstance(routing, nn.Module):
            raise TypeError(f"{self._op}: routing_module must be a module, got {type(routing).__name__}")
        if isinstance(routing, AgreementRouting):
            theirs = (routing.input_caps, routing.output_caps)
            if theirs != (self.input_caps, self.output_caps):
                raise ValueError(
                    f"{self._op}: routing_module must be for input_caps={self.input_caps} and "
                    f"output_caps={self.output_caps}, got one for {theirs[0]} and {theirs[1]}"
                )
        self.weights = nn.Parameter(torch.empty(kinds.shape_of("IK(JD)", sizes)))
        self._initialise()

    def _initialise(self) -> None:
        bound = 1 / math.sqrt(self.input_caps)
        nn.init.uniform_(self.weights, -bound, bound)

    def forward(self, caps_output: Tensor) -> Tensor:
        self._check_capsules("caps_output", caps_output)
        weight = self.weights.unflatten(2, (self.output_caps, self.output_dim)).permute(0, 2, 3, 1)
        routing = self.routing_module
        if type(routing) is AgreementRouting and "forward" not in vars(routing) and not hooked(routing):
            return dynamic_routing(caps_output, weight, routing._sums(), logits=routing.b, eps=routing.eps)
        return routing(torch.einsum("ijdk,bik->bijd", weight, caps_output))  # type: ignore[no-any-return]


class CapsuleLayer(FormLayer):
    """Dynamic routing with a softmax over the input capsules; with ``num_route_nodes=-1`` primary capsules.

    Primary capsules are K = ``num_capsules`` convolutions with ``kernel_size`` and ``stride``, one per component of a
    capsule: images ``[B, in_channels, H, W]`` to ``[B, out_channels·H'·W', K]``. Otherwise ``num_route_nodes`` is I.
    """

    def _start(self, given: dict[str, Any]) -> None:
        if not isinstance(self.num_route_nodes, int) or self.num_route_nodes != -1:
            checks.integer(self._op, "num_route_nodes", self.num_route_nodes)
            self._named["I"] = "num_route_nodes"
            super()._start(given)
            return
        if self.kernel_size is None or self.stride is None:
            raise ValueError(
                f"{self._op}: num_route_nodes=-1 makes convolutions and needs kernel_size and stride, got "
                f"{checks.shown(self.kernel_size)} and {checks.shown(self.stride)}"
            )
        convolution = (self.in_channels, self.out_channels, self.kernel_size, self.stride)
        self.capsules = nn.ModuleList(nn.Conv2d(*convolution) for _ in range(self.num_capsules))

    def forward(self, x: Tensor) -> Tensor:
        if self.num_route_nodes == -1:
            return squash(torch.stack([conv(x).flatten(1) for conv in self.capsules], dim=-1), eps=self.eps)
        v = super().forward(x)
        assert isinstance(v, Tensor)
        return v.transpose(0, 1)[:, :, None, None]


class CapsuleLinear(FormLayer):
    """Dynamic routing or k-means (Ren, Lu 2018).

    ``in_capsules`` is I; it must be None with ``share_weight``. ``routing_type="k_means"`` scores votes by dot products
    with the normalised capsules, starting from equal coupling; there is no other similarity. ``squash=True`` squashes
    the result; dynamic routing always squashes before its last iteration. The result is ``(v, c [B, J, I])``. With bias
    or return_prob the second form is meant: ``bias=True`` adds ``bias [J, D]`` to the weighted sums, and the result is
    v alone unless ``return_prob=True``. ``xavier_uniform_`` initialises the weight; the bias starts at 0.
    """

    def _start(self, given: dict[str, Any]) -> None:
        checks.choice(self._op, "routing_type", self.routing_type, ("dynamic", "k_means"))
        checks.choice(self._op, "similarity", self.similarity, ("dot",))
        self._pair = given.get("return_prob", True)
        sizes = self._sizes()
        if not self.share_weight:
            checks.integer(self._op, "in_capsules", self.in_capsules)
            self._named["I"], sizes["I"] = "in_capsules", self.in_capsules
        elif self.in_capsules is not None:
            got = checks.shown(self.in_capsules)
            raise ValueError(
                f"{self._op}: share_weight=True is for any number of input capsules, got in_capsules={got}"
            )
        self._matrices = "bias" in given  # this form draws the weight as a matrix for each input capsule
        self.weight = nn.Parameter(torch.empty(kinds.shape_of("JDK" if self.share_weight else "JIDK", sizes)))
        self.bias = nn.Parameter(torch.empty(kinds.shape_of("JD", sizes))) if given.get("bias") else None
        self._initialise()

    def _initialise(self) -> None:
        if self._matrices:
            J, D, K = self.weight.shape[0], *self.weight.shape[-2:]
            # uniform_() because the published layer, too, draws numbers that it then replaces.
            drawn = self.weight.new_empty(self.weight.numel() // (J * D * K), K, J * D).uniform_()
            drawn = nn.init.xavier_uniform_(drawn).unflatten(2, (J, D)).permute(2, 0, 3, 1)
            with torch.no_grad():
                self.weight.copy_(drawn[:, 0] if self.share_weight else drawn)
        else:
            nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if self.share_weight:
            _arguments.floats(self._op, "input", input, "[B, I, K]")
            weight = self.weight[None]
        else:
            self._check_capsules("input", input)
            weight = self.weight.transpose(0, 1)
        if self.routing_type == "k_means":
            found, coupling = self._k_means(input, weight)
        else:
            options: dict[str, Any] = {"bias": self.bias, "squash_last": self.squash, "eps": self.eps}
            routed = dynamic_routing(input, weight, self._sums(), return_coupling=self._pair, **options)
            found, coupling = routed if self._pair else (routed, None)
        if not self._pair:
            return found
        assert coupling is not None
        return found, coupling.transpose(1, 2)

    def _k_means(self, u: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        center = routing_pass(u, weight).first
        for _ in range(self._sums()):
            moments = routing_pass(u, weight, query=F.normalize(center, dim=-1), return_weights=True)
            center = moments.first if self.bias is None else moments.first + self.bias
        return (squash(center, eps=self.eps) if self.squash else center).to(u.dtype), moments.weights
