"""Losses called MarginLoss and CapsuleLoss."""

from typing import Any

from torch import Tensor

from .. import nn as capsules
from ..kinds import LOSSES
from ..nn import _arguments
from ..nn._called import Called
from ._forms import Forms


class MarginLoss(Forms):
    """Three losses of this name, told apart by their arguments (Sabour, Frosst, Hinton 2017, eq. 4).

    * ``MarginLoss(m_pos, m_neg, lambda_)(lengths, targets, size_average=True)``: mean over batch and classes, else the
      sum over both.
    * ``MarginLoss(n_labels, m_positive, m_negative, lambda_=0.5)(v, labels)``: of capsules ``[B, J, D]``, without the
      squares; sum over the classes, mean over the batch.
    * ``MarginLoss(m_plus=0.9, m_minus=0.1, lambda_=0.5)(y_pred, y_true)``, by keyword or without arguments: sum over
      the classes, mean over the batch, as in the paper.

    A subclass is of the form in which it calls this constructor.

    Shapes: lengths or capsules and targets as for :class:`capsfast.nn.MarginLoss`.

    Raises:
        ValueError, TypeError: an argument or a target that does not fit.
    """

    _op = "capsfast.compat.MarginLoss"
    _kinds = LOSSES

    @staticmethod
    def _form_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> type[Forms]:
        if {"n_labels", "m_positive", "m_negative"} & set(kwargs) or (args and type(args[0]) is int and args[0] > 1):
            return _OfCapsules
        return _OfPaper if not args and set(kwargs) <= {"m_plus", "m_minus", "lambda_"} else _OfLengths


class _OfLengths(MarginLoss):
    def __init__(self, m_pos: float, m_neg: float, lambda_: float) -> None:
        Called.__init__(self)
        self.m_pos, self.m_neg, self.lambda_ = m_pos, m_neg, lambda_
        self._loss = capsules.MarginLoss(m_pos, m_neg, lambda_, reduction="sum")

    def forward(self, lengths: Tensor, targets: Tensor, size_average: bool = True) -> Tensor:
        loss: Tensor = self._loss(lengths, targets)
        return loss / (lengths.shape[0] * lengths.shape[1]) if size_average else loss


class _OfCapsules(MarginLoss):
    def __init__(self, n_labels: int, m_positive: float, m_negative: float, lambda_: float = 0.5) -> None:
        Called.__init__(self)
        _arguments.integer(self._op, "n_labels", n_labels)
        self.n_labels, self.m_positive, self.m_negative, self.lambda_ = n_labels, m_positive, m_negative, lambda_
        self._loss = capsules.MarginLoss(m_positive, m_negative, lambda_, squared=False)

    def forward(self, v: Tensor, labels: Tensor) -> Tensor:
        if v.dim() > 1 and v.shape[1] != self.n_labels:
            raise ValueError(f"{self._op}: v must be [B, n_labels={self.n_labels}, D], got {list(v.shape)}")
        return self._loss(v, labels)  # type: ignore[no-any-return]


class _OfPaper(MarginLoss):
    def __init__(self, m_plus: float = 0.9, m_minus: float = 0.1, lambda_: float = 0.5) -> None:
        Called.__init__(self)
        self.m_plus, self.m_minus, self.lambda_ = m_plus, m_minus, lambda_
        self._loss = capsules.MarginLoss(m_plus, m_minus, lambda_)

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        return self._loss(y_pred, y_true)  # type: ignore[no-any-return]


class CapsuleLoss(Called):
    """Margin loss of lengths and 0.0005 times the squared error summed over an image (Sabour, Frosst, Hinton 2017).

    Shapes: images ``[B, ...]``, labels ``[B, J]`` (1 for the classes that are there) or int64 ``[B]``, classes ``[B,
    J]`` (lengths), reconstructions with as many numbers as the images. Result ``[]``, the mean over the batch.

    Raises:
        ValueError, TypeError: inputs that do not fit.
    """

    _op = "capsfast.compat.CapsuleLoss"
    _kinds = LOSSES

    def __init__(self) -> None:
        super().__init__()
        self._loss = capsules.CapsNetLoss()

    def forward(self, images: Tensor, labels: Tensor, classes: Tensor, reconstructions: Tensor) -> Tensor:
        if images.numel() != reconstructions.numel():
            raise ValueError(
                f"capsfast.compat.CapsuleLoss: reconstructions must have as many numbers as images "
                f"{list(images.shape)}, got {list(reconstructions.shape)}"
            )
        images = images.reshape(reconstructions.shape)
        return self._loss((classes, None, reconstructions), images, labels).total  # type: ignore[no-any-return]
