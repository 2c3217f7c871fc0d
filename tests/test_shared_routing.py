"""Routing with one matrix for all pairs, which forms no votes, against the definition, which does."""

import math
import platform
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import capsfast
from capsfast.arguments import Call, RoutingParameters, unchecked
from capsfast.bench import memory
from capsfast.ops import shared_routing
from capsfast.options import SQUASH, Options
from capsfast.reference.dynamic_routing import dynamic_routing as reference

from .support.accuracy import assert_accurate

pytestmark = pytest.mark.skipif(not capsfast.backends()["cpp"].available, reason="the extension is not built")

# B, I, J, D, K, r: sizes that fill no vector, fill some, are one, and more samples than a block has.
SIZES = [(3, 21, 3, 5, 7, 2), (2, 64, 4, 16, 16, 3), (1, 1, 1, 1, 1, 1), (11, 50, 6, 9, 33, 4), (70, 13, 2, 8, 8, 3)]


def problem(B: int, I: int, J: int, D: int, K: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float64, generator=generator)

    return {
        "u": normal(B, I, K),
        "weight": normal(1, 1, D, K) / math.sqrt(K),
        "shared": normal(I, J),
        "sample": normal(B, I, J),
        "mask": torch.rand(B, I, generator=generator) < 0.7,
        "out_mask": torch.rand(B, J, generator=generator) < 0.7,
        "dv": normal(B, J, D),
    }


def call(
    u: Tensor,
    weight: Tensor,
    logits: Tensor | None,
    mask: Tensor | None,
    out_mask: Tensor | None,
    J: int,
    options: Options,
) -> Call:
    return unchecked(u, weight, RoutingParameters(logits, None, mask, out_mask), options, J)


def routed(*arguments: Any) -> Tensor:
    return shared_routing.run(call(*arguments[:7]), *arguments[7:])


def plain(
    u: Tensor,
    weight: Tensor,
    logits: Tensor | None,
    mask: Tensor | None,
    out_mask: Tensor | None,
    J: int,
    options: Options,
    accumulate: bool = True,
    scale: float = 1.0,
) -> Tensor:
    """The loop over votes ``[B, I, D]``."""
    votes = torch.einsum("dk,bik->bid", weight[0, 0], u)
    start = votes.new_zeros(*votes.shape[:2], J) if logits is None else logits.expand(*votes.shape[:2], J)
    agreement = torch.zeros_like(start)
    for t in range(options.num_iterations):
        b = agreement + start if accumulate or t == 0 else agreement
        if out_mask is not None:
            b = b.masked_fill(~out_mask[:, None], -torch.inf)
        c = b.softmax(2).nan_to_num(0.0)
        c = c if mask is None else c * mask[..., None]
        v = capsfast.squash(torch.einsum("bij,bid->bjd", c, votes), kind=options.squash, eps=options.eps)
        found = scale * torch.einsum("bid,bjd->bij", votes, v)
        found = found.detach() if options.gradient == "last" else found
        agreement = agreement + found if accumulate else found
    return v


