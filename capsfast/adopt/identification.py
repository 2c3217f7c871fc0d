"""The call of capsfast that computes what a layer computes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..calls.options import Options
from ..compat import averaged_routing, masked_after_routing
from ..functional import dynamic_routing, route_votes
from ..kinds import NO_EPS, spelled
from ..nn import DynamicRouting, RoutingByAgreement
from .orders import Sizes, Steps, as_code, axes, check, follow, letters, steps_from, steps_to

# Roles of further arguments of a forward that the call does not read.
UNREAD = ("unused", "constant")


# Roles that the function takes by position.
BY_POSITION = ("votes", "input", "weight", "weight, all J")


class Read(NamedTuple):
    """A tensor that the call reads: its role and name, its axes in the layer, the steps to the function's axes."""

    role: str
    name: str
    axes: tuple[str, ...]
    steps: Steps


@dataclass(frozen=True)
class Identification:
    """The call of capsfast that computes what a layer computes; :func:`capsfast.identify` finds it.

    ``identification(identification.tensors(layer), u)`` runs that call on views of the layer's own parameters and
    returns the output in the layer's shape. ``print(identification)`` describes it in words.

    Two identifications are equal if their calls are equal, whatever their differences and notes.

    Attributes:
        weight: name of the parameter or buffer, None for a layer that takes votes.
        weight_order: axes of the weight, such as ``"1IJDK"``. A letter is an axis, ``1`` an axis of length 1, letters
            in brackets one flattened axis: ``"IK(JD)"``. Without I the input capsules share the weight, without J the
            output capsules.
        input_order, output_order: axes of the layer's input (``"BIK"``, for votes ``"BIJD"``) and output.
        sizes: sizes of the axes.
        num_iterations, softmax, gradient, leaky, squash, eps, squash_last: see :func:`capsfast.dynamic_routing`.
        options: the options of the call that differ from the defaults.
        names: names of the parameters and buffers that the call reads.
        averaged: the call is :func:`capsfast.compat.averaged_routing`, which averages the logits over the batch.
        logits, logits_order, bias, bias_order: names and axes of the layer's logits and bias, if it has them.
        arguments, argument_orders: roles of the layer's further arguments, and their axes. Roles are ``"mask"``,
            ``"mask_after"`` (a factor of the coupling, as in
            :func:`capsfast.compat.masked_after_routing`), ``"unused"`` and ``"constant"`` (its value must not change).
        entries: meanings of the entries of the layer's tuple: ``"output"``, ``"coupling"`` (the last), ``"lengths"`` of
            the output, ``"None"`` and ``"other"``; empty if the layer returns a tensor.
        coupling_order: axes of the coupling.
        forward_difference, gradient_difference: the largest relative differences between layer and call.
        notes: further observations, in words.
    """

    weight: str | None
    weight_order: str
    input_order: str
    output_order: str
    sizes: Sizes
    num_iterations: int = 3
    softmax: str = "out"
    gradient: str = "full"
    leaky: bool = False
    squash: str = "paper"
    eps: float = 1e-8
    squash_last: bool = True
    averaged: bool = False
    logits: str | None = None
    logits_order: str = "IJ"
    bias: str | None = None
    bias_order: str = "JD"
    arguments: tuple[str, ...] = ()
    argument_orders: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()
    coupling_order: str = "BIJ"
    forward_difference: float = field(default=0.0, compare=False)
    gradient_difference: float = field(default=0.0, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    options: dict[str, Any] = field(init=False, repr=False, compare=False)
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    # Bound here, not in each call: a call of a small batch takes less time than finding the steps.
    _reads: tuple[Read, ...] = field(init=False, repr=False, compare=False)
    _output_steps: Steps = field(init=False, repr=False, compare=False)
    _coupling_steps: Steps = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        held = {name: getattr(self, name, default) for name, default in DEFAULTS.items()}
        options = {name: value for name, value in held.items() if value != DEFAULTS[name]}
        bound = {
            "options": options,
            "names": tuple(name for name in (self.weight, self.logits, self.bias) if name is not None),
            "_reads": self._bound_reads(),
            "_output_steps": steps_to(self.output_order, "BJD"),
            "_coupling_steps": steps_to(self.coupling_order, "BIJ"),
        }
        vars(self).update(bound)  # the class is frozen

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Binds again, because a model that another version saved may lack what is bound here.
        vars(self).update(state)
        self.__post_init__()

    def tensors(self, layer: nn.Module) -> dict[str, Tensor]:
        """The tensors that the call reads, by name, from this layer. Parametrized tensors are computed as in the layer.

        Raises:
            AttributeError: the layer lacks the parameter: it is a different layer, or makes it in its first forward.
        """
        layer = unwrapped(layer)
        return {name: tensor_of(layer, name) for name in self.names}

    def __call__(
        self, parameters: Mapping[str, Tensor], u: Tensor, *others: Tensor | None, backend: str | None = None
    ) -> Tensor:
        """The output of the layer.

        Args:
            parameters: the tensors in :attr:`names`, by name; further entries are ignored.
            u: the input of the layer, in its order of axes.
            others: further arguments of the layer, by position.
            backend: as in :func:`capsfast.dynamic_routing`.

        Raises:
            KeyError: a parameter is missing.
            ValueError, TypeError: a tensor has other axes, or :func:`capsfast.dynamic_routing` raises the error.
        """
        v: Tensor = self._routed(parameters, u, *others, backend=backend)
        return follow(v, self._output_steps)

    def results(
        self, parameters: Mapping[str, Tensor], u: Tensor, *others: Any, backend: str | None = None
    ) -> tuple[Tensor, ...]:
        """The entries of the layer's tuple that the call computes, in the layer's orders of axes."""
        pair = "coupling" in self.entries
        routed = self._routed(parameters, u, *others, backend=backend, return_coupling=pair)
        v, c = routed if pair else (routed, routed)
        results: list[Tensor] = []
        for entry in self.entries or ("output",):
            if entry == "output":
                results.append(follow(v, self._output_steps))
            elif entry == "lengths":
                results.append(v.norm(dim=-1))
            elif entry == "coupling":
                results.append(follow(c, self._coupling_steps))
        return tuple(results)

    def _routed(self, parameters: Mapping[str, Tensor], u: Tensor, *others: Tensor | None, **more: Any) -> Any:
        (x, *weights), keywords = self.arguments_of_call(parameters, u, *others)
        if self.averaged:
            del more["backend"]
            return averaged_routing(x, weights[0] if weights else None, **keywords, **more)
        if "mask_after" in self.arguments:
            return masked_after_routing(x, weights[0] if weights else None, **keywords, **more)
        return dynamic_routing(x, weights[0], **keywords, **more) if weights else route_votes(x, **keywords, **more)

    def arguments_of_call(
        self, parameters: Mapping[str, Tensor], u: Tensor, *others: Any
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """The arguments of the function, by position and by name."""
        values = [u, *[parameters[name] for name in self.names]]
        values += [value for role, value in zip(self.arguments, others, strict=False) if role not in UNREAD]
        tensors: list[Tensor] = []
        keywords = dict(self.options)
        for (role, name, order, steps), value in zip(self._reads, values, strict=False):
            if value is None:
                continue
            value = follow(check("capsfast.adopt.Identification", name, value, order), steps)
            if role in BY_POSITION:
                tensors.append(value)
            else:
                # A factor keeps its values; of a mask only the zeros count.
                keywords[role.removesuffix("_after")] = value != 0 if role == "mask" else value
        return tuple(tensors), keywords

    def layer(self, own: nn.Module, u: Tensor) -> tuple[nn.Module, Tensor]:
        """A layer of capsfast that routes like ``own``, with copies of its parameters; and u in the layout it takes.

        Raises:
            ValueError: the layer averages logits over the batch or masks after the softmax: no layer here does that.
        """
        if self.averaged or "mask_after" in self.arguments:
            raise ValueError("capsfast.adopt.Identification: no layer averages the logits or masks the coupling")
        (u, *weights), keywords = self.arguments_of_call(self.tensors(own), u)
        options = {**DEFAULTS, **self.options}
        if not weights:
            return RoutingByAgreement(**options), u
        I, J, D, K = self.sizes
        weight = weights[0].expand(-1, J, -1, -1)
        learned: dict[str, Any] = {"learned_logits": self.logits is not None, "bias": self.bias is not None}
        routing = DynamicRouting(I, J, K, D, **options, **learned, shared_weight=weight.shape[0] == 1).to(u)
        state = {"W": weight} | {f"routing.{name}": keywords[name] for name in ("logits", "bias") if name in keywords}
        routing.load_state_dict({name: value.detach() for name, value in state.items()})
        return routing, u

    def _bound_reads(self) -> tuple[Read, ...]:
        """What the call reads: the input, the layer's tensors in the order of names, further arguments."""
        wanted = [("votes" if self.weight is None else "input", "u", self.input_order)]
        if self.weight is not None:
            # J is expanded if no other tensor gives its size.
            expanded = "J" not in letters(self.weight_order) and self.logits is None and self.bias is None
            wanted.append(("weight, all J" if expanded else "weight", self.weight, self.weight_order))
        tensors = (("logits", self.logits, self.logits_order), ("bias", self.bias, self.bias_order))
        wanted += [(role, name, order) for role, name, order in tensors if name is not None]
        further = zip(self.arguments, self.argument_orders, strict=True)
        wanted += [(role, role, order) for role, order in further if role not in UNREAD]
        return tuple(
            Read(role, name, axes(order), steps_from(order, *AXES[role], self.sizes)) for role, name, order in wanted
        )

    def summary(self) -> list[str]:
        """What the layer computes, in words."""
        first = f"{self._source()}, {self.num_iterations} iteration{'s' if self.num_iterations > 1 else ''}"
        said = [*(self._deviations() or ["all options are as in the paper"]), *(f"note: {note}" for note in self.notes)]
        return [first, *(f"  {line}" for line in said)]

    def describe(self) -> str:
        """What the layer computes, in words, and the call as code."""
        differences = f"values {self.forward_difference:.1e}, gradients {self.gradient_difference:.1e}"
        call = (f"  {line}" for line in self.code().splitlines())
        return "\n".join([*self.summary(), f"  largest relative difference: {differences}", "The call:", *call])

    __str__ = describe

    def code(self, layer: str = "layer", u: str = "u") -> str:
        """The call as Python, for a layer and an input of these names."""
        lines, arguments, reads = [], [], [*self._reads]
        source = u + as_code(reads.pop(0).steps)
        if self.weight is not None:
            steps = reads.pop(0).steps
            lines.append(f"weight = {layer}.{self.weight}{as_code(steps)}  # {spelled(self.weight_order)}")
            arguments.append("weight")
        if self.num_iterations != DEFAULTS["num_iterations"]:
            arguments.append(str(self.num_iterations))
        for role, name, _, steps in reads:
            if role in ("logits", "bias"):
                arguments.append(f"{role}={layer}.{name}{as_code(steps)}")
            else:
                name, truth = role.removesuffix("_after"), " != 0" if role == "mask" else ""
                arguments.append(f"{name}={name}{as_code(steps)}{truth}")
        arguments += [f"{name}={value!r}" for name, value in self.options.items() if name != "num_iterations"]
        function = "route_votes" if self.weight is None else "dynamic_routing"
        if self.averaged or "mask_after" in self.arguments:
            function = f"compat.{'averaged' if self.averaged else 'masked_after'}_routing"
            arguments = arguments if self.weight is not None else ["None", *arguments]
        call = f"capsfast.{function}({', '.join([source, *arguments])})"
        return "\n".join([*lines, f"v = {call}{as_code(self._output_steps)}"])

    def _source(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes._asdict().items() if size)
        shapes = f"{spelled(self.input_order)} to {spelled(self.output_order)}"
        if self.weight is None:
            return f"dynamic routing of votes {shapes}, {sizes}"
        words = {"I": "input", "J": "output"}
        sharing = " and ".join(word for letter, word in words.items() if letter not in self.weight_order)
        shared = f", shared by all {sharing} capsules" if sharing else ""
        return f"dynamic routing {shapes}, weight `{self.weight}` {spelled(self.weight_order)}{shared}, {sizes}"

    def _deviations(self) -> list[str]:
        """Deviations from procedure 1 of Sabour, Frosst, Hinton 2017, in words."""
        deviations = [words for (name, value), words in DEVIATIONS.items() if getattr(self, name) == value]
        if self.squash != "paper":
            deviations.append(f'squash "{self.squash}": not the paper\'s')
        if self.eps != DEFAULTS["eps"] and self.squash != "identity":
            none = " (the layer adds none)" if self.eps <= NO_EPS else ""
            deviations.append(f"eps of the squash {self.eps:g}{none}; the default is {DEFAULTS['eps']:g}")
        if self.logits is not None:
            deviations.append(f"the logits start with `{self.logits}` {spelled(self.logits_order)}")
        if self.bias is not None:
            deviations.append(f"`{self.bias}` {spelled(self.bias_order)} is added to the weighted sum")
        for n, (role, order) in enumerate(zip(self.arguments, self.argument_orders, strict=True), 2):
            words = {"unused": "has no effect", "constant": "counts as a constant"}
            words["mask_after"] = f"{spelled(order)} multiplies the coupling behind the softmax"
            deviations.append(f"argument {n} {words.get(role, f'is the {role} {spelled(order)}')}")
        words = {"output": "output", "lengths": "lengths of the output"}
        words["coupling"] = f"coupling {spelled(self.coupling_order)}"
        return deviations + [
            f"entry {n} of the tuple is the {words[entry]}" for n, entry in enumerate(self.entries) if entry in words
        ]


DEFAULTS: dict[str, Any] = Options()._asdict()
DEVIATIONS: dict[tuple[str, Any], str] = {
    ("softmax", "in"): "softmax over the input capsules: not the paper's",
    ("leaky", True): "one more entry of logit 0 in every softmax (leaky): not the paper's",
    ("averaged", True): "logits averaged over the batch: a sample's output depends on the others",
    ("gradient", "last"): "gradient through the last iteration only",
    ("squash_last", False): "no squash after the last iteration",
}
# The axes of the function's arguments, and those to which a smaller tensor is expanded.
AXES = {"votes": ("BIJD", ""), "input": ("BIK", ""), "weight": ("IJDK", ""), "weight, all J": ("IJDK", "J")}
AXES |= {"logits": ("IJ", "IJ"), "bias": ("JD", "JD"), "mask": ("BI", ""), "mask_after": ("BI", "")}


def unwrapped(layer: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel or a compiled module."""
    while True:
        if isinstance(layer, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            layer = layer.module
        elif "_orig_mod" in layer._modules:
            layer = layer.get_submodule("_orig_mod")
        else:
            return layer


def tensor_of(layer: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by its name, with dots for the modules in between."""
    value: Any = layer
    for part in name.split("."):
        value = getattr(value, part)
    if not isinstance(value, Tensor):
        raise AttributeError(f"capsfast.adopt: {type(layer).__name__} has no tensor {name!r}")
    return value
