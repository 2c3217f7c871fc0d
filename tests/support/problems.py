"""Inputs for the routing and pass ops, and one way to run them on any backend."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

import capsfast
from capsfast.ops.contract import Contract
from capsfast.options import Options, PassOptions

from .backends import OP_OF, Shape

# Shapes that an emulated backend has time for: more outputs than one program holds, with several input capsules and
# with several tiles of the batch; D not a power of two, K in steps, tiles of the batch. Slow shapes come first, because
# the first tier takes the last rows.
EMULATED = (
    (2, 4, 330, 3, 1),
    (34, 1, 330, 4, 1),
    (1, 1, 1, 1, 1),
    (2, 3, 5, 17, 4),
    (33, 2, 3, 1, 70),
    (35, 5, 7, 5, 3),
)
Sizes = Shape | tuple[int, ...]  # B, I, J, D, K
LAYOUTS = ("contiguous", "sliced", "transposed")


class Shown:
    """str() shows the fields that do not have their default."""

    def __str__(self) -> str:
        known = [(item.name, getattr(self, item.name), item.default) for item in fields(self)]  # type: ignore[arg-type]
        given = [(name, value) for name, value, default in known if value != default]
        return ",".join(name if value is True else f"{name}={value}" for name, value in given) or "plain"


@dataclass(frozen=True)
class Case(Shown):
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
    def options(self) -> Options:
        return Options(**{name: getattr(self, name) for name in Options._fields})

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call besides tensors."""
        return {**self.options._asdict(), "return_coupling": self.coupling}

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
    poses and spatial: as in Case; out_mask and prior have no positions. Other fields: an option of the same name, or
    whether the tensor is given.
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
    def outputs(result: capsfast.Moments) -> dict[str, Tensor]:
        named = {**result._asdict(), "log_sum": result.lse}
        del named["lse"]  # also the name of an argument
        return {name: value for name, value in named.items() if value is not None}


AnyCase = Case | PassCase

# Each option alone, then combinations that meet in one line of a kernel.
SINGLE = (
    Case(),
    Case(coupling=False),
    *(Case(num_iterations=r) for r in (1, 2, 4, 5)),
    Case(softmax="in"),
    Case(gradient="last"),
    Case(leaky=True),
    *(Case(squash=kind) for kind in ("half", "eps_outside", "exp", "unit", "identity")),
    Case(eps=0.3),
    Case(squash_last=False),
    Case(logits="IJ"),
    Case(logits="BIJ"),
    Case(bias=True),
    Case(mask=True),
    Case(out_mask=True),
    Case(shared=True),
)
# Every tensor but the logits.
TENSORS: dict[str, Any] = {"bias": True, "mask": True, "out_mask": True}
COMBINED = (
    Case(softmax="in", leaky=True),
    Case(softmax="in", gradient="last"),
    Case(softmax="in", mask=True),
    Case(softmax="in", out_mask=True),
    Case(softmax="in", num_iterations=1, logits="IJ"),
    Case(num_iterations=1, logits="IJ", leaky=True, bias=True),
    Case(num_iterations=1, gradient="last", coupling=False),
    Case(gradient="last", logits="IJ", bias=True),
    Case(gradient="last", logits="BIJ", leaky=True, shared=True),
    Case(leaky=True, mask=True, out_mask=True),
    Case(bias=True, out_mask=True, squash="unit", eps=1e-3),
    Case(shared=True, softmax="in", logits="BIJ", coupling=False),
    Case(shared=True, mask=True, logits="BIJ", num_iterations=2),
    Case(num_iterations=4, softmax="in", leaky=True, squash="half", logits="BIJ", shared=True, **TENSORS),
    Case(softmax="in", gradient="last", leaky=True, squash="exp", logits="IJ", **TENSORS),
    Case(num_iterations=5, leaky=True, squash="eps_outside", logits="IJ", **TENSORS),
    Case(gradient="last", squash="exp", logits="BIJ", shared=True, **TENSORS),
    Case(num_iterations=2, softmax="in", squash_last=False, logits="IJ", **TENSORS),
    Case(gradient="last", leaky=True, squash="unit", squash_last=False, bias=True, out_mask=True, shared=True),
)
CASES = SINGLE + COMBINED
# Two cases that together run every line, for tests that do not vary options.
PLAIN = Case()
LOADED = Case(softmax="in", leaky=True, logits="BIJ", **TENSORS)
LOADED_OUT = Case(leaky=True, logits="IJ", **TENSORS)


@dataclass
class Problem:
    """A call and the gradients of its outputs. inputs: may need a gradient, in the order of the function."""

    op: str
    case: Any  # a Case, or a PassCase
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
        groups = {
            group: {name: function(name, value) for name, value in getattr(self, group).items()}
            for group in ("inputs", "masks", "gradients")
        }
        return replace(self, **groups)

    def to(self, dtype: torch.dtype, device: str = "cpu") -> "Problem":
        return self.map(lambda _, value: value.to(device, None if value.dtype == torch.bool else dtype))

    def laid_out(self, kind: str) -> "Problem":
        """The same values with other strides."""
        return self.map(lambda _, value: relayout(value, kind))

    def reversed(self) -> "Problem":
        """The same sums in another order: all axes but the batch reversed."""
        return self.map(reverse)

    def nudged(self) -> "Problem":
        """Every input an ulp or so up or down."""
        draw = torch.Generator().manual_seed(1)

        def nudge(value: Tensor) -> Tensor:
            sign = torch.randint(0, 2, value.shape, generator=draw).to(value) * 2 - 1
            return value * (1 + torch.finfo(value.dtype).eps * sign)

        return replace(self, inputs={name: nudge(value) for name, value in self.inputs.items()})


