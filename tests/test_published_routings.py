"""The routings of docs/published-routings.md, gradients included, against code that forms votes and coupling."""

from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

import capsfast
from capsfast.nn import ClassCaps2d, Groups, SlimConvCaps2d

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


def with_logits(
    agree: Callable[[Tensor, Tensor], Tensor],
    squash: Callable[[Tensor], Tensor],
    softmax: str = "out",
    mean: bool = False,
) -> Callable[..., Tensor]:
    """mean: votes are averaged, not summed, with these weights."""

    def route(u: Tensor, weight: Tensor) -> Tensor:
        votes = plain.votes(u, weight)
        b = torch.zeros_like(votes[..., 0])
        for _ in range(3):
            c = plain.couple(b, softmax)
            v = squash(weighted(c / c.sum(1, keepdim=True) if mean else c, votes))
            b = b + agree(votes, v)
        return v

    return route


def averaged(votes: Tensor, v: Tensor) -> Tensor:
    return agreement(votes, v).mean(0)


half = partial(plain.squash, kind="half", eps=0)


def degree(u: Tensor, weight: Tensor) -> Tensor:
    """All pairs of votes for an output capsule, ``[B, J, I, I]``."""
    votes = plain.votes(u, weight)
    affinity = torch.einsum("bijd,bkjd->bjik", votes, votes) / votes.square().sum(3).transpose(1, 2)[..., None]
    return plain.squash(weighted(plain.couple(affinity.sum(3).transpose(1, 2), "in"), votes), "eps_outside")


def entmax(b: Tensor) -> Tensor:
    """By sorting: the k largest logits give tau by a quadratic equation, for the largest k that lie above tau."""
    z = b.sort(2, descending=True).values / 2
    k = torch.arange(1, b.shape[2] + 1, dtype=b.dtype)
    mean = z.cumsum(2) / k
    tau = mean - ((1 - (z.square().cumsum(2) - k * mean**2)) / k).clamp_min(0).sqrt()
    last = (tau <= z).sum(2, keepdim=True) - 1
    return (b / 2 - tau.gather(2, last)).clamp_min(0) ** 2


def sparse(u: Tensor, weight: Tensor) -> Tensor:
    votes = plain.votes(u, weight)
    b = torch.zeros_like(votes[..., 0])
    for _ in range(3):
        v = plain.squash(weighted(entmax(b), votes))
        b = b + agreement(votes, v)
    return v


def by_component(votes: Tensor) -> Tensor:
    b = torch.zeros_like(votes)
    for _ in range(3):
        v = plain.squash((b.softmax(1) * votes).sum(1))
        b = b + votes * v[:, None]
    return v


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
    "averaged": (
        with_logits(averaged, lambda s: plain.squash(s.mT, eps=0).mT),
        poses_and(),
        {"squash": lambda s: capsfast.squash(s, dim=1, eps=1e-20)},
    ),
    "averaged, element-wise": (
        with_logits(averaged, lambda s: s.square() / (1 + s.square()) * s.sign(), "in"),
        poses_and(),
        {"squash": lambda s: capsfast.squash(s[..., None], eps=1e-20)[..., 0], "normalize": "in"},
    ),
    "cosine_agreement": (with_logits(lambda votes, v: agreement(unit(votes), unit(v)), plain.squash), poses_and(), {}),
    "kde": (
        with_logits(lambda votes, v: 1 - (half(votes) - v[:, None]).square().sum(-1), half, mean=True),
        poses_and(),
        {},
    ),
    "degree": (degree, poses_and(), {}),
    "sparse": (sparse, lambda: [rand(B, I, K), rand(I, J, D, K, scale=2.0)], {}),
    "by_component": (by_component, lambda: [rand(B, I, J, D, scale=2.0)], {}),
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
        seeds = [torch.randn_like(wanted_one) for wanted_one in wanted]
        gradients = torch.autograd.grad(got, inputs, seeds)
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted, inputs, seeds), rtol=1e-8, atol=1e-10)


