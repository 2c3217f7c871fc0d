"""Inputs for the routing and pass ops, with any options, and one way to run them on any backend."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import functional, passes
from ..calls.options import STEPS, Options, PassOptions, RoutingOptions, routing_options


class Shape(NamedTuple):
    B: int
    I: int
    J: int
    D: int
    K: int

    @property
    def work(self) -> int:
        """Multiplications in one evaluation of the votes."""
        return self.B * self.I * self.J * self.D * self.K

    def __str__(self) -> str:
        return "x".join(map(str, self))


Sizes = Shape | tuple[int, ...]
FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (functional.dynamic_routing, functional.route_votes, passes.routing_pass, passes.votes_pass)
}


class Shown:
    """str() shows the fields that do not have their default."""

    def __str__(self) -> str:
        known = [(item.name, getattr(self, item.name), item.default) for item in fields(self)]  # type: ignore[arg-type]
        changed = [(name, value) for name, value, default in known if value != default]
        return ",".join(name if value is True else f"{name}={value}" for name, value in changed) or "plain"


@dataclass(frozen=True)
class RoutingCase(Shown):
    """One combination of options of a routing. Defaults as in the functions.

    logits: "", "IJ" or "BIJ". shared: weight [1, J, D, K]. coupling: ask for the coupling and send a gradient through
    it. poses: rows of pose matrices. spatial: sizes of the positions of votes and all other inputs but out_mask. Other
    fields: an option of the same name, or whether the tensor is given.
    """

    num_iterations: int = 3
    softmax: str = "out"
    gradient: str = "full"
    leaky: bool = False
    squash: str = "paper"
    eps: float = 1e-8
    squash_last: bool = True
    last_squash: str | None = None
    sharpness: float = 1.0
    accumulate: bool = True
    wide: bool = False
    logits: str = ""
    bias: bool = False
    mask: bool = False
    out_mask: bool = False
    shared: bool = False
    coupling: bool = True
    poses: int = 0
    spatial: tuple[int, ...] = ()

    @property
    def linear(self) -> bool:
        """Whether the CUDA kernels serve the case."""
        return not self.poses and not self.spatial

    @property
    def options(self) -> RoutingOptions:
        return routing_options("capsfast", **{name: getattr(self, name) for name in (*Options._fields, *STEPS)})

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call besides tensors: of the public function, or of :func:`capsfast.functional.agree`."""
        public = {name: getattr(self, name) for name in Options._fields}
        differs = self.options != Options(**public).checked("capsfast")
        return {**({"options": self.options} if differs else public), "return_coupling": self.coupling}

    @property
    def requests(self) -> tuple[bool, ...]:
        return (self.coupling,)

    @staticmethod
    def outputs(result: Any) -> dict[str, Tensor]:
        v, c = result if isinstance(result, tuple) else (result, None)
        return {"v": v} if c is None else {"v": v, "c": c}


@dataclass(frozen=True)
class PassCase(Shown):
    """One combination of the arguments of a pass. Defaults as in the functions.

    shared: axes of the weight or the votes with size 1, such as "I", "J" or "IJ". logits: "", "IJ" or "BIJ".
    poses and spatial: as in RoutingCase; out_mask and prior have no positions. Other fields: an option of the same
    name, or whether the tensor is given.
    """

    query: bool = False
    precision: bool = False
    center: bool = False
    prior: bool = False
    logits: str = ""
    activation: bool = False
    mask: bool = False
    out_mask: bool = False
    normalize: str = "out"
    leaky: bool = False
    second: bool = False
    weights: bool = False
    lse: bool = False
    shared: str = ""
    poses: int = 0
    spatial: tuple[int, ...] = ()

    @property
    def linear(self) -> bool:
        """Whether the CUDA kernels serve the pass: a softmax of scores that are linear in votes of one pair each."""
        more = self.precision or self.center or self.activation or self.second or self.poses or self.spatial
        return not more and self.normalize in ("out", "in") and "J" not in self.shared

    @property
    def options(self) -> PassOptions:
        return PassOptions(self.normalize, self.leaky, self.second)

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.options._asdict(), "return_weights": self.weights, "return_lse": self.lse}

    @property
    def requests(self) -> tuple[bool, ...]:
        return self.weights, self.lse

    @staticmethod
    def outputs(result: passes.Moments) -> dict[str, Tensor]:
        named = {**result._asdict(), "log_sum": result.lse}
        del named["lse"]  # also the name of an argument
        return {name: value for name, value in named.items() if value is not None}


