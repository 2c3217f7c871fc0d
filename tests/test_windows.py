"""Competition of the output capsules of overlapping windows."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import capsfast
from capsfast.calls.options import Options
from capsfast.nn import ConvCaps1d, ConvCaps2d, ConvCaps3d, Votes
from capsfast.nn.routing.votes import votes_of
from capsfast.nn.routing.windows import WindowVotes
from capsfast.passes import Moments

from .support import plain
from .support.backends import Backend, Largest
from .support.plain import gradients
from .support.routings import randomize

f64 = torch.float64
B, C, J, K, D, SIZE = 2, 2, 3, 4, 6, (5, 6)
LAYERS = {1: ConvCaps1d, 2: ConvCaps2d, 3: ConvCaps3d}
SIZES = {1: (9,), 2: SIZE, 3: (3, 2, 4)}
WINDOWS: dict[str, tuple[int, dict[str, Any]]] = {
    "3x3": (2, {}),
    "stride": (2, {"stride": 2}),
    "apart": (2, {"kernel_size": 2, "stride": 2}),
    "padding": (2, {"padding": (1, 2)}),
    "all": (2, {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 1), "dilation": (2, 3)}),
    "3": (1, {"padding": 1}),
    "all of 1 axis": (1, {"kernel_size": 3, "stride": 2, "padding": 2, "dilation": 2}),
    "2x2x2": (3, {"kernel_size": 2}),
    "all of 3 axes": (
        3,
        {"kernel_size": (2, 1, 3), "stride": (1, 2, 1), "padding": (1, 0, 2), "dilation": (1, 1, 2)},
    ),
}


class PlainWindowVotes(Votes):
    """All votes and coupling coefficients of windows in memory, with a softmax for each input capsule."""

    def __init__(self, votes: Tensor, child: Tensor, start: str = "child") -> None:
        """votes ``[B, windows, I, J, D]``; child ``[windows, I]``, the index of the input capsule, -1 for padding."""
        self.votes, self.child, self.start = votes, child, start
        self.places = votes.shape[:2]
        self.I, self.J, self.D = votes.shape[2:]
        self.B, self.dtype, self.device = votes.shape[0] * votes.shape[1], votes.dtype, votes.device

    def moments(  # type: ignore[override]
        self,
        *,
        logits: Tensor | None = None,
        activation: Tensor | None = None,
        second: bool = False,
        leaky: bool = False,
        **given: Tensor | None,
    ) -> Moments:
        """given: center, query, precision and prior."""
        at = {name: value.unflatten(0, self.places)[:, :, None] for name, value in given.items() if value is not None}
        x = self.votes - at.get("center", 0)
        b = torch.zeros_like(self.votes[..., 0]) + at.get("prior", 0) + (0 if logits is None else logits)
        if "query" in at:
            b = b + (x * at["query"]).sum(-1)
        if "precision" in at:
            b = b - 0.5 * (x.square() * at["precision"]).sum(-1)
        r = torch.zeros_like(b)
        for number in range(int(self.child.max()) + 1):
            window, place = (self.child == number).nonzero(as_tuple=True)
            if len(window):
                of_child = b[:, window, place].flatten(1)  # all output capsules of all windows that contain the child
                leak = torch.zeros_like(of_child[:, : int(leaky)])
                share = torch.cat([of_child, leak], 1).softmax(1)[:, : of_child.shape[1]]
                r[:, window, place] = share.unflatten(1, (-1, self.J))
        if self.start == "window" and logits is None and not at.keys() - {"center"}:
            r = (self.child >= 0)[..., None] * torch.full_like(r, 1 / (self.J + leaky))
        if activation is not None:
            r = r * activation.unflatten(0, self.places)[..., None]
        r, x = r.flatten(0, 1), x.flatten(0, 1)
        return Moments(r.sum(1), (r[..., None] * x).sum(1), (r[..., None] * x.square()).sum(1) if second else None, r)

    def agree(  # type: ignore[override]
        self, num_iterations: int, *, logits: Tensor | None, gradient: str, squash: str, eps: float, **others: Any
    ) -> Tensor:
        assert Options()._asdict() | others == Options()._asdict() | {"bias": None}
        b = logits
        for _ in range(num_iterations):
            v = capsfast.squash(self.moments(logits=b).first, kind=squash, eps=eps)
            agreement = (self.votes * v.unflatten(0, self.places)[:, :, None]).sum(-1)  # [B, windows, I, J]
            agreement = agreement.detach() if gradient == "last" else agreement
            b = agreement if b is None else b + agreement
        return v


def children(layer: ConvCaps2d, size: tuple[int, ...]) -> Tensor:
    """The input capsule of each entry of every window, ``[windows, I]``; -1 for padding."""
    numbers = torch.arange(1, 1 + C * math.prod(size)).view(1, C, *size)
    return plain.windows(layer, numbers, layer.grid(size))[0] - 1


def images(dtype: torch.dtype = f64, axes: int = 2) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    poses = torch.randn(B, C, K, *SIZES[axes], dtype=dtype).requires_grad_()
    return poses, (0.2 + 0.8 * torch.rand(B, C, *SIZES[axes], dtype=dtype)).requires_grad_()


ROUTED: list[tuple[str, dict[str, Any]]] = [
    ("em", {}),
    ("em", {"leaky": True, "momentum": 0.1, "cost_scale": "sum"}),
    ("dynamic", {}),
    ("dynamic", {"learned_logits": True, "gradient": "last"}),
]


@plain.on_cpu
@pytest.mark.parametrize("start", ["child", "window"])
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize(("name", "options"), ROUTED, ids=str)
def test_children_choose_among_all_their_parents(
    by: Backend, start: str, windows: str, name: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    axes, shape = WINDOWS[windows]
    layer = LAYERS[axes](
        C,
        J,
        K,
        D,
        **shape,
        routing=name,
        competition="child",
        start=start,
        init_std=0.7,
        backend=by.name,
        dtype=f64,
        **options,
    )
    randomize(layer.routing.routing)
    poses, activation = images(axes=axes)
    leaves = [poses, *layer.parameters()] + ([activation] if name == "em" else [])
    given = (poses, activation) if name == "em" else (poses,)
    found = layer(*given)
    u = layer.unfold(poses).unflatten(0, (B, -1))
    votes = torch.einsum("ijdk,bwik->bwijd", layer.routing.W, u)
    a = layer.unfold_activation(poses, activation) if name == "em" else None
    wanted = layer.routing.routing(PlainWindowVotes(votes, children(layer, SIZES[axes]), start), a)
    of_image = tuple(plain.to_image(value, B, layer.grid(SIZES[axes])) for value in wanted)
    plain.assert_alike(found, of_image if name == "em" else of_image[0], leaves)


@pytest.mark.parametrize("name", ["em", "dynamic", "variational"])
def test_one_iteration_from_windows_is_that_of_windows(name: str) -> None:
    """The initial weight of dynamic routing is the same, too."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"routing": name, "padding": 1, "num_iterations": 1, "dtype": f64}
    alone = ConvCaps2d(C, J, K, D, **options)
    torch.manual_seed(0)
    child = ConvCaps2d(C, J, K, D, competition="child", start="window", **options)
    plain.assert_same(child.routing.W, alone.routing.W)
    assert "competition='child', start='window'" in repr(child)
    poses = images()[0]
    found, wanted = child(poses), alone(poses)
    pairs = (found, wanted) if name == "dynamic" else (tuple(found), tuple(wanted))
    plain.assert_same(*pairs)
    u, inside = child.unfold(poses), child.inside(poses)
    listed = child.at_windows(SIZE)(u, mask=inside)
    plain.assert_same(*(each if name == "dynamic" else tuple(each) for each in (listed, alone.routing(u, mask=inside))))


