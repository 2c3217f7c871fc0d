"""The routings of docs/published-routings.md, gradients included, against code that forms votes and coupling."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import capsfast

from .support import plain
from .support.backends import Backend
from .support.routings import ROUTINGS, weighted
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


def of(name: str, *parameters: str, **options: Any) -> Callable[..., Any]:
    """The definition of a routing in capsfast.nn, as a function of u, weight and these parameters or activations."""

    def route(u: Tensor, weight: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        module = SimpleNamespace(**options, **dict(zip(parameters, given, strict=True)))
        a = getattr(module, "a", torch.ones_like(u[..., 0]))
        return ROUTINGS[name].definition(plain.votes(u, weight), a, module, u)

    return route


def poses_of(route: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda *given: route(*given)[0]  # type: ignore[no-any-return]


# Procedure 1 of Hinton, Sabour, Frosst 2018, with the costs of the paper.
EM: dict[str, Any] = {"momentum": 0, "isotropic": False, "leaky": False, "cost": "variance", "cost_scale": "sum"}
EM |= {"nonlinearity": "sigmoid", "inverse_temperatures": TEMPERATURES, "floor": FLOOR}


def agreement(votes: Tensor, v: Tensor) -> Tensor:
    """``votes [B, I, J, D]`` and ``v [B, J, D]`` to ``[B, I, J]``."""
    return (votes * v[:, None]).sum(-1)


def unit(v: Tensor) -> Tensor:
    return v / v.square().sum(-1, keepdim=True).sqrt()


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
        of("em", "a", "beta_a", "beta_u", **EM),
        lambda: [rand(B, I, K), rand(I, J, D, K, scale=0.5), positive(B, I), rand(J), rand(J)],
        {"inverse_temperatures": TEMPERATURES, "floor": FLOOR},
    ),
    "inverted_attention": (
        poses_of(of("inverted-attention", "gain", "shift", num_iterations=3, scaled=False, readout=None)),
        poses_and((D,), (D,)),
        {},
    ),
    "self_attention": (poses_of(of("self-attention", "bias", squash="exp")), poses_and((I, J)), {}),
    "cosine": (cosine, poses_and((B, J, D)), {"sharpness": 2.0}),
    "interests": (interests(False), poses_and((B, I, J), weight=(1, 1, D, K)), {"mask": PRESENT}),
    "interests, accumulated": (
        interests(True),
        poses_and((I, J), weight=(1, 1, D, K)),
        {"mask": PRESENT, "accumulate": True},
    ),
    "self_routing": (
        of("self", "a", "W_route", logits=None),
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
    torch.testing.assert_close((mean.double(), a.double()), exact, rtol=1e-6, atol=2e-4)