AnyCase = RoutingCase | PassCase

PLAIN = RoutingCase()
# Two routings that together take every tensor and run every line.
LOADED = RoutingCase(softmax="in", leaky=True, logits="BIJ", bias=True, mask=True, out_mask=True)
LOADED_OUT = RoutingCase(leaky=True, logits="IJ", bias=True, mask=True, out_mask=True)
# The passes of each kind of routing, and a linear pass with all its arguments.
LINEAR = PassCase(query=True)
QUADRATIC = PassCase(precision=True, center=True, prior=True, activation=True, second=True)
LOADED_PASS = PassCase(
    query=True, prior=True, logits="BIJ", mask=True, out_mask=True, leaky=True, weights=True, lse=True, shared="I"
)


@dataclass
class Problem:
    """A call and the gradients of its outputs. inputs: may need a gradient, in the order of the function."""

    op: str
    case: Any  # an AnyCase
    inputs: dict[str, Tensor]
    masks: dict[str, Tensor]
    gradients: dict[str, Tensor]  # of the outputs, by their names
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.inputs.values())).dtype

    @property
    def dv(self) -> Tensor:
        return self.gradients["v"]  # [B, J, D]

    @property
    def dc(self) -> Tensor:
        return self.gradients["c"]  # [B, I, J]

    def map(self, function: Callable[[str, Tensor], Tensor]) -> "Problem":
        """The problem with ``function(name, value)`` of every tensor."""
        groups: dict[str, Any] = {
            group: {name: function(name, value) for name, value in getattr(self, group).items()}
            for group in ("inputs", "masks", "gradients")
        }
        return replace(self, **groups)

    def to(self, dtype: torch.dtype, device: str = "cpu") -> "Problem":
        return self.map(lambda _, value: value.to(device, None if value.dtype == torch.bool else dtype))

    def copied(self) -> "Problem":
        """The same values in new memory."""
        return self.map(lambda _, value: value.clone())

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.inputs.values(), *self.masks.values(), *self.gradients.values()]

    def overwrite(self, other: "Problem") -> None:
        """Copies the values of another problem of the same shapes into the tensors of this one."""
        for target, source in zip(self.tensors, other.tensors, strict=True):
            target.copy_(source)


