"""Interest capsules against loops over votes in memory, written from the papers and after published code."""

import copy
import itertools
import math
import random
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import capsfast
from capsfast.nn import InterestCapsules, LabelAwareAttention, interest_scores

from .support.layers import without_samples
from .support.plain import assert_alike
from .support.ranks import on_two_ranks

B, I, J, K, D = 5, 24, 3, 6, 4
LENGTHS = torch.tensor([24, 1, 7, 0, 16])
VALID = torch.arange(I) < LENGTHS[:, None]


def rand(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64).requires_grad_()


def shrink(s: Tensor, c: float, eps: float) -> Tensor:
    """The squash of published code."""
    n = s.pow(2).sum(-1, keepdim=True)
    return n / (c + n) * s / (n + eps).sqrt()


def plain(
    u: Tensor, W: Tensor, logits: Tensor | None, mask: Tensor | None, out_mask: Tensor | None, **o: Any
) -> Tensor:
    """All votes ``[B, I, J, D]`` and logits ``[B, I, J]`` in memory, and a loop."""
    o = {**DEFAULTS, **o}
    votes = torch.stack([torch.stack([u[:, i] @ W[i % W.shape[0], j % W.shape[1]].T for j in range(J)], 1)
                         for i in range(u.shape[1])], 1)  # fmt: skip
    inner = votes.detach() if o["gradient"] == "last" else votes
    b = torch.zeros_like(votes[..., 0]) if logits is None else logits.expand(votes.shape[:3])
    dim = 2 if o["softmax"] == "out" else 1
    for t in range(o["num_iterations"]):
        x = b
        if out_mask is not None:
            x = x.masked_fill(~out_mask[:, None, :], -math.inf)
        if mask is not None and dim == 1:
            x = x.masked_fill(~mask[..., None], -math.inf)
        c = x.softmax(dim).nan_to_num(0.0)
        if mask is not None:
            c = c * mask[..., None]
        last = t == o["num_iterations"] - 1
        v = shrink(torch.einsum("bij,bijd->bjd", c, votes if last else inner), o["c"], 1e-8)
        if last:
            return v
        delta = torch.einsum("bijd,bjd->bij", inner, v)
        delta = delta.detach() if o["gradient"] == "last" else delta
        b = b + delta if o["update"] == "accumulate" else delta
    raise AssertionError


CHOICES: dict[str, tuple[Any, ...]] = {
    "weight": ("shared", "output", "position"),
    "update": ("accumulate", "overwrite"),
    "softmax": ("out", "in"),
    "gradient": ("full", "last"),
    "num_iterations": (3, 1, 2),
    "squash": ("paper", "half"),
    "masks": (True, False),
    "logits": ("fixed", "per user", None),
}


DEFAULTS: dict[str, Any] = {**{name: values[0] for name, values in CHOICES.items()}, "c": 1.0}


def drawn() -> list[dict[str, Any]]:
    """Every option alone, and some combinations."""
    first = {name: values[0] for name, values in CHOICES.items()}
    alone = [first | {name: value} for name, values in CHOICES.items() for value in values[1:]]
    product = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]
    return [first, *alone, *random.Random(0).sample(product, 110)]


def made(**options: Any) -> InterestCapsules:
    torch.manual_seed(0)
    return InterestCapsules(J, K, D, **{"max_length": I, "dtype": torch.float64, **options})


@pytest.mark.parametrize("part", range(5))
def test_every_option_and_drawn_combinations(part: int) -> None:
    torch.manual_seed(part)
    for combination in drawn()[part::5]:
        options = dict(combination)
        kind, masks = options.pop("logits"), options.pop("masks")
        layer = made(**options)
        u = rand(B, I, K)
        logits = {"fixed": layer.logits, "per user": 0.8 * torch.randn(B, I, J, dtype=torch.float64), None: None}[kind]
        if kind == "per user":
            logits = logits.requires_grad_()
        if kind is None:
            layer.initial_logits = "zero"
        interests = torch.tensor([3, 1, 2, 1, 3]) if masks else None
        out_mask = None if interests is None else torch.arange(J) < interests[:, None]
        found = layer(u, LENGTHS if masks else None, interests=interests, logits=logits if kind == "per user" else None)
        c = {"paper": 1.0, "half": 0.5}[options.pop("squash")]
        options.pop("weight")
        wanted = plain(u, layer.W, logits, VALID if masks else None, out_mask, c=c, **options)
        leaves = [u, layer.W, *([logits] if kind == "per user" else [])]
        assert_alike(found.vectors, wanted, leaves)


