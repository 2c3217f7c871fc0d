"""Layers with the names, arguments, parameters and results of those that are in use, over the fused ops.

A network keeps its code and its checkpoints, and changes the line that imports the layer. docs/migration.md says which
layer is which, and what it does other than the paper.
"""

from .agreement import AgreementRouting, CapsLayer
from .averaged import averaged_routing
from .capsule_layer import CapsuleLayer
from .capsule_linear import CapsuleLinear
from .digit_caps import DenseCapsule, DigitCaps, DigitCapsules, Router
from .dynamic_routing import DynamicRouting, DynamicRoutingLayer
from .losses import CapsuleLoss, MarginLoss

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
]
