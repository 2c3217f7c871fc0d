"""Layers with the names, arguments, parameters and results of those that are in use, over the fused ops.

A network keeps its code and its checkpoints, and changes the line that imports the layer. docs/migration.md says which
layer is which, and what it does other than the paper.
"""

from .averaged import averaged_routing
from .forms import (
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
from .masked import masked_after_routing

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
]
