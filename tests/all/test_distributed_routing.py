"""Input capsules on two processes (gloo): results and gradients as in one process, and errors."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import capsfast
from capsfast import distributed

from ..support import passes, problems
from ..support.problems import CASES, Case, Problem
from ..support.ranks import on_two_ranks

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")

SHAPE = (3, 7, 4, 5, 3)
# How many of 7 input capsules the first rank has.
CUT = 4
LOCAL = {"u": 1, "weight": 0, "votes": 1, "activation": 1, "lse": 1, "mask": 1, "c": 1, "weights": 1}


def part(rank: int, name: str, value: Tensor, lse_of_inputs: bool = False) -> Tensor:
    """The part of a tensor of this name on a rank."""
    axis = value.dim() - 2 if name == "logits" else LOCAL.get(name)
    if name == "log_sum" and lse_of_inputs:
        axis = 1
    if axis is None or (name == "weight" and value.shape[0] == 1):
        return value
    return value[(slice(None),) * axis + (slice(CUT) if rank == 0 else slice(CUT, None),)]


def compare(problem: Problem, rank: int, function: Callable[..., Any], **more: Any) -> None:
    """Compares the function on the rank's part with the same problem in one process."""
    sliced = partial(part, rank, lse_of_inputs=getattr(problem.case, "normalize", "") == "out")
    if "weight" in problem.inputs and problem.inputs["weight"].shape[0] == 1:
        more["shared_weight"] = True

    def called(given: Problem, inputs: dict[str, Tensor], backend: str | None) -> Any:
        return function(**inputs, **given.masks, **given.case.arguments, **more, backend=backend)

    wanted = problems.run(problem, "reference")
    for name, value in problems.run(problem.map(sliced), "reference", function=called).items():
        close(value, sliced(name.removeprefix("d"), wanted[name]), f"{name}, {problem.case}")


def close(value: Tensor, wanted: Tensor, of: str) -> None:
    torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12, msg=lambda text: f"{of}: {text}")


def all_routings(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for n, case in enumerate(CASES):
        problem = problems.make(SHAPE, case)
        compare(problem, rank, distributed.dynamic_routing, group=mesh if n % 2 else None)
    one_output = problems.make((3, 7, 1, 5, 3), Case(softmax="in"))
    compare(one_output, rank, distributed.dynamic_routing)


def all_passes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    cases = {
        *(passes.normalized(passes.EVERYTHING, how) for how in passes.WAYS),
        *(passes.normalized(passes.QUADRATIC, how) for how in ("out", "in")),
        passes.PassCase(query=True, shared="I"),
        passes.PassCase(query=True, normalize="in", shared="J", weights=True, second=True),
    }
    for case in sorted(cases, key=str):
        compare(passes.make(SHAPE, case), rank, distributed.routing_pass, group=mesh)
    for how in passes.WAYS:
        case = passes.normalized(passes.EVERYTHING, how)
        compare(passes.make(SHAPE, case, "votes_pass"), rank, distributed.votes_pass)


def the_rest(rank: int) -> None:
    second_derivatives(rank)
    sixteen_bits(rank)
    errors(rank)


def second_derivatives(rank: int) -> None:
    problem = problems.make(SHAPE, Case(softmax="in", leaky=True))
    u, weight = problem.inputs["u"], problem.inputs["weight"]

    def twice(function: Callable[..., Any], u: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        u, weight = u.clone().requires_grad_(), weight.clone().requires_grad_()
        v = function(u, weight, 3, softmax="in", leaky=True, backend="reference")
        (dv,) = torch.autograd.grad(v.square().sum(), u, create_graph=True)
        # A sum over all input capsules, so over the ranks.
        return torch.autograd.grad(dv.square().sum(), [u, weight])

    wanted = twice(capsfast.dynamic_routing, u, weight)

    def over_ranks(u: Tensor, weight: Tensor, *rest: Any, **options: Any) -> Tensor:
        found: Tensor = distributed.dynamic_routing(u, weight, *rest, **options)
        return found

    found = twice(over_ranks, part(rank, "u", u), part(rank, "weight", weight))
    for name, value, want in zip(("u", "weight"), found, wanted, strict=True):
        close(value, part(rank, name, want), f"second derivative, {name}")


def sixteen_bits(rank: int) -> None:
    case = Case(gradient="last", logits="IJ", bias=True, coupling=False)
    problem = problems.make(SHAPE, case, dtype=torch.bfloat16)
    wanted = problems.run(problem.to(torch.float32), "reference")["v"]
    inputs = {name: part(rank, name, value).requires_grad_() for name, value in problem.inputs.items()}
    v = distributed.dynamic_routing(**inputs, **case.arguments, backend="reference")
    assert v.dtype == torch.bfloat16
    torch.testing.assert_close(v.float(), wanted, rtol=0.02, atol=0.02)


def errors(rank: int) -> None:
    u, weight = torch.randn(3, 4, 2), torch.randn(4, 5 + rank, 6, 2)
    with pytest.raises(
        ValueError, match=r"on all ranks.* got rank 0: \[3, 5, 6\] float32; rank 1: \[3, 6, 6\] float32"
    ):
        distributed.dynamic_routing(u, weight, backend="reference")
    with pytest.raises(ValueError, match=r"weight must have I=4 rows.* got 1; .* pass shared_weight=True"):
        distributed.dynamic_routing(u, weight[:1])
    with pytest.raises(ValueError, match="with shared_weight the weight must have 1 row, got 4"):
        distributed.routing_pass(u, weight, shared_weight=True)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "inputs"))
    with pytest.raises(ValueError, match=r"must have 1 dimension, got 2; pick one with mesh\['inputs'\]"):
        distributed.routing_pass(u, weight, group=mesh)
    with pytest.raises(TypeError, match="group must be a process group or a device mesh, got str"):
        distributed.routing_pass(u, weight, group="inputs")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"u must be on a device of the group .*got meta"):
        distributed.routing_pass(u.to("meta"), weight.to("meta"))
    alone = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match=r"this rank \(1\) must be in the group"):
            distributed.votes_pass(torch.randn(2, 3, 4, 5), group=alone)
    from torch.distributed.tensor import Shard, distribute_tensor

    with pytest.raises(TypeError, match=r"got a DTensor; pass u.to_local\(\)"):
        distributed.routing_pass(distribute_tensor(u, mesh["inputs"], [Shard(1)]), weight)


def everything(rank: int) -> None:
    all_routings(rank)
    all_passes(rank)
    the_rest(rank)


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    on_two_ranks(everything, tmp_path)


def test_no_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"must be a process group, got none; call torch.distributed.init_process"):
        distributed.dynamic_routing(torch.randn(2, 3, 4), torch.randn(3, 5, 6, 4))
