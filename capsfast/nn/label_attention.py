"""The use of interests: attention by a target item, and scores of items."""

import math

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from ..calls import checks
from ..calls.overrides import instead
from ..calls.precision import wide_dtype
from ._layer import Layer

# Powers of scores are clamped to this, so that softmax and the derivatives of powers stay finite in float32.
LARGEST = 1e30


def _operands(op: str, interests: object, items: object, mask: Tensor | None, rows: str = "B") -> tuple[Tensor, Tensor]:
    """The checked interests, 0 where they are absent, and items. rows: the first axis of items with two axes."""
    vectors = checks.tensor(op, "interests", interests, "[B, J, D]")
    checks.floating(op, "interests", vectors)
    if not isinstance(items, Tensor):
        raise TypeError(f"{op}: items must be a torch.Tensor, got {type(items).__name__}")
    checks.dense(op, "items", items)
    checks.floating(op, "items", items)
    checks.same_device(op, "interests", vectors, "items", items)
    checks.same_dtype(op, "interests", vectors, "items", items)
    B, J, D = vectors.shape
    if J == 0:
        raise ValueError(f"{op}: interests must be at least one for each user, got {checks.shape_of(vectors)}")
    if items.dim() == 0 or items.shape[-1] != D:
        raise ValueError(f"{op}: items must end in D={D}, the size of an interest, got {checks.shape_of(items)}")
    of_users = items.dim() == 3 or rows == "B"
    if items.dim() not in (2, 3) or (of_users and items.shape[0] != B):
        raise ValueError(f"{op}: items must be [{rows}, D] or [B, N, D] with B={B}, got {checks.shape_of(items)}")
    if mask is not None:
        checks.tensor(op, "mask", mask, "[B, J]")
        if mask.dtype != torch.bool:
            raise TypeError(f"{op}: mask must be bool (True = use), got {checks.dtype_of(mask)}")
        if mask.shape != (B, J):
            raise ValueError(f"{op}: mask must be [B, J] = [{B}, {J}], got {checks.shape_of(mask)}")
        checks.same_device(op, "interests", vectors, "mask", mask)
        # NaN in an absent interest would pass a weight of 0, and would reach the gradient of the items.
        vectors = vectors.masked_fill(~mask[:, :, None], 0.0)
    return vectors, items


def _signed_power(scores: Tensor, power: float) -> Tensor:
    """``sign(x) |x|^power`` for a power above 1, whose derivative at 0 is 0."""
    # A power below 1 has no derivative at 0, and products with it are NaN.
    none = scores.abs() < torch.finfo(scores.dtype).tiny
    safe = scores.masked_fill(none, 1.0)
    return (safe * safe.abs() ** (power - 1)).masked_fill(none, 0.0)


class LabelAwareAttention(Layer):
    """The interests of a user as one vector, weighted by a target item (MIND, Li et al. 2019, equation 9).

    ``sum_j softmax_j((item . v_j)^power) v_j``. With ``power=math.inf`` the result is the interest with the largest
    score, as in the training of ComiRec (Cen et al. 2020).

    Args:
        power: 0 (all interests count alike), at least 1, or ``math.inf``.
        signed: the power of a negative score is ``-|score|^power``. Without it, an even power of a negative score is
            positive, as in the formula, and ``power`` must be an integer.

    Shapes: interests ``[B, J, D]``, items ``[B, D]`` or ``[B, N, D]``, mask ``[B, J]`` (bool, False for an interest
    that the user does not have) to ``[B, D]`` or ``[B, N, D]``, 0 for a user who has no interest.

    Raises:
        ValueError, TypeError: a power that does not fit; a shape, a dtype or a device.
    """

    def __init__(self, power: int | float = 1.0, *, signed: bool = False) -> None:
        super().__init__()
        if not isinstance(power, float) or power != math.inf:
            checks.positive(self._op, "power", power, zero=True)
            if 0 < power < 1:
                raise ValueError(f"{self._op}: power must be 0, from 1 on or math.inf, got {power}")
            if not signed and power != int(power):
                raise ValueError(
                    f"{self._op}: power must be an integer unless signed=True, since negative scores have no other, "
                    f"got {power}"
                )
        self.power, self.signed = power, signed

    def forward(self, interests: Tensor, items: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        vectors, targets = _operands(self._op, interests, items, mask)
        several = targets if targets.dim() == 3 else targets[:, None]
        scores = several @ vectors.transpose(1, 2)  # [B, N, J]
        absent = None if mask is None else ~mask[:, None]
        if self.power == math.inf:
            if absent is not None:
                scores = scores.masked_fill(absent, -math.inf)
            best = scores.argmax(2)[..., None].expand(-1, -1, vectors.shape[2])
            chosen = vectors.gather(1, best)
        else:
            chosen = self._weights(scores, absent).to(vectors.dtype) @ vectors
        if mask is not None:
            chosen = chosen.masked_fill(~mask.any(1)[:, None, None], 0.0)
        return chosen if targets.dim() == 3 else chosen[:, 0]

    def _weights(self, scores: Tensor, absent: Tensor | None) -> Tensor:
        if self.power != 1:
            scores = scores.to(wide_dtype(scores.dtype))
            limit = LARGEST ** (1 / self.power) if self.power else math.inf
            scores = scores.clamp(-limit, limit)
            scores = _signed_power(scores, self.power) if self.signed and self.power else scores**self.power
        if absent is not None:
            scores = scores.masked_fill(absent, torch.finfo(scores.dtype).min)
        return scores.softmax(2)


def interest_scores(interests: Tensor, items: Tensor, mask: Tensor | None = None) -> Tensor:
    """Scores of items when serving: the largest inner product with an interest of the user (Li et al. 2019).

    Args:
        interests: ``[B, J, D]``.
        items: ``[N, D]`` for all users, or ``[B, N, D]``.
        mask: bool ``[B, J]``, False for an interest that the user does not have.

    Returns:
        ``[B, N]``, -inf for a user who has no interest. Memory holds the scores of one interest at a time, not
        ``[B, J, N]``.

    Raises:
        ValueError, TypeError: a shape, a dtype or a device that does not fit.
    """
    if has_torch_function((interests, items, mask)):
        return instead(interest_scores, locals(), 3)  # type: ignore[no-any-return]
    vectors, targets = _operands("capsfast.nn.interest_scores", interests, items, mask, "N")
    best: Tensor | None = None
    for j in range(vectors.shape[1]):
        scores = vectors[:, j] @ targets.T if targets.dim() == 2 else (targets @ vectors[:, j, :, None])[..., 0]
        if mask is not None:
            scores = scores.masked_fill(~mask[:, j, None], -math.inf)
        best = scores if best is None else torch.maximum(best, scores)
    assert best is not None
    return best