@pytest.mark.parametrize("learned_logits", [False, True])
def test_the_initial_weight_fits_the_first_coupling(learned_logits: bool) -> None:
    """Learned logits start at 0 and count as scores, so then the softmax starts over the parents of a child."""

    def deviation(**options: Any) -> float:
        torch.manual_seed(0)
        return float(ConvCaps2d(C, J, K, D, learned_logits=learned_logits, **options).routing.W.detach().std())

    wanted = deviation(competition="child") if learned_logits else deviation()
    assert deviation(competition="child", start="window") == pytest.approx(wanted)


def test_shares_of_a_child_sum_to_1() -> None:
    """Also if scores differ by thousands, and if all output capsules are masked."""
    layer = ConvCaps2d(C, J, K, D, padding=1, routing="em", competition="child")
    votes = layer.votes(images(torch.float32)[0])
    query = 1e3 * torch.randn(votes.B, J, D)
    for found in (votes.moments(return_weights=True), votes.moments(query=query, return_weights=True)):
        assert found.weights is not None and found.weights.isfinite().all()
        of_windows = found.weights.sum(2).unflatten(0, (B, -1)).transpose(1, 2)
        torch.testing.assert_close(F.fold(of_windows, SIZE, 3, padding=1), torch.ones(B, C, *SIZE), rtol=1e-4, atol=0)


