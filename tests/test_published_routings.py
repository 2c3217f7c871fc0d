"""The routings of docs/published-routings.md, gradients included, against code that forms votes and coupling."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import capsfast

from .support import plain
from .support.backends import Backend
from .test_docs import ROOT, blocks, table_rows

PAGE = ROOT / "docs" / "published-routings.md"
B, I, J, D, K = 7, 11, 4, 6, 5
TEMPERATURES = (0.3, 0.6, 1.0)
FLOOR = 1e-4


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the blocks of the page define."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(PAGE):
        exec(compile(block, str(PAGE), "exec"), namespace)
    return namespace


def rand(*size: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*size, dtype=torch.float64)).requires_grad_()


def positive(*size: int) -> Tensor:
    return (0.1 + torch.rand(*size, dtype=torch.float64)).requires_grad_()


def weighted(c: Tensor, votes: Tensor) -> Tensor:
    """``c [B, I, J]`` and ``votes [B, I, J, D]`` to ``[B, J, D]``."""
    return (c[..., None] * votes).sum(1)


def agreement(votes: Tensor, v: Tensor) -> Tensor:
    """``votes [B, I, J, D]`` and ``v [B, J, D]`` to ``[B, I, J]``."""
    return (votes * v[:, None]).sum(-1)


def unit(v: Tensor) -> Tensor:
    return v / v.square().sum(-1, keepdim=True).sqrt()


def em(u: Tensor, weight: Tensor, a: Tensor, beta_a: Tensor, beta_u: Tensor) -> tuple[Tensor, Tensor]:
    """Hinton, Sabour, Frosst 2018, procedure 1."""
    votes = plain.votes(u, weight)
    c = torch.full_like(votes[..., 0], 1 / votes.shape[2])
    for inverse_temperature in TEMPERATURES:
        r = c * a[:, :, None]
        mass = r.sum(1)
        mean = weighted(r, votes) / mass[..., None]
        variance = weighted(r, (votes - mean[:, None]) ** 2) / mass[..., None] + FLOOR
        cost = (beta_u[:, None] + variance.sqrt().log()) * mass[..., None]
        activation = torch.sigmoid(inverse_temperature * (beta_a - cost.sum(2)))
        density = (-((votes - mean[:, None]) ** 2) / (2 * variance[:, None])).exp() / (
            2 * math.pi * variance[:, None]
        ).sqrt()
        joint = activation[:, None] * density.prod(3)
        c = joint / joint.sum(2, keepdim=True)
    return mean, activation


def inverted_attention(u: Tensor, weight: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """Tsai, Srivastava, Goh, Salakhutdinov 2020, procedure 1, starting from poses of 0."""
    votes = plain.votes(u, weight)
    pose = torch.zeros_like(votes[:, 0])
    for _ in range(3):
        pose = weighted(plain.couple(agreement(votes, pose)), votes)
        centered = pose - pose.mean(-1, keepdim=True)
        pose = gain * centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() + shift
    return pose


def self_attention(u: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Mazzia, Salvetti, Chiaberge 2021, equations 5 to 7, with all scores of pairs of input capsules."""
    votes = plain.votes(u, weight)
    scores = torch.einsum("bijd,bkjd->bjik", votes, votes) / math.sqrt(votes.shape[3])
    c = plain.couple(scores.sum(3).transpose(1, 2))
    return plain.squash(weighted(c + bias, votes), "exp")


def cosine(u: Tensor, weight: Tensor, query: Tensor) -> Tensor:
    votes = plain.votes(u, weight)
    for _ in range(3):
        lengths = votes.square().sum(-1).sqrt()
        angles = agreement(unit(votes), unit(query))
        query = weighted(plain.couple(2.0 * lengths * angles), votes)
    return unit(query)


