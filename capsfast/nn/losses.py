"""Losses of capsule networks. Sums are formed in float32 for 16-bit inputs."""

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from ..calls import checks
from ..calls.precision import wide_dtype
from ..environment.private_torch import result
from ..kinds import LOSSES
from . import _arguments
from ._arguments import Reduction
from ._layer import Layer
from .readout import class_indices, one_hot


def _wide(values: Tensor) -> Tensor:
    return values.to(wide_dtype(values.dtype))


def _reduced(per_sample: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return per_sample.mean()
    return per_sample.sum() if reduction == "sum" else per_sample


def _lengths(op: str, name: str, value: Tensor) -> Tensor:
    """``[B, J]``, or the lengths of ``[B, J, D]``."""
    if isinstance(value, Tensor) and value.dim() > 3:
        _refuse_axes(op, name, value)
    if isinstance(value, Tensor) and value.dim() == 3:
        _arguments.floats(op, name, value, "[B, J, D]")
        return torch.linalg.vector_norm(_wide(value), dim=-1)  # type: ignore[no-any-return]
    _arguments.floats(op, name, value, "[B, J]")
    return _wide(value)


def _refuse_axes(op: str, name: str, value: Tensor) -> NoReturn:
    """Raises the error for lengths or capsules with axes of length 1, or at the positions of an image."""
    ones = [axis for axis in (*range(value.dim() - 1, 2, -1), 1, 2) if value.shape[axis] == 1][: value.dim() - 3]
    if value.dim() - len(ones) == 3:
        remedy = f"give {name}.squeeze({tuple(ones) if len(ones) > 1 else ones[0]})"
    else:
        image, norm = ("[B, J, H, W]", "") if value.dim() == 4 else ("[B, J, D, *spatial]", ".norm(dim=2)")
        remedy = (
            f"of an image {image} every position is a sample: give {name}{norm}.movedim(1, -1).flatten(0, -2), and "
            f"targets.flatten(), or if the targets have an axis J targets.movedim(1, -1).flatten(0, -2)"
        )
    raise ValueError(f"{op}: {name} must be [B, J] or capsules [B, J, D], got {checks.shape_of(value)}; {remedy}")


class MarginLoss(Layer):
    """Sum over the classes of ``T max(0, m_plus - |v|)^2 + lam (1 - T) max(0, |v| - m_minus)^2``
    (Sabour, Frosst, Hinton 2017, eq. 4).

    Args:
        m_plus, m_minus, lam: margins, and the weight of absent classes.
        squared: False omits the squares.
        reduction: over the batch: ``"mean"``, ``"sum"`` or ``"none"``, a number for each sample.

    Shapes: lengths ``[B, J]`` or capsules ``[B, J, D]``, and targets: int64 ``[B]`` (one class each) or
    ``[B, J]`` (1 or True for each present class). Result ``[]``, or ``[B]`` without reduction.

    Raises:
        ValueError, TypeError: an argument or a target that does not fit.
    """

    _others = LOSSES

    def __init__(
        self,
        m_plus: float = 0.9,
        m_minus: float = 0.1,
        lam: float = 0.5,
        *,
        squared: bool = True,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        self.m_plus, self.m_minus, self.lam = m_plus, m_minus, lam
        self.squared, self.reduction = squared, reduction

    def forward(self, lengths: Tensor, targets: Tensor) -> Tensor:
        present, absent = self._per_class(lengths, targets)
        return _reduced((present + absent).sum(1), self.reduction)

    def parts(self, lengths: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The two summands of the loss: from present classes, and from absent classes."""
        present, absent = self._per_class(lengths, targets)
        return _reduced(present.sum(1), self.reduction), _reduced(absent.sum(1), self.reduction)

    def _per_class(self, lengths: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of present and of absent classes, ``[B, J]`` each."""
        op = self._op
        lengths = _lengths(op, "lengths", lengths)
        present = self._present(op, lengths, targets)
        too_short, too_long = F.relu(self.m_plus - lengths), F.relu(lengths - self.m_minus)
        if self.squared:
            too_short, too_long = too_short.square(), too_long.square()
        return present * too_short, self.lam * (1 - present) * too_long

    def _present(self, op: str, lengths: Tensor, targets: Tensor) -> Tensor:
        if isinstance(targets, Tensor) and targets.dim() == 2:
            if targets.shape != lengths.shape:
                raise ValueError(
                    f"{op}: targets must be [B] or [B, J] = {checks.shape_of(lengths)}, got {checks.shape_of(targets)}"
                )
            checks.same_device(op, "lengths", lengths, "targets", targets)
            return targets.to(lengths.dtype)
        class_indices(op, targets, lengths, "targets")
        return one_hot(targets, lengths.shape[1], lengths.dtype)


class ReconstructionLoss(Layer):
    """Squared error, summed over all numbers of an image (Sabour, Frosst, Hinton 2017, section 4.1).

    Args:
        reduction: over the batch: ``"mean"``, ``"sum"`` or ``"none"``, a number for each sample.

    Shapes: reconstruction and images ``[B, ...]``. Result ``[]``, or ``[B]`` without reduction.

    Raises:
        ValueError, TypeError: unknown reduction, shapes that differ.
    """

    def __init__(self, reduction: Reduction = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, reconstruction: Tensor, images: Tensor) -> Tensor:
        op = self._op
        for name, value in (("reconstruction", reconstruction), ("images", images)):
            if not isinstance(value, Tensor):
                raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")
            checks.floating(op, name, value)
        if reconstruction.shape != images.shape or images.dim() < 2:
            raise ValueError(
                f"{op}: reconstruction and images must have one shape [B, ...], got "
                f"{checks.shape_of(reconstruction)} and {checks.shape_of(images)}"
            )
        checks.same_device(op, "reconstruction", reconstruction, "images", images)
        error = _wide(reconstruction) - _wide(images)
        return _reduced(error.square().flatten(1).sum(1), self.reduction)


@result
class LossParts(NamedTuple):
    """``total = margin + reconstruction_weight · reconstruction``, all tensors."""

    total: Tensor
    margin: Tensor
    reconstruction: Tensor


class CapsNetLoss(Layer):
    """Margin loss plus ``reconstruction_weight`` times the summed squared error (Sabour et al. 2017, section 4.1).

    The loss does not synchronise with the device: call ``.item()`` of a part when you need the number.

    Args:
        reconstruction_weight: factor of the error summed over an image: the paper's 0.0005 is 0.392 times the mean
            error of 28 x 28 numbers.
        m_plus, m_minus, lam, squared: see :class:`MarginLoss`.
        reduction: over the batch, in both parts.

    Shapes: ``output`` = (lengths ``[B, J]``, capsules, reconstruction ``[B, C, H, W]`` or None), such as
    a :class:`capsfast.models.CapsNetOutput`; images ``[B, C, H, W]``; labels as in :class:`MarginLoss`.
    Without a reconstruction that part is 0.

    Raises:
        ValueError, TypeError: as the two losses.
    """

    def __init__(
        self,
        reconstruction_weight: float = 0.0005,
        m_plus: float = 0.9,
        m_minus: float = 0.1,
        lam: float = 0.5,
        *,
        squared: bool = True,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        self.reconstruction_weight = reconstruction_weight
        self.margin = MarginLoss(m_plus, m_minus, lam, squared=squared, reduction=reduction)
        self.reconstruction = ReconstructionLoss(reduction)

    def forward(self, output: tuple[Tensor, Tensor | None, Tensor | None], images: Tensor, labels: Tensor) -> LossParts:
        lengths, _, reconstruction = output
        margin: Tensor = self.margin(lengths, labels)
        if reconstruction is None:
            return LossParts(margin, margin, torch.zeros_like(margin))
        error: Tensor = self.reconstruction(reconstruction, images)
        return LossParts(margin + self.reconstruction_weight * error, margin, error)


class SpreadLoss(Layer):
    """Sum over the wrong classes of ``max(0, m - (a_target - a_j))^2`` (Hinton, Sabour, Frosst 2018, eq. 3).

    The margin m grows linearly from ``start`` to ``end`` over ``steps`` optimizer steps, which the caller counts: the
    loss has no state, so a resumed training needs only its step.

    Args:
        start, end: margins at step 0 and from ``steps`` on.
        steps: number of steps in which the margin grows.
        reduction: over the batch: ``"mean"``, ``"sum"`` or ``"none"``, a number for each sample.

    Shapes: activations ``[B, J]`` (or capsules ``[B, J, D]``, whose lengths count), targets int64 ``[B]``, step an
    int or a tensor ``[]``. Result ``[]``, or ``[B]`` without reduction.

    Raises:
        ValueError, TypeError: an argument or a target that does not fit.
    """

    def __init__(
        self, start: float = 0.2, end: float = 0.9, steps: int = 10_000, *, reduction: Reduction = "mean"
    ) -> None:
        super().__init__()
        self.start, self.end, self.steps, self.reduction = start, end, steps, reduction

    def margin(self, step: int | Tensor) -> float | Tensor:
        """The margin m at a step."""
        if isinstance(step, Tensor):
            return self.start + (self.end - self.start) * (step / self.steps).clamp(0, 1)
        return self.start + (self.end - self.start) * min(max(step / self.steps, 0.0), 1.0)

    def forward(self, activations: Tensor, targets: Tensor, step: int | Tensor) -> Tensor:
        op = self._op
        activations = _lengths(op, "activations", activations)
        class_indices(op, targets, activations, "targets")
        of_target = activations.gather(1, targets[:, None])
        per_class = F.relu(self.margin(step) - (of_target - activations)).square()
        wrong = ~one_hot(targets, activations.shape[1], torch.bool)
        return _reduced((per_class * wrong).sum(1), self.reduction)
