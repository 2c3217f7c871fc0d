"""The ops on DTensors of two processes (gloo): results and gradients as in one process, in the expected places."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import capsfast
from capsfast import native

from ..support.problems import LOADED, LOADED_OUT, Case, make
from ..support.ranks import on_two_ranks

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo"),
    pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}"),
]

SHAPE = (4, 6, 4, 5, 3)
B, I, J, D, K = SHAPE


def in_place(axes: str, axis: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    return Shard(axes.index(axis)) if axis and axis in axes else Replicate()


def check(
    function: Callable[..., Any],
    tensors: dict[str, tuple[str, Tensor]],
    axis: str,
    outputs: dict[str, str],
    sums: str | None = None,
) -> None:
    """Compares one process with a run where every tensor is split along ``axis``, a letter of its axes.

    outputs: the axes of each result; results without the axis are partial sums. sums: inputs whose gradients are
    partial sums too; None compares only values, not placements.
    """
    from torch.distributed.tensor import DTensor, Partial, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    floating = [name for name, (_, value) in tensors.items() if value.is_floating_point()]
    plain = {name: value.clone().requires_grad_(name in floating) for name, (_, value) in tensors.items()}
    split = {
        name: distribute_tensor(value, mesh, [in_place(axes, axis)]).requires_grad_(name in floating)
        for name, (axes, value) in tensors.items()
    }
    one, both = (list(function(**inputs)) for inputs in (plain, split))
    for (name, axes), want, got in zip(outputs.items(), one, both, strict=True):
        assert isinstance(got, DTensor)
        if sums is not None:
            assert got.placements == (Partial() if axis and axis not in axes else in_place(axes, axis),), name
        torch.testing.assert_close(got.full_tensor(), want, msg=name)
    seeds = [
        torch.randn(value.shape, generator=torch.Generator().manual_seed(n)).to(value) for n, value in enumerate(one)
    ]
    wanted = torch.autograd.grad(one, [plain[name] for name in floating], seeds)
    places = [in_place(axes, axis) for axes in outputs.values()]
    ours = [distribute_tensor(seed, mesh, [place]) for seed, place in zip(seeds, places, strict=True)]
    found = torch.autograd.grad(both, [split[name] for name in floating], ours)
    for name, want, got in zip(floating, wanted, found, strict=True):
        if sums is not None:
            place = Partial() if name in sums.split() else in_place(tensors[name][0], axis)
            assert got.placements == (place,), name
        torch.testing.assert_close(got.full_tensor(), want, msg=name)


AXES = {"u": "BIK", "weight": "IJDK", "votes": "BIJD", "bias": "JD", "mask": "BI", "out_mask": "BJ"}


def routing(case: Case, op: str, axis: str, sums: str | None = None) -> None:
    problem = make(SHAPE, case, op)
    axes = {**AXES, "logits": case.logits, **({"weight": "1JDK"} if case.shared else {})}
    tensors = {name: (axes[name], value) for name, value in (problem.inputs | problem.masks).items()}

    def call(**inputs: Tensor) -> tuple[Tensor, ...]:
        found = getattr(capsfast, op)(**inputs, **case.arguments, backend="cpp")
        return found if case.coupling else (found,)

    check(call, tensors, axis, {"v": "BJD", **({"c": "BIJ"} if case.coupling else {})}, sums)


def passes(normalize: str, op: str, axis: str, sums: str | None = None, **options: Any) -> None:
    draw = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return 0.5 * torch.randn(size, generator=draw, dtype=torch.float64)

    tensors = {
        "u": ("BIK", normal(B, I, K)),
        "weight": ("IJDK", normal(I, J, D, K)),
        "votes": ("BIJD", normal(B, I, J, D)),
        **{name: ("BJD", normal(B, J, D).abs()) for name in ("query", "precision", "center")},
        "prior": ("BJ", normal(B, J)),
        "logits": ("IJ", normal(I, J)),
        "activation": ("BI", normal(B, I)),
    }
    for name in ("votes",) if op == "routing_pass" else ("u", "weight"):
        del tensors[name]
    if normalize == "lse":
        tensors["lse"] = ("BI", 2 + normal(B, I))
    if normalize in ("out", "in"):
        options["return_lse"] = True
    outputs = (
        {"mass": "BJ", "first": "BJD", "second": "BJD"} if options.get("second") else {"mass": "BJ", "first": "BJD"}
    )
    if options.get("return_weights"):
        outputs["weights"] = "BIJ"
    if options.get("return_lse"):
        outputs["lse"] = "BI" if normalize == "out" else "BJ"

    def call(**inputs: Tensor) -> list[Tensor]:
        found = getattr(capsfast, op)(**inputs, normalize=normalize, **options, backend="cpp")
        return [value for value in found if value is not None]

    check(call, tensors, axis, outputs, sums)


def positions(softmax: str, axis: str, sums: str) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = {
        "votes": ("BIJDS", torch.randn(B, I, J, D, 6, generator=draw, dtype=torch.float64)),
        "logits": ("IJ", torch.randn(I, J, generator=draw, dtype=torch.float64)),
        "mask": ("BIS", torch.rand(B, I, 6, generator=draw) > 0.3),
    }

    def call(**inputs: Tensor) -> tuple[Tensor, ...]:
        return capsfast.route_votes(**inputs, softmax=softmax, return_coupling=True, backend="cpp")

    check(call, tensors, axis, {"v": "BJDS", "c": "BIJS"}, sums)


def every_rule(rank: int) -> None:
    # One op with several options in turn: this would show a rule that was cached for other options.
    routing(LOADED_OUT, "dynamic_routing", "B", "weight logits bias")
    routing(LOADED, "dynamic_routing", "B", "weight bias")
    routing(LOADED, "dynamic_routing", "J", "u")
    routing(Case(shared=True, softmax="in", coupling=False), "dynamic_routing", "J", "u")
    routing(Case(shared=True, coupling=False), "dynamic_routing", "B", "weight")
    routing(LOADED_OUT, "dynamic_routing", "", "")
    # Without a rule tensors are gathered first.
    routing(LOADED_OUT, "dynamic_routing", "J")
    routing(LOADED, "dynamic_routing", "I")
    routing(LOADED_OUT, "route_votes", "B", "logits bias")
    routing(LOADED, "route_votes", "J")
    passes("out", "routing_pass", "B", "weight logits", second=True, return_weights=True)
    passes("in", "routing_pass", "B", "weight logits", second=True, return_weights=True)
    passes("in", "routing_pass", "J", "u activation", second=True, return_weights=True)
    passes("in", "routing_pass", "I", second=True, return_weights=True)
    passes("sigmoid", "routing_pass", "J", "u activation")
    passes("lse", "routing_pass", "J", "u activation lse", second=True)
    passes("none", "routing_pass", "J", "u activation")
    summed = "query precision center prior"
    passes("out", "routing_pass", "I", summed, second=True, return_weights=True)
    passes("lse", "routing_pass", "I", summed, second=True)
    passes("out", "votes_pass", "B", "logits")
    passes("none", "votes_pass", "I", summed)
    passes("sigmoid", "votes_pass", "J")
    for axis in "BS":
        positions("in", axis, "logits")


def test_dtensors_on_two_ranks(tmp_path: Path) -> None:
    on_two_ranks(every_rule, tmp_path)
