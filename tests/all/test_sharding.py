"""The ops on DTensors of two processes (gloo): results and gradients as in one process, in the expected places."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import capsfast
from capsfast.environment import native

from ..support.problems import LOADED, LOADED_OUT, AnyCase, Case, PassCase, Problem, call, make, run
from ..support.ranks import on_two_ranks

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo"),
    pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}"),
]

SHAPE = (4, 6, 4, 5, 3)
# The axes of tensors and results; S: positions.
AXES = {"u": "BIK", "weight": "IJDK", "votes": "BIJDS", "bias": "JD", "mask": "BIS", "out_mask": "BJ", "prior": "BJ"}
AXES |= {**dict.fromkeys(("query", "precision", "center", "v", "first", "second"), "BJDS"), "activation": "BIS"}
AXES |= {"lse": "BIS", "mass": "BJS", "c": "BIJS", "weights": "BIJS"}
PASS = PassCase(query=True, precision=True, center=True, prior=True, logits="IJ", activation=True)
MORE = replace(PASS, second=True, weights=True)


def check(problem: Problem, axis: str, sums: str | None = None) -> None:
    """Compares one process with a run where every tensor is split along ``axis``, a letter of its axes.

    Results without the axis are partial sums. sums: inputs whose gradients are partial sums too; None compares only
    values, not placements.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    case, mesh = problem.case, init_device_mesh("cpu", (2,))
    axes = {**AXES, "logits": case.logits, "log_sum": "BJ" if getattr(case, "normalize", "") == "in" else "BI"}
    axes |= {"weight": "1JDK"} if case.shared else {}

    def place(name: str) -> Any:
        return Shard(axes[name].index(axis)) if axis and axis in axes[name] else Replicate()

    def split(name: str, value: Tensor) -> Tensor:
        return distribute_tensor(value, mesh, [place(name)])

    wanted = run(problem, "cpp")
    placements: dict[str, Any] = {}

    def called(given: Problem, inputs: dict[str, Tensor], backend: str | None) -> Any:
        found = call(given, inputs, backend)
        for name, value in case.outputs(found).items():
            assert isinstance(value, DTensor)
            placements[name] = Partial() if axis and axis not in axes[name] else place(name)
            assert sums is None or value.placements == (placements[name],), name
        return found

    gradients = {name: value for name, value in problem.gradients.items() if name in wanted}
    given = replace(problem, gradients=gradients).map(split)
    for name, got in run(given, "cpp", function=called).items():
        if name in {f"d{value}" for value in problem.inputs} and sums is not None:
            expected = Partial() if name[1:] in sums.split() else place(name[1:])
            assert got.placements == (expected,), name  # type: ignore[attr-defined]
        torch.testing.assert_close(got.full_tensor(), wanted[name], msg=name)  # type: ignore[attr-defined]


def every_rule(rank: int) -> None:
    def of(case: AnyCase, axis: str, sums: str | None = None, op: str = "") -> None:
        check(make(SHAPE, case, op), axis, sums)

    # One op with several options in turn: this would show a rule that was cached for other options.
    of(LOADED_OUT, "B", "weight logits bias")
    of(LOADED, "B", "weight bias")
    of(LOADED, "J", "u")
    of(Case(shared=True, softmax="in", coupling=False), "J", "u")
    of(Case(shared=True, coupling=False), "B", "weight")
    of(LOADED_OUT, "", "")
    # Without a rule tensors are gathered first.
    of(LOADED_OUT, "J")
    of(LOADED, "I")
    of(LOADED_OUT, "B", "logits bias", "route_votes")
    of(LOADED, "J", None, "route_votes")
    of(replace(MORE, lse=True), "B", "weight logits")
    of(replace(MORE, lse=True, normalize="in"), "B", "weight logits")
    of(replace(MORE, lse=True, normalize="in"), "J", "u activation")
    of(replace(MORE, lse=True, normalize="in"), "I")
    of(replace(PASS, normalize="sigmoid"), "J", "u activation")
    of(replace(PASS, normalize="lse", second=True), "J", "u activation lse")
    of(replace(PASS, normalize="none"), "J", "u activation")
    summed = "query precision center prior"
    of(replace(MORE, lse=True), "I", summed)
    of(replace(PASS, normalize="lse", second=True), "I", summed)
    of(replace(PASS, lse=True), "B", "logits", "votes_pass")
    of(replace(PASS, normalize="none"), "I", summed, "votes_pass")
    of(replace(PASS, normalize="sigmoid"), "J", None, "votes_pass")
    for axis in "BS":
        of(Case(softmax="in", logits="IJ", mask=True, spatial=(6,)), axis)
    for axis in (0, 4, 5):
        split_votes_of_all_outputs(axis)


def split_votes_of_all_outputs(axis: int) -> None:
    """Votes that output capsules share, at the positions of an image, split along ``axis``."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh, draw = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(0)
    votes, logits = torch.randn(4, 6, 1, 5, 2, 6, generator=draw), torch.randn(6, 3, generator=draw)
    leaves = [votes.requires_grad_(), distribute_tensor(votes.detach(), mesh, [Shard(axis)]).requires_grad_()]
    for leaf, prior in zip(leaves, (logits, distribute_tensor(logits, mesh, [Replicate()])), strict=True):
        capsfast.route_votes(leaf, 2, logits=prior, backend="cpp").square().sum().backward()
    wanted, got = (leaf.grad for leaf in leaves)
    torch.testing.assert_close(got.full_tensor(), wanted)  # type: ignore[union-attr]


def test_dtensors_on_two_ranks(tmp_path: Path) -> None:
    on_two_ranks(every_rule, tmp_path)