def make(
    shape: Sizes,
    case: Any = PLAIN,
    op: str = "",
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    seed: int = 0,
) -> Problem:
    """Normal inputs whose routing is neither uniform nor saturated.

    Values are drawn in float64 on the CPU, then converted, so every dtype and device gets the same problem.
    op: by default the function that takes the case: with positions the one for given votes, else the one for a weight.
    """
    B, I, J, D, K = shape
    S, P, is_pass = case.spatial, case.poses, isinstance(case, PassCase)
    op = op or next(op.name for op in (*OPS, *PASS_OPS) if op.takes(case) and ("votes" in op.tensors) == bool(S))
    draw = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64)

    def uniform(*size: int) -> Tensor:
        return 0.2 + torch.rand(*size, generator=draw, dtype=torch.float64)

    # Votes of length sqrt(8) at most: longer ones agree so much that the coupling saturates.
    spread = min(1.0, (8 / max(D, 1)) ** 0.5)
    shared = case.shared if is_pass else "I" * case.shared
    rows, columns = 1 if "I" in shared else I, 1 if "J" in shared else J
    inputs: dict[str, Tensor] = {}
    if op in ("route_votes", "votes_pass"):
        inputs["votes"] = normal(B, I, columns, D, *S) * spread
    elif P:
        assert D % P == 0, f"votes of {D} numbers do not have {P} rows"
        inputs["u"] = normal(B, I, P, K)
        inputs["weight"] = normal(rows, columns, K, D // P) * (spread / max(K, 1) ** 0.5)
    else:
        inputs["u"] = normal(B, I, K)
        inputs["weight"] = normal(rows, columns, D, K) * (spread / max(K, 1) ** 0.5)
    optional: dict[str, Callable[[], Tensor]] = {
        "query": lambda: 0.5 * normal(B, J, D, *S),
        "precision": lambda: uniform(B, J, D, *S) / max(D, 1) ** 0.5,
        "center": lambda: 0.3 * normal(B, J, D, *S),
        "prior": lambda: normal(B, J),
        "logits": lambda: normal(*((I, J) if case.logits == "IJ" else (B, I, J, *S))),
        "activation": lambda: uniform(B, I, *S),
        "bias": lambda: 0.5 * normal(J, D),
    }
    inputs |= {name: value() for name, value in optional.items() if getattr(case, name, False)}
    if getattr(case, "normalize", "") == "lse":
        inputs["lse"] = 1 + normal(B, I, *S)
    masks = {}
    for name, size in (("mask", (B, I, *S)), ("out_mask", (B, J))):
        if getattr(case, name):
            masks[name] = torch.rand(*size, generator=draw) > 0.3
            if getattr(case, "lse", False) and size[1] > 0:
                masks[name][:, 0] = True  # an empty log-sum-exp is infinite and cannot be compared
    sizes = {"v": (B, J, D, *S), "c": (B, I, J, *S)}
    if is_pass:
        of_lse = J if case.normalize == "in" else I
        sizes = {"mass": (B, J, *S), "first": (B, J, D, *S), "second": (B, J, D, *S), "weights": (B, I, J, *S)}
        sizes["log_sum"] = (B, of_lse, *S)
    gradients = {name: normal(*size) * (0.3 if name in ("c", "weights") else 1) for name, size in sizes.items()}
    return Problem(op, case, inputs, masks, gradients).to(dtype, device)


def stretched(problem: Problem, exponent: int) -> Problem:
    """With input capsules (or given votes) that are 10**exponent times as long."""
    name, value = next(iter(problem.inputs.items()))
    return replace(problem, inputs={**problem.inputs, name: value * 10.0**exponent})


@dataclass(frozen=True)
class Op:
    """A function, for tests of all functions. tensors: the inputs that make the votes; poses: the one with a batch."""

    name: str
    tensors: tuple[str, ...]
    family: type = RoutingCase

    @property
    def poses(self) -> str:
        return self.tensors[0]

    def takes(self, case: Any) -> bool:
        """Whether the function has the case: pose matrices need a weight, positions need given votes."""
        alien = case.spatial if "weight" in self.tensors else case.poses or case == RoutingCase(shared=True)
        return isinstance(case, self.family) and not alien

    def fit(self, shape: Sizes) -> Shape:
        """The shape for this op: given votes have no K."""
        fitted = Shape._make(shape)
        return fitted if "weight" in self.tensors else fitted._replace(K=1)

    def make(
        self,
        shape: Sizes,
        case: AnyCase = PLAIN,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
        seed: int = 0,
    ) -> Problem:
        if isinstance(case, PassCase) and "weight" not in self.tensors:
            case = replace(case, shared=case.shared.replace("I", ""))  # no weight that input capsules could share
        return make(self.fit(shape), case, self.name, dtype, device, seed)

    def __str__(self) -> str:
        return self.name


OPS = (Op("dynamic_routing", ("u", "weight")), Op("route_votes", ("votes",)))
PASS_OPS = (Op("routing_pass", ("u", "weight"), PassCase), Op("votes_pass", ("votes",), PassCase))


def call(problem: Problem, inputs: dict[str, Tensor], backend: Any, **other: Any) -> Any:
    """The result of the problem's function. other: arguments that replace arguments of the problem."""
    arguments = {**inputs, **problem.masks, **problem.case.arguments, **problem.overrides, **other}
    if "options" in arguments:  # which the public functions do not have
        u, weight = (arguments.pop(name, None) for name in ("votes" if "votes" in inputs else "u", "weight"))
        return functional.agree(u, weight, **arguments, backend=backend)
    return FUNCTIONS[problem.op](**arguments, backend=backend)


def run(
    problem: Problem, backend: str | None, need: Sequence[str] | None = None, function: Callable[..., Any] = call
) -> dict[str, Tensor]:
    """Outputs and gradients by name, such as v, c, du, dweight, dvotes, dlogits, dbias.

    need: the inputs that require a gradient; by default all. function: takes the arguments of call().
    """
    need = tuple(problem.inputs) if need is None else need
    inputs = {name: value.detach().requires_grad_(name in need) for name, value in problem.inputs.items()}
    outputs = problem.case.outputs(function(problem, inputs, backend))
    pairs = [(out, problem.gradients[name]) for name, out in outputs.items() if out.requires_grad]
    leaves = [inputs[name] for name in need]
    if leaves:
        gradients = torch.autograd.grad(
            [out for out, _ in pairs],
            leaves,
            [grad.to(out.dtype) for out, grad in pairs],
            allow_unused=True,
            materialize_grads=True,
        )
        outputs |= {f"d{name}": grad for name, grad in zip(need, gradients, strict=True)}
    return {name: value.detach() for name, value in outputs.items()}