def gradients(function: Any, given: dict[str, Tensor], logits: str | None, masks: bool, *rest: Any) -> list[Tensor]:
    """v, and the gradients of u, weight and logits."""
    needing = {name: given[name].clone().requires_grad_() for name in ("u", "weight", *([logits] if logits else []))}
    mask, out_mask = (given["mask"], given["out_mask"]) if masks else (None, None)
    v = function(needing["u"], needing["weight"], needing[logits] if logits else None, mask, out_mask, *rest)
    return [v, *torch.autograd.grad(v, list(needing.values()), given["dv"], allow_unused=True)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("gradient", ["full", "last"])
def test_values_and_gradients(size: tuple[int, ...], gradient: str) -> None:
    *sizes, r = size
    given, J = problem(*sizes), sizes[2]
    kind = SQUASH[sum(size) % len(SQUASH)]
    options = Options(r, "out", gradient, False, kind, 1e-8)
    for logits, masks, (accumulate, scale) in product(
        (None, "shared", "sample"), (False, True), ((True, 1.0), (False, 1.0), (True, 2.5))
    ):
        rest = (J, options, accumulate, scale)
        pairs = zip(
            gradients(routed, given, logits, masks, *rest),
            gradients(plain, given, logits, masks, *rest),
            strict=True,
        )
        for n, (got, wanted) in enumerate(pairs):
            wanted = torch.zeros_like(got) if wanted is None else wanted
            torch.testing.assert_close(
                got, wanted, rtol=1e-9, atol=1e-9 * float(wanted.detach().abs().max()), msg=f"{n}"
            )


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("gradient", ["full", "last"])
def test_where_less_is_kept(size: tuple[int, ...], gradient: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *sizes, r = size
    given, J = problem(*sizes), sizes[2]
    for accumulate in (True, False):
        rest = ("sample", True, J, Options(r, "out", gradient, False, "paper", 1e-8), accumulate)
        wanted = gradients(routed, given, *rest)
        with monkeypatch.context() as patch:
            patch.setattr(shared_routing, "MOST_KEPT", 0)
            found = gradients(routed, given, *rest)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [(9, 50, 4, 16, 16, 3), (6, 40, 3, 10, 20, 3)], ids=str)
def test_float32_is_as_exact_as_the_definition(size: tuple[int, ...]) -> None:
    *sizes, r = size
    given, J = problem(*sizes), sizes[2]
    options = Options(r, "out", "full", False, "paper", 1e-8)
    single = {name: value.float() if value.is_floating_point() else value for name, value in given.items()}

    def definition(u: Tensor, weight: Tensor, logits: Tensor, mask: Any, out_mask: Any, *_: Any) -> Tensor:
        return reference(call(u, weight.expand(1, J, -1, -1), logits, mask, out_mask, J, options))[0]

    truth = gradients(definition, given, "shared", True)
    loose = gradients(definition, single, "shared", True)
    got = gradients(routed, single, "shared", True, J, options)
    for name, *each in zip(("v", "du", "dweight", "dlogits"), got, truth, loose, strict=True):
        assert_accurate(name, *(value.detach() for value in each), slack=2)


@pytest.mark.parametrize("ratio", [0, 10, 100])
@pytest.mark.parametrize("kind", ["paper", "unit"])
def test_what_the_matrix_maps_to_nothing_is_not_squared(ratio: float, kind: str) -> None:
    """An offset of u in the null space of S changes no vote, but a product with S^T S would round it off squared.

    The error may grow with the offset times the sum of the coupling, which S z has and a mean of votes has not.
    """
    J, options = 4, Options(3, "out", "full", False, kind, 1e-8)
    given = problem(6, 50, J, 8, 16)
    null = torch.linalg.svd(given["weight"][0, 0]).Vh[8]
    given["u"] = given["u"] + ratio * null
    single = {name: value.float() if value.is_floating_point() else value for name, value in given.items()}
    # What rounding makes of the offset itself is no error of the routing.
    given |= {name: single[name].double() for name in ("u", "weight", "shared")}
    truth = gradients(plain, given, "shared", False, J, options)
    loose = gradients(plain, single, "shared", False, J, options)
    got = gradients(routed, single, "shared", False, J, options)
    for name, *each in zip(("v", "du", "dweight", "dlogits"), got, truth, loose, strict=True):
        assert_accurate(name, *(value.detach() for value in each), slack=20)


@pytest.mark.parametrize(
    ("B", "I", "J", "D", "K", "taken"),
    [
        (1, 50, 4, 64, 64, True),
        (1, 20, 4, 64, 64, True),
        (64, 19, 4, 64, 64, False),  # 20 vectors take the product with S, of 19
        (64, 50, 4, 2, 256, False),  # the sums over u are 128 times as long as those over votes
        (1, 64, 4, 1024, 1024, False),
        (4, 64, 4, 1024, 1024, True),
    ],
)
def test_where_it_serves(B: int, I: int, J: int, D: int, K: int, taken: bool) -> None:
    options = Options(3, "out", "full", False, "paper", 1e-8)
    given = call(torch.empty(B, I, K), torch.empty(1, 1, D, K), None, None, None, J, options)
    assert shared_routing.serves(given, None) == taken


def test_dynamic_routing_takes_it_where_it_is_less_work(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(4, 30, 3, 6, 6)
    calls = []
    real = shared_routing.OP.kernels["cpp"]
    monkeypatch.setitem(shared_routing.OP.kernels, "cpp", lambda *args: calls.append(1) or real(*args))

    def taken(u: Tensor = given["u"], logits: Tensor | None = given["shared"], **more: Any) -> bool:
        calls.clear()
        v = capsfast.dynamic_routing(u, given["weight"].to(u.dtype), logits=logits, **more)
        more.pop("backend", None)
        wanted = capsfast.dynamic_routing(u, given["weight"].to(u.dtype), logits=logits, backend="reference", **more)
        for got, right in zip(*((v, wanted) if isinstance(v, tuple) else ((v,), (wanted,))), strict=True):
            torch.testing.assert_close(got, right, **({} if u.dtype == torch.float64 else {"rtol": 0.05, "atol": 0.02}))
        return bool(calls)

    assert taken()
    assert taken(backend="cpp")
    assert taken(u=given["u"].transpose(0, 1).contiguous().transpose(0, 1))
    assert taken(u=given["u"].transpose(1, 2).contiguous().transpose(1, 2))
    assert taken(logits=None, out_mask=given["out_mask"])
    assert not taken(backend="reference")
    assert not taken(softmax="in")
    assert not taken(leaky=True)
    assert not taken(bias=torch.ones(3, 6, dtype=torch.float64))
    assert not taken(return_coupling=True)
    assert not taken(num_iterations=11)  # 63 vectors against 30 input capsules
    assert not taken(u=given["u"].bfloat16(), logits=given["shared"].bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        capsfast.dynamic_routing(given["u"].float(), given["weight"].float(), logits=given["shared"].float())
    assert not calls


def test_what_is_masked_has_no_influence() -> None:
    given = problem(5, 30, 3, 6, 6)
    mask = given["mask"]
    mask[2] = False
    poisoned = given["u"].masked_fill(~mask[..., None], torch.nan)
    leaves = [each.clone().requires_grad_() for each in (poisoned, given["weight"])]
    v = capsfast.dynamic_routing(leaves[0], leaves[1], logits=given["shared"], mask=mask)
    clean = given["u"].masked_fill(~mask[..., None], 0.0)
    torch.testing.assert_close(v, capsfast.dynamic_routing(clean, given["weight"], logits=given["shared"], mask=mask))
    assert not v[2].any()
    du, dweight = torch.autograd.grad(v, leaves, given["dv"])
    assert not du[~mask].any() and bool(dweight.isfinite().all())


def test_pairs_without_a_finite_logit() -> None:
    given = problem(2, 20, 3, 6, 6)
    logits = given["shared"].clone()
    logits[4] = -torch.inf
    logits[5, 1] = -torch.inf
    v = capsfast.dynamic_routing(given["u"], given["weight"], logits=logits)
    wanted = capsfast.dynamic_routing(given["u"], given["weight"], logits=logits, backend="reference")
    torch.testing.assert_close(v, wanted)


@pytest.mark.parametrize("empty", range(5))
def test_empty_axes(empty: int) -> None:
    sizes = [2, 9, 2, 4, 4]
    sizes[empty] = 0
    given, options = problem(*sizes), Options(2, "out", "full", False, "paper", 1e-8)
    v, *found = gradients(routed, given, "shared", False, sizes[2], options)
    assert v.shape == (sizes[0], sizes[2], sizes[3]) and not v.any()
    assert all(not gradient.any() for gradient in found)


@pytest.mark.parametrize(
    ("dtype", "I", "r", "masks", "less"),
    [("float32", 32, 6, False, False), ("float64", 21, 3, True, False), ("float32", 32, 16, False, True)],
)
def test_arrays_larger_than_the_cache_are_the_same(
    dtype: str, I: int, r: int, masks: bool, less: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 16 MiB on, what the backward needs and the gradient of u are stored past the cache."""
    B = 2051
    monkeypatch.setattr(shared_routing, "MOST_KEPT", 0 if less else 2**40)
    options = Options(r, "out", "full", False, "paper", 1e-8)
    large = {
        name: value.to(getattr(torch, dtype)) if value.is_floating_point() else value
        for name, value in problem(B, I, 2, 64, 64).items()
    }
    v, du, dweight, dlogits = gradients(routed, large, "shared", masks, 2, options)
    kept = shared_routing._kept(I, 64, 2, 64, r, not less) * B * du.element_size()
    assert kept >= 2**24 > kept / 2 + 2**16 and (masks or du.nbytes >= 2**24)
    parts = []
    for part in (slice(0, B // 2), slice(B // 2, B)):
        half = large | {name: large[name][part] for name in ("u", "dv", "mask", "out_mask")}
        parts.append(gradients(routed, half, "shared", masks, 2, options))
    assert torch.equal(v, torch.cat([part[0] for part in parts]))
    assert torch.equal(du, torch.cat([part[1] for part in parts]))
    for whole, one, other in ((dweight, parts[0][2], parts[1][2]), (dlogits, parts[0][3], parts[1][3])):
        assert (whole - one - other).norm() < 1e-5 * whole.norm()


@pytest.mark.parametrize("accumulate", [False, True])
def test_shared_logits_are_those_of_every_sample(accumulate: bool) -> None:
    given, options = problem(11, 21, 3, 5, 7), Options(3, "out", "full", False, "paper", 1e-8)
    given["sample"] = given["shared"].repeat(11, 1, 1)
    shared = gradients(routed, given, "shared", False, 3, options, accumulate)
    sample = gradients(routed, given, "sample", False, 3, options, accumulate)
    for one, other in zip(shared[:3], sample[:3], strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(shared[3], sample[3].sum(0))


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="knows the instructions of x86")
def test_the_next_block_is_asked_for_ahead() -> None:
    """A compiler may drop calls of a function that has no effect but that: it waited for memory a third of its time."""
    command = ["objdump", "-d", "--no-show-raw-insn", "-C", shared_routing.native.extension.__file__]
    found = re.compile(r"<capsfast::(\w+)::SharedRouting<float>::(\w+)")
    there, asking, within = set(), set(), None
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if line.endswith(">:"):
            within = found.search(line)
            there |= {within[1]} if within else set()
        elif within is not None and "prefetch" in line:
            asking.add((within[1], within[2]))
    if not there:
        pytest.skip("the library has no names")
    sets = shared_routing.native.extension.build_info()["instruction_sets"]
    assert asking >= {(name, part) for name in sets for part in ("forward", "iteration_gradients")}


def test_nothing_is_kept_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    given, options, kept = problem(3, 12, 2, 4, 5), Options(2, "out", "full", False, "paper", 1e-8), []
    real = shared_routing.OP.kernels["cpp"]

    def watched(*args: Any) -> Any:
        kept.append(args[-2])
        return real(*args)

    monkeypatch.setitem(shared_routing.OP.kernels, "cpp", watched)
    weight = given["weight"].requires_grad_()
    wanted = routed(given["u"], weight, None, None, None, 2, options)
    found = [routed(given["u"], weight.detach(), None, None, None, 2, options)]
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            found.append(routed(given["u"], weight, None, None, None, 2, options))
    assert kept == [True, False, False, False]
    assert all(torch.equal(v, wanted) for v in found)


def test_a_backward_without_what_was_kept_is_an_error() -> None:
    given = problem(3, 12, 2, 4, 5)
    tensors = (given["u"].requires_grad_(), given["weight"], None, None, None)
    v, _ = torch.ops.capsfast.shared_routing(*tensors, 2, 3, "full", True, 1.0, "paper", 1e-8, False, False)
    with pytest.raises(RuntimeError, match="return_kept=False, so that it has no backward"):
        v.sum().backward()


@pytest.mark.parametrize("layout", ["every second", "transposed", "not aligned", "expanded"])
def test_poses_are_read_where_they_are(layout: str) -> None:
    B, I, J, D, K = 9, 20, 2, 8, 16
    given, options = problem(B, 2 * I, J, D, 2 * K), Options(3, "out", "full", False, "paper", 1e-8)
    whole, weight = given["u"], given["weight"][..., :K].contiguous().requires_grad_()
    if layout == "every second":
        u = whole[:, ::2, :K]
    elif layout == "transposed":
        u = whole[:, :I, :K].transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "not aligned":
        u = whole[:, :I, 1 : K + 1]
    else:
        u = whole[:1, :I, :K].expand(B, -1, -1)
    found = []
    for each in (u, u.contiguous()):
        needing = each.detach().requires_grad_()
        v = routed(needing, weight, given["shared"][:I], None, None, J, options)
        found.append((v, *torch.autograd.grad(v, (needing, weight), given["dv"])))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_any_number_of_threads_gives_the_same() -> None:
    given = problem(300, 20, 2, 8, 8)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            options = Options(3, "out", "full", False, "paper", 1e-8)
            found.append(gradients(routed, given, "shared", False, 2, options))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)


FORWARD_MEMORY = """
import torch, capsfast
from capsfast.bench.memory import _reset_peak, _resident

def forward(r):
    u, weight = torch.ones(32, 4096, 1), torch.ones(1, 1, 1, 1)
    torch.ops.capsfast.shared_routing(u, weight, None, None, None, 1, r, "full", True, 1.0, "paper", 1e-8, False, True)

forward(1)
_reset_peak()
before = _resident()["VmRSS"]
forward(100)
print((_resident()["VmHWM"] - before) / 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(memory.why_not()), reason=memory.why_not())
def test_a_forward_has_no_memory_for_a_backward() -> None:
    """A backward keeps the coupling of 100 iterations and the gradients of their logits: 104 MB."""
    root = Path(capsfast.__file__).parents[1]
    ran = subprocess.run([sys.executable, "-c", FORWARD_MEMORY], capture_output=True, text=True, cwd=root)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 40


def test_opcheck() -> None:
    given = problem(3, 12, 2, 4, 5)
    tensors = (given["u"], given["weight"], given["shared"], given["mask"], given["out_mask"])
    options = (2, 3, "full", True, 1.0, "paper", 1e-8)
    torch.library.opcheck(torch.ops.capsfast.shared_routing.default, (*tensors, *options, True, True))
    needing = tuple(each.clone().requires_grad_() for each in tensors[:3])
    torch.library.opcheck(torch.ops.capsfast.shared_routing.default, (*needing, *tensors[3:], *options, True, False))
    assert not torch.ops.capsfast.shared_routing(*tensors, *options, False, True)[1].numel()
    for whole in (False, True):
        v, kept = torch.ops.capsfast.shared_routing(*tensors, *options, True, whole)
        backward = (torch.ones_like(v), *tensors, kept, *options, [True] * 3)
        torch.library.opcheck(torch.ops.capsfast.shared_routing_backward.default, backward)


def test_torch_func_and_compile() -> None:
    given = problem(3, 12, 2, 4, 5)

    def loss(weight: Tensor, u: Tensor) -> Tensor:
        return (capsfast.dynamic_routing(u, weight, logits=given["shared"]) * given["dv"]).sum()

    wanted = torch.func.grad(lambda weight: plain_loss(weight, given))(given["weight"])
    torch.testing.assert_close(torch.func.grad(loss)(given["weight"], given["u"]), wanted)
    weight = given["weight"].clone().requires_grad_()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(weight, given["u"]).backward()
    torch.testing.assert_close(weight.grad, wanted)


@pytest.mark.parametrize("batch", ["dynamic", "unknown"])
def test_compiled_for_batches_of_any_size(batch: str) -> None:
    given, options = problem(6, 20, 2, 4, 5), Options(3, "out", "full", False, "paper", 1e-8)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(u: Tensor) -> Tensor:
        return capsfast.dynamic_routing(u, given["weight"], logits=given["shared"])

    for B in (6, 4):
        u = given["u"][:B].clone().requires_grad_()
        if batch == "dynamic":
            torch._dynamo.mark_dynamic(u, 0)
        else:
            torch._dynamo.decorators.mark_unbacked(u, 0)
        v = compiled(u)
        wanted = plain(u, given["weight"], given["shared"], None, None, 2, options)
        torch.testing.assert_close(v, wanted)
        torch.testing.assert_close(*(torch.autograd.grad(each, u, given["dv"][:B])[0] for each in (v, wanted)))


def plain_loss(weight: Tensor, given: dict[str, Tensor]) -> Tensor:
    v = plain(given["u"], weight, given["shared"], None, None, 2, Options(3, "out", "full", False, "paper", 1e-8))
    return (v * given["dv"]).sum()
