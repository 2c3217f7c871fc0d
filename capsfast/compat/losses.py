"""The losses MarginLoss and CapsuleLoss of other code."""

from typing import Any

from torch import Tensor
from typing_extensions import overload

from .. import nn as capsules
from ..kinds import LOSSES, Layout
from ..nn._layer import Layer
from .published import SharedName


class MarginLoss(SharedName):
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
    _layouts = (
        Layout(inputs=("lengths", "targets", "size_average")),
        *(Layout(J="n_labels", inputs=("v", "labels")),) * 2,
        Layout(inputs=("y_pred", "y_true")),
    )

    @overload
    def __init__(self, m_pos: float, m_neg: float, lambda_: float) -> None: ...
    @overload
    def __init__(self, n_labels: int, m_positive: float, m_negative: float, lambda_: float = 0.5) -> None: ...
    @overload
    def __init__(
        self, *, n_labels: int, lambda_: float = 0.5, m_positive: float = 0.9, m_negative: float = 0.1
    ) -> None: ...
    @overload
    def __init__(self, *, m_plus: float = 0.9, m_minus: float = 0.1, lambda_: float = 0.5) -> None: ...
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        arguments = self._take(args, kwargs)
        # In every form the alphabet sorts the names so: lambda_, m_minus or m_neg, m_plus or m_pos.
        lam, m_minus, m_plus = (arguments[name] for name in sorted(arguments.keys() - {"n_labels"}))
        self._mean_of_all = "m_pos" in arguments
        self._loss = capsules.MarginLoss(
            m_plus, m_minus, lam, squared="n_labels" not in arguments, reduction="sum" if self._mean_of_all else "mean"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        lengths, targets, *more = self._inputs(args, kwargs)
        if self._layout.J and lengths.dim() > 1 and lengths.shape[1] != self.n_labels:
            raise ValueError(f"{self._op}: v must be [B, n_labels={self.n_labels}, D], got {list(lengths.shape)}")
        loss: Tensor = self._loss(lengths, targets)
        average = self._mean_of_all and (not more or more[0])
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