def test_mind() -> None:
    """Li et al. 2019, algorithm 1, literally, user by user with the user's number of interests."""
    layer = made(count="floor", num_iterations=3)
    u = rand(B, I, K)
    found = layer(u, LENGTHS)
    S, drawn_logits = layer.W[0, 0], layer.logits
    for n, length in enumerate(LENGTHS.tolist()):
        count = max(1, min(J, int(math.log2(length)))) if length else 0
        assert found.mask[n].tolist() == [True] * count + [False] * (J - count)
        b = [[drawn_logits[i, j] for j in range(count)] for i in range(length)]
        v = [torch.zeros(D, dtype=torch.float64)] * count
        for _ in range(3):
            w = [torch.stack(row).softmax(0) for row in b]
            z = [sum((w[i][j] * (S @ u[n, i]) for i in range(length)), torch.zeros(D)) for j in range(count)]
            v = [shrink(each, 1.0, 1e-8) for each in z]
            b = [[b[i][j] + v[j] @ (S @ u[n, i]) for j in range(count)] for i in range(length)]
        for j in range(J):
            wanted = v[j] if j < count else torch.zeros(D)
            torch.testing.assert_close(found.vectors[n, j], wanted.double(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_comirec(kind: int) -> None:
    """Cen et al. 2020: detached iterations, mask after the softmax, ReLU projection, hard selection; three maps."""
    weight = ("shared", "output", "position")[kind]
    start = "random_per_user" if kind == 0 else "zero"
    layer = made(weight=weight, initial_logits=start, gradient="last", projection="relu", eps=1e-9)
    u, item = rand(B, I, K), rand(B, D)
    votes = torch.einsum("ijdk,bik->bjid", layer.W.expand(I, J, D, K), u)
    fixed = votes.detach()
    c = torch.zeros(B, J, I, dtype=torch.float64)
    if kind == 0:
        c = torch.randn(B, I, J, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).transpose(1, 2)
    for t in range(3):
        w = torch.where(VALID[:, None], c.softmax(1), 0.0)[:, :, None]
        capsule = w @ (votes if t == 2 else fixed)
        n = capsule.square().sum(-1, keepdim=True)
        capsule = n / (1 + n) / torch.sqrt(n + 1e-9) * capsule
        c = c + (fixed @ capsule.transpose(2, 3)).squeeze(-1).detach()
    capsule = F.relu(F.linear(capsule[:, :, 0], layer.projection.weight, layer.projection.bias))  # type: ignore[union-attr]
    capsule = capsule * (LENGTHS > 0)[:, None, None]
    best = (capsule @ item[..., None]).squeeze(-1).argmax(1)
    wanted = capsule[torch.arange(B), best]
    found = layer(u, mask=VALID, generator=torch.Generator().manual_seed(3))
    readout = LabelAwareAttention(math.inf)(found.vectors, item)
    assert_alike(readout, wanted, [u, *layer.parameters()])


def test_lengths_mask_and_jagged_histories_are_one() -> None:
    layer, u = made(count="ceil"), rand(B, I, K)
    offsets = F.pad(LENGTHS.cumsum(0), (1, 0))
    found = [layer(u, LENGTHS), layer(u, mask=VALID), layer(u[VALID], offsets=offsets)]
    assert all(torch.equal(each.mask, found[0].mask) for each in found)
    gradients = [torch.autograd.grad(each.vectors.square().sum(), u)[0] for each in found]
    for each, gradient in zip(found, gradients, strict=True):
        torch.testing.assert_close(each.vectors, found[0].vectors)
        torch.testing.assert_close(gradient, gradients[0])
    assert not gradients[0][~VALID].any()
    free = made(max_length=None, initial_logits="zero", weight="output")
    torch.testing.assert_close(free(u[VALID], offsets=offsets).vectors, free(u, LENGTHS).vectors)
    for dtype in (torch.uint8, torch.int8):
        assert torch.equal(layer(u[VALID], offsets=offsets.to(dtype)).vectors, found[2].vectors)
    long, length = torch.randn(1, 300, K, dtype=torch.float64), torch.tensor([50])
    assert torch.equal(free(long, length.to(torch.uint8)).vectors, free(long, length).vectors)
    shorter = LENGTHS.clamp(max=9)
    valid = torch.arange(9) < shorter[:, None]
    jagged = free(u[:, :9][valid], offsets=F.pad(shorter.cumsum(0), (1, 0)).int())
    torch.testing.assert_close(jagged.vectors, free(u[:, :9], shorter.to(torch.int32)).vectors)


# 70 interests are more than an integer has bits.
@pytest.mark.parametrize("J", [5, 70])
@pytest.mark.parametrize(("rule", "function"), [("floor", math.floor), ("ceil", math.ceil)])
def test_the_number_of_interests(rule: str, function: Any, J: int) -> None:
    found = InterestCapsules(J, K, D, initial_logits="zero", count=rule)(torch.randn(70, 70, K), torch.arange(70))
    wanted = torch.tensor([max(1, min(J, function(math.log2(n)))) if n else 0 for n in range(70)])
    assert torch.equal(found.mask, torch.arange(J) < wanted[:, None])
    assert not found.vectors[~found.mask].any()


class Traced(torch.nn.Module):
    """A layer whose histories are given by an argument of this name."""

    def __init__(self, name: str, layer: InterestCapsules) -> None:
        super().__init__()
        self.name, self.layer = name, layer

    def forward(self, u: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        found = self.layer(u, **{self.name: numbers})
        return found.vectors, found.mask


@pytest.mark.parametrize("name", ["lengths", "offsets"])
def test_traced_histories(name: str) -> None:
    def drawn_histories(lengths: Tensor) -> tuple[Tensor, Tensor]:
        u = torch.randn(lengths.shape[0], I, K, dtype=torch.float64)
        if name == "lengths":
            return u, lengths
        return u[torch.arange(I) < lengths[:, None]], F.pad(lengths.cumsum(0), (1, 0))

    options = {"initial_logits": "zero", "weight": "output", "count": "floor"}
    model, example = Traced(name, made(**options)), drawn_histories(torch.tensor([3, 4, 2]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        warnings.filterwarnings("ignore", "Converting a tensor to a Python boolean")
        traced = torch.jit.trace(model, example)
        if name == "offsets":
            with pytest.raises(ValueError, match=r"offsets need max_length under torch.jit.trace"):
                torch.jit.trace(Traced(name, made(max_length=None, **options)), example)
    for lengths in (torch.tensor([9, 1]), LENGTHS):
        given = drawn_histories(lengths)
        torch.testing.assert_close(traced(*given), model(*given))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"count": "floor"},
        {"weight": "position"},
        {"update": "overwrite", "weight": "output"},
        {"projection": "relu"},
        {"softmax": "in"},
    ],
    ids=str,
)
def test_users_without_behaviours(options: dict[str, Any]) -> None:
    layer = made(**options)
    u = torch.full((3, I, K), torch.nan, dtype=torch.float64).requires_grad_()
    v, mask = layer(u, torch.zeros(3, dtype=torch.int64))
    assert not v.any() and not mask.any()
    items = torch.randn(3, D, dtype=torch.float64)
    assert bool(torch.isneginf(interest_scores(v, items, mask)).all())
    v = v + LabelAwareAttention(math.inf)(v, items, mask)[:, None]
    v.sum().backward()
    assert bool(u.grad.isfinite().all())  # type: ignore[union-attr]
    assert all(bool(parameter.grad.isfinite().all()) for parameter in layer.parameters() if parameter.grad is not None)
    for users in (3, 0):
        # A gradient of zeros: without a gradient DistributedDataParallel stops.
        (vectors,) = without_samples(partial(jagged, layer, users))
        assert vectors.shape == (users, J, D) and not vectors.any()


def jagged(layer: nn.Module, users: int, behaviours: int) -> tuple[Any, list[Tensor]]:
    """A call with all behaviours in the last history."""
    offsets = F.pad(torch.tensor([behaviours]), (max(users, int(behaviours > 0)), 0))
    given = [torch.randn(behaviours, K, dtype=torch.float64), *layer.parameters()]
    return lambda values, *_: layer(values, offsets=offsets), given


def test_initial_logits() -> None:
    u = torch.randn(B, I, K, dtype=torch.float64)
    fixed = made()
    assert torch.equal(fixed(u).vectors, fixed(u).vectors)
    other = made()
    other.reset_parameters()
    other.load_state_dict(fixed.state_dict())
    assert torch.equal(other(u).vectors, fixed(u).vectors)
    # A shorter history gets a prefix of the random logits.
    torch.testing.assert_close(fixed(u[:, :7]).vectors, fixed(u, torch.full((B,), 7)).vectors)
    for start, shape in (("random", (I, J)), ("random_per_user", (B, I, J))):
        layer = made(initial_logits=start, max_length=None, logits_std=0.5)
        assert not torch.equal(layer(u).vectors, layer(u).vectors)
        seeded = layer(u, generator=torch.Generator().manual_seed(4)).vectors
        draw = 0.5 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        assert torch.equal(seeded, layer(u, logits=draw).vectors)
    equal = made(initial_logits="zero")(u).vectors
    torch.testing.assert_close(equal[:, :1].expand_as(equal), equal)


def test_compiles_jagged_histories() -> None:
    layer, u = made(count="floor"), rand(B, I, K)
    offsets, values = F.pad(LENGTHS.cumsum(0), (1, 0)), u.detach()[VALID]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(values, offsets=offsets).vectors, layer(values, offsets=offsets).vectors)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float16, {}),
        (torch.float16, {"update": "overwrite", "weight": "output"}),
        (torch.bfloat16, {"softmax": "in", "update": "overwrite"}),
        (torch.bfloat16, {"gradient": "last", "weight": "output"}),
        (torch.bfloat16, {"projection": "relu"}),
        (torch.bfloat16, {"initial_logits": "zero", "backend": "reference"}),
    ],
    ids=str,
)
def test_autocast_is_one_dtype(dtype: torch.dtype, options: dict[str, Any]) -> None:
    layer = made(dtype=torch.float32, **options)
    rounded = copy.deepcopy(layer)
    rounded.W.data = layer.W.detach().to(dtype).float()
    u = torch.randn(B, I, K)
    with torch.autocast("cpu", dtype=dtype):
        for logits in (torch.randn(I, J, dtype=torch.float64), torch.randn(B, I, J, dtype=dtype)):
            assert layer(u, LENGTHS, logits=logits).vectors.dtype == dtype
        assert copy.deepcopy(layer).double()(u.double(), LENGTHS).vectors.dtype == torch.float64
        v, mixed = layer(u, LENGTHS).vectors, layer(u.to(dtype), LENGTHS).vectors
    assert v.dtype == mixed.dtype == dtype
    torch.testing.assert_close(mixed, v)
    wanted = rounded(u.to(dtype).float(), LENGTHS).vectors
    torch.testing.assert_close(v.float(), wanted, rtol=0.01, atol=0.01 if "projection" in options else 0.004)
    v.sum().backward()
    assert layer.W.grad is not None and layer.W.grad.dtype == torch.float32


