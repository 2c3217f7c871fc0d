"""Published layers of other code: their constructors and the axes of their weights, as messages name them.

Axes as text are letters of ``IJDK``. ``1`` is an axis of length 1. Letters in brackets are one flattened axis, the last
letter fastest: ``"IK(JD)"`` is ``[I, K, J*D]``.
"""

import importlib
import inspect
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_origin

from typing_extensions import get_overloads

from .calls import checks
from .environment.names import PACKAGE

TABLE = "docs/migration.md"
# The smallest eps, for layers without an eps. Zero vectors have a finite gradient here, unlike there.
NO_EPS = checks.SMALLEST_EPS
# Published routings form 1 to 10 weighted sums. A larger single argument is probably a size such as 16 or 128.
MOST = 10
FewSums = Annotated[int, range(1, MOST + 1)]
MoreSums = Annotated[int, range(checks.MOST)]  # after the first sum


@dataclass(frozen=True)
class Layout:
    """The sizes, the weight and the inputs of a published layer.

    I, J, K, D: names of the arguments with the number of input and output capsules, and with their sizes. weight: name
    of the parameter. axes: the axes of the weight, such as ``("J", "I", "D", "K")``; ``"1"`` has length 1, ``"JD"`` is
    one flattened axis. shared: the axes if all input capsules share the weight. std: the weight starts as ``std *
    torch.randn``. inputs: names of the arguments of the forward call. votes: the input is votes ``[B, I, J, D]``.
    """

    I: str = ""
    J: str = ""
    K: str = ""
    D: str = ""
    weight: str = ""
    axes: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    std: float = 0.01
    inputs: tuple[str, ...] = ("u",)
    votes: bool = False

    def names(self) -> dict[str, str]:
        """The names of the size arguments by their letters."""
        names = {"I": self.I, "J": self.J, "K": self.K, "D": self.D}
        return {letter: name for letter, name in names.items() if name}

    def loads(self) -> list[tuple[str, ...]]:
        """The axes of the weights that the layer loads: a leading axis of length 1 may be there or not."""
        if not self.axes:
            return []
        other = self.axes[1:] if self.axes[0] == "1" else ("1", *self.axes)
        return [self.axes, other, *([self.shared] if self.shared else [])]


class Form(NamedTuple):
    """A constructor of a published layer. Several layers may share a name.

    name: the class in :mod:`capsfast.compat`. call: its signature. instead: the replacement if compat has no class.
    """

    name: str
    call: inspect.Signature
    layout: Layout
    instead: str = ""

    def published(self) -> inspect.Signature:
        """The signature of the published class, which takes no eps."""
        parameters = [parameter.replace(annotation=parameter.empty) for parameter in self.call.parameters.values()]
        return inspect.Signature([parameter for parameter in parameters if parameter.name != "eps"])

    def takes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments of a call by name, None if the constructor does not take the call."""
        try:
            return self.call.bind(*args, **kwargs).arguments
        except TypeError:
            return None

    def fits(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the constructor takes a call, with values of the right types."""
        arguments, parameters = self.takes(args, kwargs), self.call.parameters
        return arguments is not None and all(
            _may_be(parameters[name].annotation, value) for name, value in arguments.items()
        )


def forms_of(kind: Any) -> tuple[Form, ...]:
    """The constructors of a class of compat: the overloads of its ``__init__``, or the one that it has."""
    forms = []
    for call, layout in zip(get_overloads(kind.__init__) or [kind.__init__], kind._layouts, strict=True):
        signature = inspect.signature(call)
        without_self = [*signature.parameters.values()][1:]
        forms.append(Form(kind.__name__, signature.replace(parameters=without_self), layout))
    return tuple(forms)


class Forms:
    """The constructors in a module of compat, and published ones without a class, for messages.

    The module is imported when a message needs it, because it stands above the layers whose messages name it.
    """

    def __init__(self, module: str, *without_class: Form) -> None:
        self.module, self.without_class = module, without_class

    def __iter__(self) -> Iterator[Form]:
        module = importlib.import_module(f"{PACKAGE}.compat.{self.module}")
        for kind in vars(module).values():
            if getattr(kind, "__module__", "") == module.__name__:
                yield from getattr(kind, "_forms", ())
        yield from self.without_class


def _votes_by_output(j: int, n: int, bias_routing: bool) -> None: ...


def _averaging(num_capsules: int, num_routes: int, in_channels: int, out_channels: int) -> None: ...


