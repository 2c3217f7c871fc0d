"""The definitions of the papers in a few lines of torch, with votes and coupling in memory, and with gradients.

Shares no code with capsfast. The reference backend is compared with it; layers and networks are too.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from .backends import EMULATED, available

# Tests of layers in float64 on the CPU. Not for emulated backends and for other devices.
on_cpu = pytest.mark.parametrize(
    "by", [b for b in available() if b.device == "cpu" and torch.float64 in b.dtypes and b != EMULATED], ids=str
)


def squash(s: Tensor, kind: str = "paper", eps: float = 1e-8) -> Tensor:
    n = s.square().sum(-1, keepdim=True)
    length = torch.sqrt(n + eps)
    factors = {
        "paper": lambda: n / (1 + n) / length,
        "half": lambda: n / (0.5 + n) / length,
        "eps_outside": lambda: n / (1 + n) / (torch.linalg.vector_norm(s, dim=-1, keepdim=True) + eps),
        "exp": lambda: (1 - torch.exp(-length)) / length,
        "unit": lambda: 1 / length,
        "identity": lambda: torch.ones_like(n),
    }
    return factors[kind]() * s


def couple(b: Tensor, softmax: str = "out", leaky: bool = False) -> Tensor:
    """Softmax of ``b [B, I, J]``; 0 for logits of -inf. leaky: with one more entry, whose logit is 0."""
    dim = 2 if softmax == "out" else 1
    most = b.amax(dim, keepdim=True).nan_to_num(neginf=0.0)
    e = (b - most).exp()
    total = e.sum(dim, keepdim=True) + (torch.exp(-most) if leaky else 0)
    return e / torch.where(total > 0, total, 1)


def masked(b: Tensor, mask: Tensor | None, out_mask: Tensor | None) -> Tensor:
    """``b [B, I, J]`` with -inf where a capsule is masked."""
    b = b if mask is None else b.masked_fill(~mask[:, :, None], -math.inf)
    return b if out_mask is None else b.masked_fill(~out_mask[:, None], -math.inf)


def route(
    votes: Tensor,
    num_iterations: int = 3,
    logits: Tensor | None = None,
    bias: Tensor | None = None,
    softmax: str = "out",
    kind: str = "paper",
    *,
    eps: float = 1e-8,
    leaky: bool = False,
    mask: Tensor | None = None,
    out_mask: Tensor | None = None,
    last_squash: str | None = None,
    sharpness: float = 1.0,
    accumulate: bool = True,
    gradient: str = "full",
    averaged: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sabour, Frosst, Hinton 2017, procedure 1: ``votes [B, I, J, D]`` to ``(v, c)``. A logit of -inf masks the pair.

    averaged: the logits of a batch are their mean. last_squash: of the last iteration, by default kind. sharpness: a
    factor of the agreement. accumulate: False takes the last agreement as the logits.
    """
    b = torch.zeros_like(votes[..., 0]) if logits is None else logits.expand(votes.shape[:3])
    for t in range(num_iterations):
        scores = masked(b.mean(0).expand(b.shape) if averaged else b, mask, out_mask)
        c = couple(scores, softmax, leaky)
        s = (c[..., None] * votes).sum(1)
        s = s if bias is None else s + bias
        v = squash(s, kind if t + 1 < num_iterations else last_squash or kind, eps)
        v = v if out_mask is None else v * out_mask[..., None]
        agreement = sharpness * (votes * v[:, None]).sum(-1) * (1 if mask is None else mask[..., None])
        agreement = agreement.detach() if gradient == "last" else agreement
        b = b + agreement if accumulate else agreement
    return v, c


def route_everywhere(
    votes: Tensor, num_iterations: int, logits: Tensor | None = None, bias: Tensor | None = None, kind: str = "paper"
) -> tuple[Tensor, Tensor]:
    """Rajasegaran et al. 2019, algorithm 1: ``votes [B, I, J, D, H, W]``, softmax and squash over all positions."""
    b = torch.zeros_like(votes[:, :, :, 0])
    b = b if logits is None else b + logits[..., None, None]
    for _ in range(num_iterations):
        c = b.flatten(2).softmax(2).view_as(b)
        s = torch.einsum("bijyx,bijdyx->bjdyx", c, votes)
        s = s if bias is None else s + bias[..., None, None]
        v = squash(s.flatten(2), kind).view_as(s)
        b = b + torch.einsum("bijdyx,bjdyx->bijyx", votes, v)
    return v, c


def meetings(layer: Any, image: Sequence[int], grid: Sequence[int]) -> list[tuple[tuple[int, ...], ...]]:
    """The windows of a layer: triples (place in the grid, place in the image, place in the window); no padding."""
    found = []
    for offset in itertools.product(*map(range, layer.kernel_size)):
        for place in itertools.product(*map(range, grid)):
            at = tuple(
                n * step - pad + o * gap
                for n, step, pad, o, gap in zip(place, layer.stride, layer.padding, offset, layer.dilation, strict=True)
            )
            if all(0 <= n < size for n, size in zip(at, image, strict=True)):
                found.append((place, at, offset))
    return found


