"""Routing with weights that input capsules share, without votes, against the definition, which forms votes."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import capsfast
from capsfast.arguments import Call, RoutingParameters, unchecked
from capsfast.ops import factored_routing
from capsfast.options import SQUASH, Options
from capsfast.reference.dynamic_routing import dynamic_routing as reference

from .support.accuracy import assert_accurate

pytestmark = pytest.mark.skipif(not capsfast.backends()["cpp"].available, reason="the extension is not built")

# B, I, J, D, K, r: sizes that fill no vector, some vectors, sizes of 1, and more samples than a block has.
SIZES = [(3, 21, 3, 5, 7, 2), (2, 64, 4, 16, 16, 3), (1, 1, 1, 1, 1, 1), (11, 50, 6, 9, 33, 4), (70, 13, 2, 8, 8, 3)]
PLAIN = Options(3, "out", "full", False, "paper", 1e-8)
NAMES = ("v", "coupling", "du", "dweight", "dlogits", "dbias")


def problem(B: int, I: int, J: int, D: int, K: int, columns: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float64, generator=generator)

    return {
        "u": normal(B, I, K),
        "weight": normal(1, columns, D, K) / math.sqrt(K),
        "shared": normal(I, J),
        "sample": normal(B, I, J),
        "bias": normal(J, D),
        "mask": torch.rand(B, I, generator=generator) < 0.7,
        "out_mask": torch.rand(B, J, generator=generator) < 0.7,
        "dv": normal(B, J, D),
        "dcoupling": normal(B, I, J),
    }


def single(given: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in given.items()}


def routed(call: Call, **more: Any) -> tuple[Tensor, Tensor]:
    return factored_routing.run(call, True, **more)


def definition(call: Call) -> tuple[Tensor, Tensor]:
    weight = call.weight
    assert weight is not None
    call = unchecked(call.u, weight.expand(1, call.J, -1, -1), call.parameters, call.options)
    return reference(call)[:2]


def loop(call: Call, accumulate: bool = True, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The definition, with two options more: a temperature, and logits that do not add up."""
    o, (logits, bias, mask, out_mask) = call.options, call.parameters
    assert call.weight is not None
    votes = torch.einsum("jdk,bik->bijd", call.weight[0].expand(call.J, -1, -1), call.u)
    start = votes.new_zeros(votes.shape[:3]) if logits is None else logits.expand(votes.shape[:3])
    agreement = torch.zeros_like(start)
    for t in range(o.num_iterations):
        b = agreement + start if accumulate or t == 0 else agreement
        b = b if out_mask is None else b.masked_fill(~out_mask[:, None], -torch.inf)
        c = b.softmax(2).nan_to_num(0.0)
        c = c if mask is None else c * mask[..., None]
        s = torch.einsum("bij,bijd->bjd", c, votes) + (0 if bias is None else bias)
        v = capsfast.squash(s, kind=o.squash, eps=o.eps)
        v = v if out_mask is None else v * out_mask[..., None]
        found = scale * torch.einsum("bijd,bjd->bij", votes, v)
        found = found.detach() if o.gradient == "last" else found
        agreement = agreement + found if accumulate else found
    return v, c


def results(
    function: Any,
    given: dict[str, Tensor],
    options: Options = PLAIN,
    logits: str = "",
    masks: bool = False,
    bias: bool = False,
    **more: Any,
) -> list[Tensor]:
    """v and the coupling, then the gradients of u, weight, logits and bias from gradients of both."""
    names = ["u", "weight", *([logits] if logits else []), *(["bias"] if bias else [])]
    leaf = {name: given[name].clone().requires_grad_() for name in names}
    mask, out_mask = (given["mask"], given["out_mask"]) if masks else (None, None)
    parameters = RoutingParameters(leaf.get(logits), leaf.get("bias"), mask, out_mask)
    call = unchecked(leaf["u"], leaf["weight"], parameters, options, given["dv"].shape[1])
    v, c = function(call, **more)
    outer = [(v, given["dv"].to(v.dtype)), *([(c, given["dcoupling"].to(v.dtype))] if c.requires_grad else [])]
    found = torch.autograd.grad(
        [value for value, _ in outer],
        list(leaf.values()),
        [gradient for _, gradient in outer],
        allow_unused=True,
        materialize_grads=True,
    )
    return [v.detach(), c.detach(), *found]


