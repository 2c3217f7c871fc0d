"""Reads the output capsules: their lengths, or the capsule of a class."""

import torch
from torch import Tensor

from ..calls import checks
from . import _arguments
from ._layer import Layer


def class_indices(op: str, labels: Tensor, anchor: Tensor, name: str = "labels") -> None:
    """Checks labels, int64 [B] for an anchor [B, J, ...]; their range only if this needs no synchronisation."""
    checks.tensor(op, name, labels, "[B]")
    B, J = anchor.shape[:2]
    if labels.dtype != torch.int64:
        raise TypeError(f"{op}: {name} must be int64, got {checks.dtype_of(labels)}; convert with {name}.long()")
    if labels.shape[0] != B:
        raise ValueError(f"{op}: {name} must be [B] = [{B}], got {checks.shape_of(labels)}")
    if labels.device != anchor.device:
        raise ValueError(f"{op}: {name} must be on {anchor.device}, got {labels.device}; move with {name}.to()")
    if checks.can_be_looked_at(labels) and labels.numel():
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= J:
            raise ValueError(f"{op}: {name} must be in [0, {J - 1}], got {low if low < 0 else high}")


def one_hot(labels: Tensor, J: int, dtype: torch.dtype) -> Tensor:
    """int64 ``[B]`` to ``[B, J]``; on a GPU an index out of range fails in the kernel."""
    hot = torch.zeros((labels.shape[0], J), dtype=dtype, device=labels.device)
    # A tensor of this dtype: torch 2.10 compiles the number 1 into an int64 mask, TorchScript takes no bool.
    return hot.scatter(1, labels[:, None], torch.ones_like(labels[:, None], dtype=dtype))


class Length(Layer):
    """Lengths of capsules, ``[..., D]`` to ``[...]`` (Sabour, Frosst, Hinton 2017, section 3).

    A zero capsule has length 0 and gradient 0.
    """

    def forward(self, capsules: Tensor) -> Tensor:
        if not isinstance(capsules, Tensor):
            raise TypeError(f"capsfast.nn.Length: capsules must be a torch.Tensor, got {type(capsules).__name__}")
        checks.floating("capsfast.nn.Length", "capsules", capsules)
        return torch.linalg.vector_norm(capsules, dim=-1)  # type: ignore[no-any-return]


class Mask(Layer):
    """Sets all capsules but one to 0, ``[B, J, D]`` to ``[B, J, D]`` (Sabour, Frosst, Hinton 2017, section 4.1).

    It keeps the capsule of the label; without labels the longest capsule.
    """

    def forward(self, capsules: Tensor, labels: Tensor | None = None) -> Tensor:
        """``labels``: int64 ``[B]``.

        Raises:
            TypeError, ValueError: capsules or labels of another type or shape; on the CPU a label out of range.
        """
        op = "capsfast.nn.Mask"
        _arguments.floats(op, "capsules", capsules, "[B, J, D]")
        if labels is None:
            labels = torch.linalg.vector_norm(capsules.detach(), dim=-1).argmax(1)
        else:
            class_indices(op, labels, capsules)
        # torch.where, not a product, so that NaN in the other capsules has no effect.
        chosen = one_hot(labels, capsules.shape[1], torch.bool)
        return torch.where(chosen[:, :, None], capsules, 0)