def test_output_capsules_of_windows_can_be_masked() -> None:
    torch.manual_seed(0)
    layer = ConvCaps2d(C, J, K, D, routing="em", competition="child", dtype=f64)
    inner = layer.votes(images()[0])
    assert isinstance(inner, WindowVotes)
    given = torch.einsum("ijdk,bik->bijd", layer.routing.W, layer.unfold(images()[0])).detach().requires_grad_()
    out_mask = torch.ones(inner.B, J, dtype=torch.bool)
    out_mask[:, 1] = False
    out_mask[: inner.B // B] = False  # all output capsules of the first sample are masked
    votes = WindowVotes(votes_of("test", given, out_mask=out_mask), inner.windows)
    for query in (None, torch.randn(inner.B, J, D, dtype=f64, requires_grad=True)):
        found = votes.moments(query=query, return_weights=True, leaky=query is None)
        assert found.weights is not None
        shares = found.weights.unflatten(0, (B, -1))
        assert not shares[0].any() and not shares[..., 1].any() and shares[1, ..., 0].all()
        assert all(gradient.isfinite().all() for gradient in gradients((found.first,), [given]))
    found = layer.routing.routing(votes)
    assert not found.poses[: inner.B // B].any() and found.poses.isfinite().all()


@pytest.mark.parametrize(("axes", "n"), [(1, 120), (2, 14), (3, 7)])
def test_no_tensor_of_all_windows_and_all_places(axes: int, n: int) -> None:
    """Besides the unfolded poses, the largest tensor has the size of windows times kernel area."""
    torch.manual_seed(0)
    layer = LAYERS[axes](1, 6, 1, 12, routing="em", competition="child")
    poses = torch.randn(1, 1, 1, *[n] * axes).requires_grad_()
    with Largest() as largest:
        layer(poses).poses.sum().backward()
    windows = (n - 2) ** axes
    assert windows * 3**axes <= largest.numel < 1.5 * windows * 6 * 12 < windows * n**axes


def test_competition_in_other_forms() -> None:
    """With pose matrices, and in diagnose()."""
    torch.manual_seed(0)
    layer = ConvCaps2d(C, J, K, K, routing="em", competition="child", pose_rows=2, stride=2, padding=1)
    poses, activation = images(torch.float32)
    assert layer.routing.W.shape == (C * 9, J, 2, 2) and "competition='child'" in repr(layer)
    found = layer(poses, activation)
    diagnosis = capsfast.diagnose(layer, poses.detach(), activation=activation.detach())
    assert diagnosis.lengths.shape == (B * 3 * 3, J)
    torch.testing.assert_close(diagnosis.lengths.view(B, 3, 3, J).movedim(3, 1), found.activations.detach())
    vectors = ConvCaps2d(C, J, K, D, routing="dynamic", competition="child", padding=1)
    same = ConvCaps2d(C, J, K, D, routing="dynamic", padding=1)
    assert vectors(poses).shape == same(poses).shape
    assert 0.3 < vectors(poses).norm() / same(poses).norm() < 3
