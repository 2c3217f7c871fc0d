"""The problems of the package, and what only the tests ask of them: tables of options, layouts, registered ops."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from capsfast.bench.problems import (
    LOADED,
    LOADED_OUT,
    OPS,
    PASS_OPS,
    PLAIN,
    AnyCase,
    Op,
    PassCase,
    Problem,
    Sizes,
    call,
    make,
    run,
    stretched,
)
from capsfast.bench.problems import RoutingCase as Case
from capsfast.ops.contract import Contract

from .backends import OP_OF

__all__ = [
    "LOADED",
    "LOADED_OUT",
    "OPS",
    "PASS_OPS",
    "PLAIN",
    "AnyCase",
    "Case",
    "Op",
    "PassCase",
    "Problem",
    "Sizes",
    "call",
    "make",
    "run",
    "stretched",
]

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
LAYOUTS = ("contiguous", "sliced", "transposed")


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
# Without what sends a call of the backend "cuda" away from its rows family: options, the returned coupling.
QUIET = Case(coupling=False)
QUIET_CASES = (
    QUIET,
    Case(gradient="last", coupling=False),
    Case(num_iterations=1, coupling=False),
    Case(num_iterations=2, bias=True, squash="half", coupling=False),
    Case(shared=True, coupling=False),
    Case(squash="unit", last_squash="paper", sharpness=2.0, accumulate=False, coupling=False),
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
# Options of the op that the public functions do not have: k-means, cosines, and each in another combination.
STEPPED = (
    Case(squash="unit", last_squash="paper", sharpness=2.0, accumulate=False),
    Case(squash="unit", last_squash="half", bias=True, wide=True),
    Case(num_iterations=4, sharpness=0.5, logits="BIJ", mask=True, coupling=False),
    Case(5, "in", leaky=True, squash="exp", sharpness=3.0, accumulate=False, **TENSORS),
    Case(4, gradient="last", squash="half", last_squash="identity", accumulate=False, shared=True),
    Case(4, "in", gradient="last", last_squash="unit", sharpness=2.0, logits="IJ", **TENSORS),
)


def laid_out(problem: Problem, kind: str) -> Problem:
    """The same values with other strides."""
    return problem.map(lambda _, value: relayout(value, kind))


def reordered(problem: Problem) -> Problem:
    """The same sums in another order: all axes but the batch reversed."""
    return problem.map(reverse)


def nudged(problem: Problem) -> Problem:
    """Every input an ulp or so up or down."""
    draw = torch.Generator().manual_seed(1)

    def nudge(value: Tensor) -> Tensor:
        sign = torch.randint(0, 2, value.shape, generator=draw).to(value) * 2 - 1
        return value * (1 + torch.finfo(value.dtype).eps * sign)

    return replace(problem, inputs={name: nudge(value) for name, value in problem.inputs.items()})


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


def with_one_leader(problem: Problem) -> Problem:
    """The same problem with logits that give one input capsule the whole coupling of each output capsule."""
    logits, draw = problem.inputs["logits"], torch.Generator().manual_seed(1)
    axis = 0 if logits.dim() == 2 else 1
    behind = -60 - 100 * torch.rand(logits.shape, generator=draw)
    leader = torch.rand(logits.shape, generator=draw).argmax(axis, keepdim=True)
    return replace(problem, inputs=problem.inputs | {"logits": behind.scatter(axis, leader, 0.0).to(logits)})


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
