"""Layers with the names, arguments, parameters and results of layers in other code, on the fused ops.

A network keeps its code and its checkpoints and changes only the import. docs/migration.md tells the layers apart and
lists their deviations from the paper.
"""

from .layers import (
    AgreementRouting,
    CapsLayer,
    CapsuleLayer,
    CapsuleLinear,
    DenseCapsule,
    DigitCaps,
    DigitCapsules,
    DynamicRouting,
    DynamicRoutingLayer,
    Router,
)
from .losses import CapsuleLoss, MarginLoss
from .optimizer import optimizer_state
from .routings import averaged_routing, masked_after_routing

__all__ = [
    "AgreementRouting",
    "CapsLayer",
    "CapsuleLayer",
    "CapsuleLinear",
    "CapsuleLoss",
    "DenseCapsule",
    "DigitCaps",
    "DigitCapsules",
    "DynamicRouting",
    "DynamicRoutingLayer",
    "MarginLoss",
    "Router",
    "averaged_routing",
    "masked_after_routing",
    "optimizer_state",
]