FORMS = Forms(
    "layers",
    Form(
        "DynamicRouting",
        inspect.signature(_votes_by_output),
        Layout(J="j", D="n"),
        "capsfast.nn.RoutingByAgreement(iters)(u_hat.transpose(1, 2), bias=bias)",
    ),
    Form(
        "DigitCaps",
        inspect.signature(_averaging),
        Layout("num_routes", "num_capsules", "in_channels", "out_channels"),
        "capsfast.compat.averaged_routing(u, W[0], softmax='in')",
    ),
)
LOSSES = Forms("losses")

# Converts a weight w with these axes to [I, J, D, K].
CONVERSIONS = {
    "IJDK": "w",
    "IJKD": "w.transpose(-1, -2)",
    "JIDK": "w.permute(1, 0, 2, 3)",
    "JIKD": "w.permute(1, 0, 3, 2)",
    "1IJDK": "w[0]",
    "1IJKD": "w[0].transpose(-1, -2)",
    "1JIDK": "w[0].permute(1, 0, 2, 3)",
    "1JIKD": "w[0].permute(1, 0, 3, 2)",
    "I(JD)K": "w.view(I, J, D, K)",
    "1I(JD)K1": "w.view(I, J, D, K)",
    "IK(JD)": "w.view(I, K, J, D).permute(0, 2, 3, 1)",
}


def axes(order: str) -> tuple[str, ...]:
    """The letters of each axis: ``"1IK(JD)"`` to ``("1", "I", "K", "JD")``."""
    return tuple(axis.strip("()") for axis in re.findall(r"\(\w+\)|\w", order))


def spelled(order: str | tuple[str, ...]) -> str:
    """``"IK(JD)"``, or its axes, to ``[I, K, J*D]``."""
    return "[" + ", ".join("*".join(axis) for axis in (axes(order) if isinstance(order, str) else order)) + "]"


def shape_of(order: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    lengths = {**sizes, "1": 1}
    return tuple(math.prod(lengths[letter] for letter in axis) for axis in order)


def orders_of(shape: Sequence[int], sizes: Mapping[str, int]) -> list[str]:
    """The orders in :data:`CONVERSIONS` that fit a weight of this shape."""
    return [order for order in CONVERSIONS if shape_of(axes(order), sizes) == tuple(shape)]


def with_weight(name: str, orders: Collection[str]) -> list[Form]:
    """The forms whose weight has this name and one of these orders."""
    wanted = {axes(order) for order in orders}
    return [form for form in FORMS if name == form.layout.weight and wanted & {*form.layout.loads()}]


def ambiguous(forms: Sequence[Form], count: int) -> bool:
    """Whether one of the first ``count`` arguments is another size, or another switch, in another of the forms."""
    meanings: list[set[str]] = [set() for _ in range(count)]
    for form in forms:
        letters = {name: letter for letter, name in form.layout.names().items()}
        for meaning, (name, parameter) in zip(meanings, form.call.parameters.items(), strict=False):
            if name in letters or parameter.annotation is bool:
                meaning.add(letters.get(name, name))
    return any(len(meaning) > 1 for meaning in meanings)


def _may_be(annotation: Any, value: object) -> bool:
    if annotation is bool:
        return isinstance(value, bool)
    if annotation is float:  # a margin or a factor
        return isinstance(value, (int, float)) and not (isinstance(value, int) and value > 1)
    sums = get_origin(annotation) is Annotated
    if annotation is int or sums:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and (not sums or value in annotation.__metadata__[0])
    return True


def listed(forms: Iterable[Form]) -> str:
    """The classes of the forms as text, each once."""
    names = list(dict.fromkeys(f"capsfast.compat.{form.name}" for form in forms))
    return " or ".join(([", ".join(names[:-1])] if names[:-1] else []) + names[-1:])


def lead(op: str, forms: Iterable[Form], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The end of an error message: layers that accept the call that ``op`` refuses."""
    fitting = [form for form in forms if form.fits(args, kwargs)]
    text = "".join(f"; for {form.name}{form.published()} use {form.instead}" for form in fitting if form.instead)
    classes = [form for form in fitting if not form.instead and f"capsfast.compat.{form.name}" != op]
    if classes:
        text += f"; {listed(classes)} can be called so"
        if any(form.layout.votes for form in classes) and op != "capsfast.nn.RoutingByAgreement":
            text += ", and for votes capsfast.nn.RoutingByAgreement"
    return f"{text}; see {TABLE}"