@plain.on_cpu
def test_groups_route_by_themselves(by: Backend) -> None:
    """DC-CapsNet: every group of input capsules routes to all output capsules, and the results are added."""
    torch.manual_seed(0)
    G, S = 3, 5
    options: dict[str, Any] = {"learned_logits": True, "squash": "eps_outside", "dtype": torch.float64}
    layer = capsfast.DynamicRouting(G * S, G * J, K, D, weight=Groups(G), backend=by.name, **options)
    torch.nn.init.normal_(layer.logits)
    u = rand(B, G * S, K)
    parts = zip(u.split(S, 1), layer.W.split(S), layer.logits.split(S), strict=True)
    wanted = sum(plain.route(plain.votes(x, W), logits=b, kind="eps_outside")[0] for x, W, b in parts)
    plain.assert_alike(layer(u).unflatten(1, (G, J)).sum(1), wanted, [u, *layer.parameters()])


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
    assert len(named) == 15 and set(named) <= set(CASES)


def test_sparse_coupling_has_zeros(page: dict[str, Any]) -> None:
    """Also beside an excluded output capsule, and where one output capsule takes all."""
    torch.manual_seed(0)
    b = rand(B, I, J, scale=3.0)
    c = page["entmax"](b)
    assert 0.2 < (c == 0).double().mean() < 0.8
    torch.testing.assert_close(c, entmax(b))
    seed = torch.randn_like(c)
    torch.testing.assert_close(torch.autograd.grad(c, b, seed), torch.autograd.grad(entmax(b), b, seed))
    edges = torch.tensor([[[1.0, 1.0, -torch.inf], [0.0, -9.0, -9.0]]], dtype=torch.float64, requires_grad=True)
    wanted = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]], dtype=torch.float64)
    c = page["entmax"](edges)
    torch.testing.assert_close(c, wanted)
    (gradient,) = torch.autograd.grad(c[0, 0, 0], edges)
    # The slope of the square, times the slope of b / 2 less the slope of tau, the mean of two b / 2.
    slope = 2 * 0.5**0.5 * (1 / 2 - 1 / 4)
    torch.testing.assert_close(gradient[0, 0], torch.tensor([slope, -slope, 0.0], dtype=torch.float64))


def logits_of(name: str, routing: Any, u: Tensor, votes: Tensor) -> Tensor:
    if name == "MLPRouting":
        return routing.layers(u)  # type: ignore[no-any-return]
    return torch.einsum("bie,bije->bij", u @ routing.query.weight.mT, votes @ routing.key.weight.mT)


