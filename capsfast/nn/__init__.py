"""Modules: thin shells that own parameters."""

from .conv_caps import ConvCaps2d
from .coupling_entropy import CouplingEntropy
from .couplings import couplings, recorded
from .decoder import ConvDecoder, Decoder
from .dynamic_routing import ClassCaps, DigitCaps, DynamicRouting
from .losses import CapsNetLoss, LossParts, MarginLoss, ReconstructionLoss, SpreadLoss
from .primary_caps import FlattenCaps, PrimaryCaps
from .readout import Length, Mask
from .routed_caps import RoutedCaps
from .routing import ROUTINGS, AgreementRouting, Capsules, IterativeRouting, Routing, Votes
from .routing_by_agreement import RoutingByAgreement

__all__ = [
    "ROUTINGS",
    "AgreementRouting",
    "CapsNetLoss",
    "Capsules",
    "ClassCaps",
    "ConvCaps2d",
    "ConvDecoder",
    "CouplingEntropy",
    "Decoder",
    "DigitCaps",
    "DynamicRouting",
    "FlattenCaps",
    "IterativeRouting",
    "Length",
    "LossParts",
    "MarginLoss",
    "Mask",
    "PrimaryCaps",
    "ReconstructionLoss",
    "RoutedCaps",
    "Routing",
    "RoutingByAgreement",
    "SpreadLoss",
    "Votes",
    "couplings",
    "recorded",
]