def ranks(rank: int) -> None:
    torch.manual_seed(rank)
    layer = InterestCapsules(J, K, D, max_length=I)
    own = layer.logits.clone()  # type: ignore[union-attr]
    parallel = DistributedDataParallel(layer)
    parallel(torch.randn(B, I, K)).vectors.square().sum().backward()
    drawing = InterestCapsules(J, K, D, initial_logits="random")
    drawing.load_state_dict({"W": layer.W.detach()})
    parallel = DistributedDataParallel(drawing)
    parallel(torch.randn(B, I, K)).vectors.square().sum().backward()
    mine = [layer.logits, layer.W.grad, drawing.W.grad, own]
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, mine)
    first, second = gathered
    assert all(torch.equal(a, b) for a, b in zip(first[:3], second[:3], strict=True))
    assert not torch.equal(first[3], second[3])


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")
def test_ranks_share_fixed_logits_and_gradients(tmp_path: Path) -> None:
    on_two_ranks(ranks, tmp_path)


@pytest.mark.skipif(not capsfast.backends()["cpp"].available, reason="the reference has all derivatives")
@pytest.mark.parametrize("weight", ["shared", "output"])
def test_errors_name_a_function_that_was_called(weight: str) -> None:
    # With so many behaviours, and one matrix for all pairs, no votes are formed.
    layer, u = InterestCapsules(J, K, K, weight=weight, max_length=60, dtype=torch.float64), rand(B, 60, K)
    (gradient,) = torch.autograd.grad(layer(u).vectors.square().sum(), u, create_graph=True)
    message = r'capsfast\.dynamic_routing: the fused backends .*backend="reference"'
    with pytest.raises(RuntimeError, match=message):
        gradient.sum().backward()
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(lambda each: layer(each).vectors, (u,), (u,))
    with pytest.raises(NotImplementedError, match=message), torch.autograd.forward_ad.dual_level():
        capsfast.dynamic_routing(torch.autograd.forward_ad.make_dual(u, u), layer.W, logits=layer.logits)
    layer.backend = "reference"
    (gradient,) = torch.autograd.grad(layer(u).vectors.square().sum(), u, create_graph=True)
    gradient.sum().backward()


def test_text() -> None:
    text = made(update="overwrite", count="floor", projection="relu", init_std=0.5, backend="cpp").extra_repr()
    assert text == (
        "3, 6, 4, num_iterations=3, max_length=24, update='overwrite', count='floor', init_std=0.5, backend='cpp', "
        "projection='relu'"
    )
    assert made().extra_repr() == "3, 6, 4, num_iterations=3, max_length=24"