def assert_same(got: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-9) -> None:
    for n, (one, other) in enumerate(zip(got, wanted, strict=True)):
        scale = float(other.abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(
            one, other, rtol=tolerance, atol=tolerance * scale, msg=lambda text, n=n: f"{n}: {text}"
        )


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("own", [False, True], ids=["one matrix", "a matrix of each output"])
def test_values_and_gradients(size: tuple[int, ...], own: bool) -> None:
    *sizes, r = size
    given = problem(*sizes, columns=sizes[2] if own else 1)
    kind = SQUASH[sum(size) % len(SQUASH)]
    for n, (softmax, gradient, logits, masks, leaky) in enumerate(
        product(("out", "in"), ("full", "last"), ("", "shared", "sample"), (False, True), (False, True))
    ):
        options = Options(r, softmax, gradient, leaky, kind, 1e-8, squash_last=n % 3 > 0)
        chosen: dict[str, Any] = {"options": options, "logits": logits, "masks": masks, "bias": n % 2 > 0}
        assert_same(results(routed, given, **chosen), results(definition, given, **chosen))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("gradient", ["full", "last"])
def test_a_temperature_and_logits_that_do_not_add_up(size: tuple[int, ...], gradient: str) -> None:
    *sizes, r = size
    given, options = problem(*sizes), Options(r, "out", gradient, False, "paper", 1e-8)
    for logits, masks, accumulate, scale in product(("", "sample"), (False, True), (False, True), (1.0, 2.5)):
        chosen: dict[str, Any] = {"options": options, "logits": logits, "masks": masks, "bias": masks}
        more = {"accumulate": accumulate, "scale": scale}
        assert_same(results(routed, given, **chosen, **more), results(loop, given, **chosen, **more))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits(dtype: torch.dtype) -> None:
    """Sums are float32, so a result is the result for the rounded inputs, rounded once."""
    given = single(problem(5, 40, 3, 6, 20, 3), dtype)
    got = results(routed, given, logits="sample", masks=True, bias=True)
    wanted = results(definition, single(given, torch.float64), logits="sample", masks=True, bias=True)
    assert all(value.dtype == dtype for value in got)
    assert_same([value.double() for value in got], wanted, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("size", [(9, 50, 4, 16, 16), (6, 40, 3, 10, 20)], ids=str)
@pytest.mark.parametrize("own", [False, True])
def test_float32_is_as_exact_as_the_definition(size: tuple[int, ...], own: bool) -> None:
    given = problem(*size, columns=size[2] if own else 1)
    chosen: dict[str, Any] = {"logits": "shared", "masks": True}
    truth, loose = (results(definition, each, **chosen) for each in (given, single(given)))
    for name, *each in zip(NAMES, results(routed, single(given), **chosen), truth, loose, strict=False):
        assert_accurate(name, *each, slack=2)


@pytest.mark.parametrize("ratio", [0, 10, 100])
@pytest.mark.parametrize("kind", ["paper", "unit"])
def test_what_the_matrix_maps_to_nothing_is_not_squared(ratio: float, kind: str) -> None:
    """An offset of u in the null space of W changes no vote, but W^T W would square its rounding error.

    The error may grow with the offset times the sum of the coupling: W z has this error, a mean of votes has not.
    """
    given = problem(6, 50, 4, 8, 16)
    null = torch.linalg.svd(given["weight"][0, 0]).Vh[8]
    given["u"] = given["u"] + ratio * null
    # The rounding of the offset itself is not an error of the routing.
    rounded = single(given)
    given |= {name: rounded[name].double() for name in ("u", "weight", "shared")}
    chosen: dict[str, Any] = {"options": PLAIN._replace(squash=kind), "logits": "shared"}
    truth, loose = (results(loop, each, **chosen) for each in (given, rounded))
    for name, *each in zip(NAMES, results(routed, rounded, **chosen), truth, loose, strict=False):
        assert_accurate(name, *each, slack=20)


@pytest.mark.parametrize(
    ("B", "I", "J", "columns", "D", "K", "taken"),
    [
        (1, 50, 4, 1, 64, 64, True),
        (1, 20, 4, 1, 64, 64, True),
        (64, 19, 4, 1, 64, 64, False),  # 20 vectors for the product with W, against 19
        (64, 50, 4, 1, 2, 256, False),  # sums over u are 128 times as long as sums over votes
        (1, 64, 4, 1, 1024, 1024, False),
        (4, 64, 4, 1, 1024, 1024, True),
        (16, 2048, 32, 32, 32, 32, True),
        (64, 1152, 10, 10, 16, 8, True),
        (64, 50, 4, 4, 1, 64, False),  # votes of one number
    ],
)
def test_where_it_serves(B: int, I: int, J: int, columns: int, D: int, K: int, taken: bool) -> None:
    nothing = RoutingParameters(None, None, None, None)
    given = unchecked(torch.empty(B, I, K), torch.empty(1, columns, D, K), nothing, PLAIN, J)
    assert factored_routing.serves(given, None) == taken


@pytest.mark.parametrize("columns", [1, 3])
def test_dynamic_routing_takes_it_where_it_is_less_work(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(4, 30, 3, 6, 6, columns)
    calls = []
    real = factored_routing.OP.kernels["cpp"]
    monkeypatch.setitem(factored_routing.OP.kernels, "cpp", lambda *args: calls.append(1) or real(*args))

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
    assert taken(softmax="in", leaky=True, bias=given["bias"], out_mask=given["out_mask"], return_coupling=True)
    assert taken(u=given["u"].bfloat16(), logits=given["shared"].bfloat16())
    assert not taken(backend="reference")
    assert columns > 1 or not taken(num_iterations=11)  # 63 vectors against 30 input capsules
    with torch.autocast("cpu", dtype=torch.bfloat16):
        v = capsfast.dynamic_routing(given["u"].float(), given["weight"].float(), logits=given["shared"].float())
    assert v.dtype == torch.bfloat16 and calls


def test_what_is_masked_has_no_influence() -> None:
    given = problem(5, 30, 3, 6, 6, 3)
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
    given = problem(2, 20, 3, 6, 6, 3)
    logits = given["shared"].clone()
    logits[4] = -torch.inf
    logits[5, 1] = -torch.inf
    v = capsfast.dynamic_routing(given["u"], given["weight"], logits=logits)
    wanted = capsfast.dynamic_routing(given["u"], given["weight"], logits=logits, backend="reference")
    torch.testing.assert_close(v, wanted)


@pytest.mark.parametrize("empty", range(5))
@pytest.mark.parametrize("bias", [False, True])
def test_empty_axes(empty: int, bias: bool) -> None:
    sizes = [2, 9, 2, 4, 4]
    sizes[empty] = 0
    given = problem(*sizes, columns=sizes[2])
    more = {"bias": given["bias"]} if bias else {}
    v = capsfast.dynamic_routing(given["u"], given["weight"], **more)
    wanted = capsfast.dynamic_routing(given["u"], given["weight"], **more, backend="reference")
    torch.testing.assert_close(v, wanted)


@pytest.mark.parametrize(("dtype", "masks"), [(torch.float32, False), (torch.float64, True)])
def test_gradients_larger_than_the_cache_are_the_same(dtype: torch.dtype, masks: bool) -> None:
    """A gradient of u of 16 MiB or more is stored past the cache."""
    B, I = 2051, 32 if dtype == torch.float32 else 16
    large = single(problem(B, I, 2, 64, 64), dtype)
    chosen: dict[str, Any] = {"logits": "shared", "masks": masks}
    whole = results(routed, large, **chosen)
    assert whole[2].nbytes >= 2**24 > whole[2].nbytes / 2 + 2**16
    parts = []
    for part in (slice(0, B // 2), slice(B // 2, B)):
        half = {name: value[part] if len(value) == B else value for name, value in large.items()}
        parts.append(results(routed, half, **chosen))
    for n, got in enumerate(whole):
        one, other = parts[0][n], parts[1][n]
        if n < 3:
            assert torch.equal(got, torch.cat([one, other]))
        else:
            assert (got - one - other).norm() < 1e-5 * got.norm()


@pytest.mark.parametrize("accumulate", [False, True])
def test_shared_logits_are_those_of_every_sample(accumulate: bool) -> None:
    given = problem(11, 21, 3, 5, 7)
    given["sample"] = given["shared"].repeat(11, 1, 1)
    shared, sample = (results(routed, given, logits=name, accumulate=accumulate) for name in ("shared", "sample"))
    for one, other in zip(shared[:4], sample[:4], strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(shared[4], sample[4].sum(0))


@pytest.mark.parametrize("layout", ["every second", "transposed", "not aligned", "expanded"])
def test_poses_are_read_where_they_are(layout: str) -> None:
    B, I, J, D, K = 9, 20, 2, 8, 16
    given = problem(B, 2 * I, J, D, 2 * K)
    whole = given["u"]
    given |= {"weight": given["weight"][..., :K], "shared": given["shared"][:I], "dcoupling": given["dcoupling"][:, :I]}
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
        leaf = each.detach().requires_grad_()
        call = unchecked(leaf, given["weight"], RoutingParameters(given["shared"], None, None, None), PLAIN, J)
        v, _ = routed(call)
        found.append((v, *torch.autograd.grad(v, leaf, given["dv"])))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_any_number_of_threads_gives_the_same() -> None:
    given, found, before = problem(300, 20, 2, 8, 8), [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(results(routed, given, logits="shared"))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)


@pytest.mark.parametrize("columns", [1, 2])
def test_opcheck(columns: int) -> None:
    given = problem(3, 12, 2, 4, 5, columns)
    tensors = [given[name] for name in ("u", "weight", "shared", "bias", "mask", "out_mask")]
    options = (2, 3, "out", "full", False, "paper", 1e-8, True, False, True, 1.0)
    op = torch.ops.capsfast.factored_routing.default
    torch.library.opcheck(op, (*tensors, *options, True))
    needing = [each.clone().requires_grad_() for each in tensors[:4]]
    torch.library.opcheck(op, (*needing, *tensors[4:], *options, False))
    v, c, z = op(*tensors, *options, True)
    backward = (torch.ones_like(v), torch.ones_like(c), *tensors, z, *options, [True] * 4)
    torch.library.opcheck(torch.ops.capsfast.factored_routing_backward.default, backward)


def plain_loss(weight: Tensor, given: dict[str, Tensor]) -> Tensor:
    call = unchecked(given["u"], weight, RoutingParameters(given["shared"], None, None, None), PLAIN, 2)
    return (loop(call)[0] * given["dv"]).sum()


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
    given = problem(6, 20, 2, 4, 5)

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
        wanted = capsfast.dynamic_routing(u, given["weight"], logits=given["shared"], backend="reference")
        torch.testing.assert_close(v, wanted)
        torch.testing.assert_close(*(torch.autograd.grad(each, u, given["dv"][:B])[0] for each in (v, wanted)))
