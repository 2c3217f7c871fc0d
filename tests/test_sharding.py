"""The ops on DTensors of two processes (gloo): results and gradients as in one process, in the expected places."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import capsfast
from capsfast import native
from capsfast.ops._pass import from_reference
from capsfast.options import PassOptions
from capsfast.reference.routing_pass import routing_pass as reference
from capsfast.reference.votes_pass import PassParameters
from capsfast.reference.votes_pass import votes_pass as votes_reference

from .support.problems import LOADED, LOADED_OUT, Case, make
from .support.ranks import on_two_ranks

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
    """The same in one process and with every tensor split along ``axis``, a letter of its axes.

    outputs: the axes of what the function returns; those without the axis are partial sums. sums: names of inputs whose
    gradients are as well; None where nothing is said of places, only of values.
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


def stand_in(name: str, first: int, definition: Callable[..., Any]) -> None:
    """The definition as the op's kernel, where the extension has none."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"capsfast::{name}", "CPU"):
        return
    library = torch.library.Library("capsfast", "IMPL")
    between = 1 if first == 2 else 0  # tf32
    count = first + 9

    def forward(*args: Any) -> tuple[Tensor, ...]:
        parameters, rest = PassParameters(*args[first:count]), args[count:]
        J, rest = (args[1].shape[1], rest) if first == 2 else (rest[0], rest[1:])
        options = PassOptions(*rest[:3])
        found = definition(*args[:first], parameters, J, options)
        norm = found[0].new_zeros(2, *found[0].shape) if options.normalize == "in" else found[0].new_zeros(0)
        moments = from_reference(found, args[0].dtype, *rest[3 + between :])
        return tuple(value.clone() for value in (*moments, norm))

    def backward(*args: Any) -> tuple[Tensor, ...]:
        given, tensors, rest = args[:5], args[5 : 5 + count], args[5 + count + 6 :]
        needed = rest[-first - 7 :]
        options = rest[: -first - 7]
        inputs = [
            value if value is None or value.dtype == torch.bool else value.detach().requires_grad_()
            for value in tensors
        ]
        wanted = [each is not None and each.numel() > 0 for each in given]

        def differentiate() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                outputs = forward(*inputs, *options, given[3] is not None, given[4] is not None)
                leaves = [value for value, need in zip(inputs, needed, strict=False) if need]
                kept = [(value, seed) for value, seed, want in zip(outputs, given, wanted, strict=False) if want]
                return torch.autograd.grad([v for v, _ in kept], leaves, [s for _, s in kept], materialize_grads=True)

        # In a thread of its own: in that of an op autograd is off.
        with ThreadPoolExecutor(1) as pool:
            found = iter(pool.submit(differentiate).result())
        return tuple(next(found).clone() if need else tensors[0].new_zeros(0) for need in needed)

    library.impl(name, forward, "CPU")
    library.impl(f"{name}_backward", backward, "CPU")
    _libraries.append(library)


_libraries: list[torch.library.Library] = []


def every_rule(rank: int) -> None:
    # One after the other with one op: a rule that was remembered for other options would be seen.
    routing(LOADED_OUT, "dynamic_routing", "B", "weight logits bias")
    routing(LOADED, "dynamic_routing", "B", "weight bias")
    routing(LOADED, "dynamic_routing", "J", "u")
    routing(Case(shared=True, softmax="in", coupling=False), "dynamic_routing", "J", "u")
    routing(Case(shared=True, coupling=False), "dynamic_routing", "B", "weight")
    routing(LOADED_OUT, "dynamic_routing", "", "")
    # No rule of their own: they are brought together first.
    routing(LOADED_OUT, "dynamic_routing", "J")
    routing(LOADED, "dynamic_routing", "I")
    routing(LOADED_OUT, "route_votes", "B", "logits bias")
    routing(LOADED, "route_votes", "J")
    stand_in("routing_pass", 2, reference)
    stand_in("votes_pass", 1, votes_reference)
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


def test_dtensors_on_two_ranks(tmp_path: Path) -> None:
    on_two_ranks(every_rule, tmp_path)
