"""Modules: thin shells that own parameters."""

from .class_caps import ClassCaps2d
from .conv_caps import ConvCaps2d
from .coupling_entropy import CouplingEntropy
from .couplings import couplings
from .decoder import ConvDecoder, Decoder
from .dynamic_routing import ClassCaps, DigitCaps, DynamicRouting
from .losses import CapsNetLoss, LossParts, MarginLoss, ReconstructionLoss, SpreadLoss
from .primary_caps import FlattenCaps, PrimaryCaps
from .primary_matrix_caps import PrimaryMatrixCaps
from .readout import Length, Mask
from .routed_caps import RoutedCaps
from .routing import ROUTINGS, AgreementRouting, Capsules, EMRouting, IterativeRouting, Routing, Votes
from .routing_by_agreement import RoutingByAgreement

__all__ = [
    "ROUTINGS",
    "AgreementRouting",
    "CapsNetLoss",
    "Capsules",
    "ClassCaps",
    "ClassCaps2d",
    "ConvCaps2d",
    "ConvDecoder",
    "CouplingEntropy",
    "Decoder",
    "DigitCaps",
    "DynamicRouting",
    "EMRouting",
    "FlattenCaps",
    "IterativeRouting",
    "Length",
    "LossParts",
    "MarginLoss",
    "Mask",
    "PrimaryCaps",
    "PrimaryMatrixCaps",
    "ReconstructionLoss",
    "RoutedCaps",
    "Routing",
    "RoutingByAgreement",
    "SpreadLoss",
    "Votes",
    "couplings",
]