def interests(accumulate: bool) -> Callable[..., Tensor]:
    def route(u: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        votes = plain.votes(u, weight.expand(-1, logits.shape[-1], -1, -1))
        b = logits.expand(votes.shape[:3])
        for _ in range(3):
            c = plain.couple(b) * PRESENT[:, :, None]
            v = plain.squash(weighted(c, votes))
            b = agreement(votes, v) + (b if accumulate else 0)
        return v

    return route


def self_routing(u: Tensor, weight: Tensor, a: Tensor, route: Tensor) -> tuple[Tensor, Tensor]:
    """Hahn, Pyeon, Kim 2019, equations 1 to 4."""
    r = plain.couple((route * u[:, :, None]).sum(-1)) * a[:, :, None]
    return weighted(r, plain.votes(u, weight)) / r.sum(1)[..., None], r.sum(1) / a.sum(1, keepdim=True)


def unrouted(u: Tensor, weight: Tensor) -> Tensor:
    return plain.squash(plain.votes(u, weight).mean(1) * u.shape[1] / weight.shape[1])


def prototypes(u: Tensor, weight: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    votes = plain.votes(u, weight.expand(-1, J, -1, -1))
    c = plain.couple(agreement(votes, points[None]))
    return weighted(c, votes) / c.sum(1)[..., None], c.sum(1)


def across_windows(poses: Tensor, weight: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Every pose has one softmax, over the output capsules of all windows that contain it."""
    windows = query.shape[1]
    votes = torch.stack([plain.votes(poses[:, n : n + 3], weight) for n in range(windows)], 1)  # [B, windows, 3, J, D]
    e = (votes * query[:, :, None]).sum(-1).exp()
    total = torch.zeros_like(poses[..., 0])  # [B, N]
    for n in range(windows):
        total = total + F.pad(e[:, n].sum(-1), (n, windows - 1 - n))
    c = torch.stack([e[:, n] / total[:, n : n + 3, None] for n in range(windows)], 1)
    return (c[..., None] * votes).sum(2), c


PRESENT = torch.arange(I) < torch.tensor([I, 1, 5, I, 7, I, 2])[:, None]
Case = tuple[Callable[..., Any], Callable[[], list[Tensor]], dict[str, Any]]


def poses_and(*others: tuple[int, ...], weight: tuple[int, ...] = (I, J, D, K)) -> Callable[[], list[Tensor]]:
    return lambda: [rand(B, I, K), rand(*weight, scale=0.5), *(rand(*size) for size in others)]


# The plain code, tensors for both functions, and further arguments of the function of the page.
CASES: dict[str, Case] = {
    "dynamic": (lambda u, weight: plain.route(plain.votes(u, weight))[0], poses_and(), {}),
    "em": (
        em,
        lambda: [rand(B, I, K), rand(I, J, D, K, scale=0.5), positive(B, I), rand(J), rand(J)],
        {"inverse_temperatures": TEMPERATURES, "floor": FLOOR},
    ),
    "inverted_attention": (inverted_attention, poses_and((D,), (D,)), {}),
    "self_attention": (self_attention, poses_and((I, J)), {}),
    "cosine": (cosine, poses_and((B, J, D)), {"sharpness": 2.0}),
    "interests": (interests(False), poses_and((B, I, J), weight=(1, 1, D, K)), {"mask": PRESENT}),
    "interests, accumulated": (
        interests(True),
        poses_and((I, J), weight=(1, 1, D, K)),
        {"mask": PRESENT, "accumulate": True},
    ),
    "self_routing": (
        self_routing,
        lambda: [rand(B, I, K), rand(I, J, D, K, scale=0.5), positive(B, I), rand(I, J, K)],
        {},
    ),
    "unrouted": (unrouted, poses_and(weight=(1, J, D, K)), {}),
    "prototypes": (prototypes, poses_and((J, D), weight=(1, 1, D, K)), {}),
    "across_windows": (across_windows, poses_and((B, I - 2, J, D), weight=(3, J, D, K)), {}),
}


def as_tuple(found: Tensor | Iterable[Tensor]) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


@plain.on_cpu
@pytest.mark.parametrize("name", CASES)
def test_is_the_published_routing(name: str, by: Backend, page: dict[str, Any]) -> None:
    torch.manual_seed(0)
    definition, make, options = CASES[name]
    inputs = make()
    wanted = as_tuple(definition(*inputs))
    with capsfast.use_backend(by.name):
        got = as_tuple(page[name.split(",")[0]](*inputs, **options))
        seeds = [torch.randn_like(each) for each in wanted]
        gradients = torch.autograd.grad(got, inputs, seeds)
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted, inputs, seeds), rtol=1e-8, atol=1e-10)


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", CASES)
def test_compiles_without_a_graph_break(name: str, page: dict[str, Any]) -> None:
    torch._dynamo.reset()
    _, make, options = CASES[name]
    inputs, routing = make(), page[name.split(",")[0]]
    compiled = torch.compile(routing, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs, **options), routing(*inputs, **options))


def test_every_routing_of_the_table_is_compared() -> None:
    named = [function.strip("`") for _, function, _ in table_rows(PAGE, "| routing | function |")]
    assert len(named) == 9 and set(named) <= set(CASES)


@plain.on_cpu
def test_em_of_far_votes_does_not_cancel(by: Backend, page: dict[str, Any]) -> None:
    """Votes around 300. The activation depends on their variance, which raw moments would lose."""
    torch.manual_seed(0)
    with torch.no_grad():
        u, weight, activation = torch.randn(B, 300, K), 0.1 * torch.randn(300, J, D, K), torch.rand(B, 300)
        u[..., 0], weight[..., 0] = 1, 300 + 0.1 * torch.randn(300, J, D)
        cost = torch.linspace(-500, -200, J)
    arguments = (u, weight, activation, cost, torch.zeros(J))
    with capsfast.use_backend(by.name):
        mean, a = page["em"](*arguments, [0.01, 0.02, 0.02])
        exact = page["em"](*(each.double() for each in arguments), [0.01, 0.02, 0.02])
        mass, first, second, *_ = capsfast.routing_pass(u, weight, second=True)
    assert second is not None
    torch.testing.assert_close((mean.double(), a.double()), exact, rtol=1e-6, atol=2e-4)
    about_0 = second / mass[..., None] - (first / mass[..., None]) ** 2
    variance = plain.votes(u.double(), weight.double()).var(1, correction=0)
    assert ((about_0 - variance).abs() > 0.1 * variance).any()


@plain.on_cpu
def test_windows_share_the_coupling(by: Backend, page: dict[str, Any]) -> None:
    with capsfast.use_backend(by.name):
        _, c = page["across_windows"](rand(2, 9, K), rand(3, J, D, K), rand(2, 7, J, D))
    total = torch.zeros(2, 9, dtype=torch.float64)
    for window in range(7):
        total[:, window : window + 3] += c[:, window].sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))
