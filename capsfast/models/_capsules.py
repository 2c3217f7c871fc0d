"""Helpers of the models for the capsules from their layers."""

import torch
from torch import Tensor

from ..functional import squash
from ..nn.routing.base import Capsules


def image_lengths(poses: Tensor) -> Tensor:
    """``[B, J, D, *spatial]`` to ``[B, J, *spatial]``."""
    return torch.linalg.vector_norm(poses, dim=2)  # type: ignore[no-any-return]


def with_lengths(found: Capsules) -> Tensor:
    """Poses ``[B, J, D, *spatial]`` scaled to the lengths of their activations, which many routings do not do."""
    return squash(found.poses, 2, kind="unit") * found.activations.unsqueeze(2)


def class_of(labels: Tensor | None, found: Capsules) -> Tensor:
    """The labels, int64 ``[B]``; without labels, the classes with the largest activations."""
    return found.activations.detach().argmax(1) if labels is None else labels