def batched(name: str, value: Tensor) -> bool:
    """Whether the first axis of a tensor or gradient of this name is the batch."""
    return value.dim() > 2 if name.endswith("logits") else not name.endswith(("weight", "bias"))


def reverse(name: str, value: Tensor) -> Tensor:
    """Reverses all axes but the batch, for a tensor or gradient of this name."""
    return value.flip(tuple(range(int(batched(name, value)), value.dim())))


def relayout(value: Tensor, kind: str) -> Tensor:
    """Equal values with other strides. Gaps in memory hold NaN, so a kernel must not read them."""
    if kind == "contiguous":
        return value.contiguous()
    gap = True if value.dtype == torch.bool else float("nan")
    if kind == "sliced":
        # Every second row, and a last axis with an unaligned start and an early end.
        size = [value.shape[0] * 2, *value.shape[1:-1], value.shape[-1] + 3]
        room = torch.full(size, gap, dtype=value.dtype, device=value.device)
        view = room[::2, ..., 1:-2]
    elif kind == "transposed":
        room = torch.full(tuple(reversed(value.shape)), gap, dtype=value.dtype, device=value.device)
        view = room.permute(*reversed(range(value.dim())))
    else:
        raise ValueError(kind)
    view.copy_(value)
    return view


def make(
    shape: Sizes,
    case: AnyCase = PLAIN,
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
    op = op or next(
        each.name for each in (*OPS, *PASS_OPS) if each.takes(case) and ("votes" in each.tensors) == bool(S)
    )
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


def with_one_leader(problem: Problem) -> Problem:
    """The same problem with logits that give one input capsule the whole coupling of each output capsule."""
    logits, draw = problem.inputs["logits"], torch.Generator().manual_seed(1)
    axis = 0 if logits.dim() == 2 else 1
    behind = -60 - 100 * torch.rand(logits.shape, generator=draw)
    leader = torch.rand(logits.shape, generator=draw).argmax(axis, keepdim=True)
    return replace(problem, inputs=problem.inputs | {"logits": behind.scatter(axis, leader, 0.0).to(logits)})


@dataclass(frozen=True)
class Op:
    """A function, for tests of all functions. tensors: the inputs that make the votes; poses: the one with a batch."""

    name: str
    tensors: tuple[str, ...]
    family: type = Case

    @property
    def poses(self) -> str:
        return self.tensors[0]

    def takes(self, case: Any) -> bool:
        """Whether the function has the case: pose matrices need a weight, positions need given votes."""
        alien = case.spatial if "weight" in self.tensors else case.poses or case == Case(shared=True)
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
    ) -> Problem:
        if isinstance(case, PassCase) and "weight" not in self.tensors:
            case = replace(case, shared=case.shared.replace("I", ""))  # no weight that input capsules could share
        return make(self.fit(shape), case, self.name, dtype, device)

    def __str__(self) -> str:
        return self.name


OPS = (Op("dynamic_routing", ("u", "weight")), Op("route_votes", ("votes",)))
PASS_OPS = (Op("routing_pass", ("u", "weight"), PassCase), Op("votes_pass", ("votes",), PassCase))


def registered(problem: Problem) -> list[Any]:
    """The arguments of the registered op."""
    given, names = {**problem.inputs, **problem.masks}, Contract(OP_OF[problem.op]).arguments
    J = None if "weight" in given else next(iter(problem.gradients.values())).shape[1]
    tensors = [given.get(name) for name in names[1 : names.index("J")]]
    case = problem.case
    return [given.get("votes", given.get("u")), *tensors, J, *case.options, False, *case.requests]


def registered_backward(problem: Problem, outputs: Sequence[Tensor]) -> list[Any]:
    """The arguments of the registered backward, from the outputs of the forward."""
    contract = Contract(OP_OF[problem.op])
    arguments, of_results = registered(problem)[: -contract.requests], dict(zip(contract.outputs, outputs, strict=True))
    gradients = [
        None if output.dim() == 1 else problem.gradients[name].to(output.dtype)
        for name, output in zip(problem.gradients, outputs, strict=False)
    ]
    saved = [of_results[name] for name in contract.saved]
    needed = [tensor is not None for tensor in arguments[: len(contract.needed)]]
    return [*gradients, *arguments[: contract.tensors], *saved, *arguments[contract.tensors :], needed]


def call(problem: Problem, inputs: dict[str, Tensor], backend: str | None, **other: Any) -> Any:
    """The result of the problem's function. other: arguments that replace arguments of the problem."""
    function = getattr(capsfast, problem.op)
    arguments = {**inputs, **problem.masks, **problem.case.arguments, **problem.overrides, **other}
    return function(**arguments, backend=backend)


def run(
    problem: Problem, backend: str | None, need: Sequence[str] | None = None, function: Callable[..., Any] = call
) -> dict[str, Tensor]:
    """Outputs and gradients by name, such as v, c, du, dweight, dvotes, dlogits, dbias.

    need: the inputs that require a gradient; by default all. function: takes the arguments of call().
    """
    need = tuple(problem.inputs) if need is None else need
    inputs = {name: value.detach().requires_grad_(name in need) for name, value in problem.inputs.items()}
    found = problem.case.outputs(function(problem, inputs, backend))
    pairs = [(out, problem.gradients[name]) for name, out in found.items() if out.requires_grad]
    leaves = [inputs[name] for name in need]
    if leaves:
        gradients = torch.autograd.grad(
            [out for out, _ in pairs],
            leaves,
            [grad.to(out.dtype) for out, grad in pairs],
            allow_unused=True,
            materialize_grads=True,
        )
        found |= {f"d{name}": grad for name, grad in zip(need, gradients, strict=True)}
    return {name: value.detach() for name, value in found.items()}
