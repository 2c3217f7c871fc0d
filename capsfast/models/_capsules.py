"""Helpers of the models for the capsules from their layers."""

from typing import Any

from torch import Tensor

from ..functional import squash
from ..nn.routing.base import Capsules


def through(layer: Any, poses: Tensor, **options: Any) -> Tensor:
    """Between layers capsules say by their lengths how present they are, which poses of many routings do not do."""
    found: Capsules = layer.capsules(poses, **options)
    if layer.uses_poses_alone:
        return found.poses
    return squash(found.poses, 2, kind="unit") * found.activations.unsqueeze(2)