@plain.on_cpu
@pytest.mark.parametrize("name", ["QueryKeyRouting", "MLPRouting"])
def test_logits_of_a_network(name: str, by: Backend, page: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = capsfast.nn.RoutedCaps(I, J, K, D, routing=page[name], backend=by.name, dtype=torch.float64)
    u = rand(B, I, K)
    votes = plain.votes(u, layer.W)
    c = plain.couple(logits_of(name, layer.routing, u, votes))
    plain.assert_alike(layer(u).poses, plain.squash(weighted(c, votes)), [u, *layer.parameters()])


@plain.on_cpu
def test_a_mixture_of_routings(by: Backend, page: dict[str, Any]) -> None:
    torch.manual_seed(0)
    names = ("dynamic", "em")
    kind = partial(capsfast.nn.RoutedCaps, I, J, K, D, backend=by.name, dtype=torch.float64)
    mixture = kind(routing=page["MixtureRouting"], routings=names)
    torch.nn.init.normal_(mixture.routing.shares)
    u, a = rand(B, I, K), positive(B, I)
    shares = mixture.routing.shares.softmax(0)
    parts = [routing((u, mixture.W), a) for routing in mixture.routing.routings]
    wanted = [sum(map(torch.mul, shares, results)) for results in zip(*parts, strict=True)]
    plain.assert_alike(
        torch.cat([mixture(u, a).poses, mixture(u, a).activations[..., None]], 2),
        torch.cat([wanted[0], wanted[1][..., None]], 2),
        [u, a, *mixture.parameters()],
    )


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
        exact = page["em"](*(tensor.double() for tensor in arguments), [0.01, 0.02, 0.02])
    torch.testing.assert_close((mean.double(), a.double()), exact, rtol=1e-6, atol=2e-4)


Repair = tuple[Tensor, Tensor, Tensor, list[Tensor]]
f64: Any = {"dtype": torch.float64}


def slim(**options: Any) -> tuple[SlimConvCaps2d, Tensor]:
    layer = SlimConvCaps2d(I, J, K, D, 3, padding=1, bias=True, **options, **f64)
    torch.nn.init.normal_(layer.conv.weight, std=0.5)
    return layer, rand(B, I, K, 5, 4)


def votes_of_untransposed(layer: SlimConvCaps2d, x: Tensor) -> Tensor:
    """The votes ``[B, I, J, D, H, W]`` of Keras code: a 3-D convolution of ``[B, H, W, I, K]``, merely reshaped."""
    merged = x.permute(0, 3, 4, 1, 2).reshape(B, 1, I * K, 5, 4)
    maps = F.conv3d(merged, layer.conv.weight[:, None], stride=(K, 1, 1), padding=(0, 1, 1))
    return maps.transpose(1, 2).unflatten(2, (J, D))


def deepcaps() -> Repair:
    layer, x = slim(softmax="everywhere")
    bias = layer.routing.bias
    original, _ = plain.route_everywhere(votes_of_untransposed(layer, x), 3, bias=bias)
    again = layer(x.permute(0, 3, 4, 1, 2).reshape(x.shape))
    return original, layer(x), again, [x, layer.conv.weight, bias]


def segcaps(samples: int) -> Repair:
    layer, x = slim()
    x = x[:samples].detach().requires_grad_()
    maps = F.conv2d(x.transpose(0, 1).flatten(0, 1), layer.conv.weight, padding=1)  # [I B, J D, H, W]
    votes = maps.view(samples, I, J, D, 5, 4)
    v, _ = plain.route(plain.at_samples(votes, 2), bias=layer.routing.bias)
    again = layer(x.transpose(0, 1).reshape(x.shape))
    return plain.to_image(v, samples, (5, 4)), layer(x), again, [x, layer.conv.weight, layer.routing.bias]


def along_the_width() -> Repair:
    """The convolutional layer of DC-CapsNet for hyperspectral images."""
    layer, x = slim()
    votes, bias = votes_of_untransposed(layer, x), layer.routing.bias
    b = torch.zeros_like(votes[:, :, :, 0])
    for _ in range(3):
        s = torch.einsum("bijyx,bijdyx->bjdyx", b.softmax(2), votes) + bias[..., None, None]
        v = plain.squash(s)
        b = b + torch.einsum("bijdyx,bjdyx->bijyx", votes, v)
    V = None
    for _ in range(3):
        first = capsfast.votes_pass(plain.at_samples(votes, 2), query=V).first + bias
        again = capsfast.squash(plain.to_image(first, B, (5, 4)), dim=4)
        V = plain.at_samples(again, 2) + (0 if V is None else V)
    return v, layer(x), again, [x, layer.conv.weight, bias]


def along_the_rotations() -> Repair:
    """SOVNET: votes ``[B, I, J, D, rotations, places]``."""
    votes = rand(B, I, J, D, 4, 3)
    affinity = torch.einsum("bijdrp,bkjdrp->bikjrp", votes, votes) / votes.square().sum(3)[:, :, None]
    s = (affinity.sum(2).softmax(1)[:, :, :, None] * votes).sum(1)
    listed = plain.at_samples(votes, 2)
    total = J * capsfast.votes_pass(listed).first
    square = torch.full_like(total, 2.0)
    dots, lengths = (
        capsfast.votes_pass(listed, normalize="none", return_weights=True, **score).weights
        for score in ({"query": total}, {"precision": square})
    )
    first = capsfast.votes_pass(listed, logits=-dots / lengths, normalize="in").first
    sums = plain.to_image(first, B, (4, 3))
    kind = "eps_outside"
    ours, again = (capsfast.squash(sums, dim=dim, kind=kind) for dim in (2, 3))
    return plain.squash(s.movedim(3, -1), kind).movedim(-1, 3), ours, again, [votes]


def coordinates(code: str) -> Repair:
    """Class capsules with matrices of 2 x 2 for poses, at 3 x 3 places."""
    N = 3
    row, column = torch.meshgrid(*[torch.arange(N, **f64)] * 2, indexing="ij")
    # The components that the original adds to, what it adds, and the options that give its result here.
    at, added, options = {
        "capsule_em": ((0, 1), ((row + 0.5) / N, (column + 0.5) / N), {}),
        "yl-1993": ((0, 1), (row / N, column / N), {"coordinates": (0, 1)}),
        "IBM": ((1, 3), ((column + 0.5) / N, (row + 0.5) / N), {"pose_rows": 2}),
        "fabio-deep": ((1, 3), [torch.full_like(row, 0.1)] * 2, {"pose_rows": 2, "coordinates": (1e12, 1e-13 * N)}),
    }[code]
    variational: dict[str, Any] = {"routing": "variational", "coordinates": (1, 0.1)}
    given = variational if code == "fabio-deep" else {"routing": "em"}
    layer = ClassCaps2d(2, J, 4, 4, N, pose_rows=2, init_std=0.5, **given, **f64)
    poses, activation = rand(B, 2, 4, N, N), positive(B, 2, N, N)
    votes = torch.einsum("btpqyx,tjqr->btyxjpr", poses.unflatten(2, (2, 2)), layer.W).flatten(5)
    places = torch.stack(tuple(added), -1) @ torch.eye(4, **f64)[list(at)]  # [N, N, 4]
    original = layer.routing((votes + places[:, :, None]).flatten(1, 3), activation.flatten(1))
    twin = ClassCaps2d(2, J, 4, 4, N, **given | options, **f64)
    weight = layer.W
    if "pose_rows" not in options:
        weight = torch.einsum("tjqr,ps->tjprsq", weight, torch.eye(2, **f64)).reshape(twin.W.shape)
    image = (poses.mT, activation.mT) if code == "IBM" else (poses, activation)
    again = functional_call(twin, dict(layer.named_parameters()) | {"W": weight}, image)
    found = [torch.cat([v, a[..., None]], 2) for v, a in (original, layer(poses, activation), again)]
    return found[0], found[1], found[2], [poses, activation, layer.W]


REPAIRS: dict[str, tuple[Callable[[], Repair], float]] = {
    "deepcaps": (deepcaps, 0.5),
    "segcaps": (lambda: segcaps(B), 0.5),
    "segcaps, one sample": (lambda: segcaps(1), 0),
    "along the width": (along_the_width, 0.5),
    "along the rotations": (along_the_rotations, 0.1),
    **{code: (partial(coordinates, code), 0.1) for code in ("capsule_em", "yl-1993", "IBM", "fabio-deep")},
}


@pytest.mark.parametrize("name", REPAIRS)
def test_what_an_original_computes_and_what_is_here(name: str) -> None:
    """The original differs from the layer of its method, and capsfast gives its result too."""
    torch.manual_seed(0)
    make, least = REPAIRS[name]
    original, ours, again, leaves = make()
    seed = torch.randn_like(original)
    wanted, here, got = (
        (each, *torch.autograd.grad(each, leaves, seed, retain_graph=True)) for each in (original, ours, again)
    )
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)
    difference = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(wanted, here, strict=True))
    assert difference > least if least else difference < 1e-12
