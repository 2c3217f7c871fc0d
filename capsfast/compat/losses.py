"""The losses MarginLoss and CapsuleLoss of other code."""

from typing import Any

from torch import Tensor

from .. import nn as capsules
from ..kinds import LOSSES
from ..nn._layer import Layer
from .forms import FormLayer


class MarginLoss(FormLayer):
    """Margin loss (Sabour, Frosst, Hinton 2017, eq. 4), in one of four forms.

    * ``MarginLoss(m_pos, m_neg, lambda_)(lengths, targets, size_average=True)``: the mean over batch and classes; with
      ``size_average=False`` the sum over both.
    * ``MarginLoss(n_labels, m_positive, m_negative, lambda_=0.5)(v, labels)``: takes capsules ``[B, J, D]`` and does
      not square; the sum over the classes, the mean over the batch.
    * ``MarginLoss(*, n_labels, lambda_=0.5, m_positive=0.9, m_negative=0.1)(v, labels)``: the same.
    * ``MarginLoss(m_plus=0.9, m_minus=0.1, lambda_=0.5)(y_pred, y_true)``, with keywords or without arguments: the
      paper's loss; the sum over the classes, the mean over the batch.

    Shapes: lengths or capsules and targets as for :class:`capsfast.nn.MarginLoss`.
    """

    _others = LOSSES

    def _start(self, given: dict[str, Any]) -> None:
        # In every form the alphabet sorts the names so: lambda_, m_minus or m_neg, m_plus or m_pos.
        lam, m_minus, m_plus = (given[name] for name in sorted(given.keys() - {"n_labels"}))
        self._by_hand = "m_pos" in given
        self._loss = capsules.MarginLoss(
            m_plus, m_minus, lam, squared="n_labels" not in given, reduction="sum" if self._by_hand else "mean"
        )

    def forward(self, *given: Any, **named: Any) -> Tensor:
        lengths, targets, *more = self._inputs(given, named)
        if "J" in self._named and lengths.dim() > 1 and lengths.shape[1] != self.n_labels:
            raise ValueError(f"{self._op}: v must be [B, n_labels={self.n_labels}, D], got {list(lengths.shape)}")
        loss: Tensor = self._loss(lengths, targets)
        average = self._by_hand and (not more or more[0])
        return loss / (lengths.shape[0] * lengths.shape[1]) if average else loss


class CapsuleLoss(Layer):
    """Margin loss plus 0.0005 times the squared error summed over an image (Sabour, Frosst, Hinton 2017).

    Shapes: images ``[B, ...]``, labels ``[B, J]`` (1 for the present classes) or int64 ``[B]``, classes ``[B, J]``
    (lengths), reconstructions with as many numbers as the images. Result ``[]``, the mean over the batch.

    Raises:
        ValueError, TypeError: inputs that do not fit.
    """

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
        return self._loss((classes, None, reconstructions), images, labels).total