def windows(layer: Any, image: Tensor, grid: Sequence[int]) -> Tensor:
    """The windows of an image ``[B, types, ..., *size]``, ``[B, windows, types·area, ...]``; 0 in the padding."""
    places, offsets = ([*itertools.product(*map(range, sizes))] for sizes in (grid, layer.kernel_size))
    size = image.shape[image.dim() - len(grid) :]
    seen = image.new_zeros(len(image), len(places), image.shape[1], len(offsets), *image.shape[2 : -len(grid)])
    for place, at, offset in meetings(layer, size, grid):
        seen[:, places.index(place), :, offsets.index(offset)] = image[(..., *at)]
    return seen.flatten(2, 3)


def at_samples(value: Tensor, axes: int) -> Tensor:
    """Turns the last axes, of positions, into samples: ``[B, ..., *spatial]`` to ``[B S, ...]``."""
    return value.flatten(value.dim() - axes).movedim(-1, 1).flatten(0, 1)


def to_image(value: Tensor, samples: int, spatial: Sequence[int]) -> Tensor:
    """The inverse of :func:`at_samples`."""
    return value.unflatten(0, (samples, -1)).movedim(1, -1).unflatten(-1, tuple(spatial))


def moments(
    x: Tensor,
    normalize: str,
    leaky: bool,
    *,
    mask: Tensor,
    out_mask: Tensor,
    lse: Tensor | None = None,
    **given: Any,
) -> dict[str, Tensor]:
    """A routing pass with every argument, see docs/passes.md: votes ``[B, I, J, D]`` to the moments by name."""
    x = x - given["center"][:, None]
    scored = given["query"][:, None] * x - given["precision"][:, None] * x.square() / 2
    b = masked(scored.sum(-1) + given["logits"] + given["prior"][:, None], mask, out_mask)
    if normalize in ("out", "in"):
        r = couple(b, normalize, leaky)
    elif normalize == "none":
        r = b.nan_to_num(neginf=0.0)
    else:
        r = 1 / (1 + (-b).exp()) if lse is None else (b - lse[..., None]).exp()
    log_sum = b.exp().sum(1 if normalize == "in" else 2)
    r = r * given["activation"][..., None]
    return {
        "mass": r.sum(1),
        "first": (r[..., None] * x).sum(1),
        "second": (r[..., None] * x.square()).sum(1),
        "weights": r,
        "log_sum": (log_sum + leaky).log(),
    }


def votes(u: Tensor, weight: Tensor) -> Tensor:
    """``u [B, I, K]``, ``weight [I or 1, J, D, K]`` to ``[B, I, J, D]``."""
    return (weight * u[:, :, None, None, :]).sum(-1)


def normalized(x: Tensor, dim: int | tuple[int, ...] = -1, eps: float = 1e-5) -> Tensor:
    """Mean 0 and variance 1 along these axes."""
    centered = x - x.mean(dim, keepdim=True)
    return centered / (centered.square().mean(dim, keepdim=True) + eps).sqrt()


def decoded(decoder: Any, v: Tensor, chosen: Tensor | None = None) -> Tensor:
    """The images of a decoder of three linear layers, from all capsules or from the chosen ones."""
    p = dict(decoder.named_parameters())
    x = (v if chosen is None else v * F.one_hot(chosen, v.shape[1])[:, :, None]).flatten(1)
    for n in (0, 2, 4):
        x = F.linear(x, p[f"layers.{n}.weight"], p[f"layers.{n}.bias"])
        x = x.sigmoid() if n == 4 else x.relu()
    return x.view(len(x), *decoder.image_shape)


def assert_same(got: object, wanted: object, tolerance: float = 1e-9) -> None:
    """Compares float64 results of two ways to compute the same."""
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def gradients(found: Tensor | Sequence[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """For the same random gradients of the results in every call with results of these shapes."""
    found = (found,) if isinstance(found, Tensor) else tuple(found)
    torch.manual_seed(2)
    seeds = [
        torch.randn(tensor.shape, dtype=tensor.dtype) for tensor in found
    ]  # contiguous, whatever the strides of outputs
    return list(torch.autograd.grad(found, leaves, seeds, allow_unused=True, materialize_grads=True))


def assert_alike(
    got: Tensor | Sequence[Tensor], wanted: Tensor | Sequence[Tensor], leaves: list[Tensor], tolerance: float = 1e-9
) -> None:
    """Compares float64 results and their gradients."""
    one, other = ((tensor,) if isinstance(tensor, Tensor) else tuple(tensor) for tensor in (got, wanted))
    assert_same(one, other, tolerance)
    assert_same(gradients(one, leaves), gradients(other, leaves), tolerance)
