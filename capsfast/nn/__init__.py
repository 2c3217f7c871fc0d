"""Modules: thin shells that own parameters."""

from .conv_caps import ConvCaps2d
from .coupling_entropy import CouplingEntropy
from .couplings import couplings
from .decoder import ConvDecoder, Decoder
from .depthwise_caps import DepthwisePrimaryCaps
from .dynamic_routing import ClassCaps, DigitCaps, DynamicRouting
from .losses import CapsNetLoss, LossParts, MarginLoss, ReconstructionLoss, SpreadLoss
from .primary_caps import FlattenCaps, PrimaryCaps
from .readout import Length, Mask
from .routed_caps import RoutedCaps
from .routing import (
    ROUTINGS,
    AgreementRouting,
    AttentionRouting,
    Capsules,
    CosineRouting,
    InvertedAttentionRouting,
    IterativeRouting,
    KMeansRouting,
    Routing,
    SelfAttentionRouting,
    SelfRouting,
    VariationalRouting,
    Votes,
)
from .routing_by_agreement import RoutingByAgreement

__all__ = [
    "ROUTINGS",
    "AgreementRouting",
    "AttentionRouting",
    "CapsNetLoss",
    "Capsules",
    "ClassCaps",
    "ConvCaps2d",
    "ConvDecoder",
    "CosineRouting",
    "CouplingEntropy",
    "Decoder",
    "DepthwisePrimaryCaps",
    "DigitCaps",
    "DynamicRouting",
    "FlattenCaps",
    "InvertedAttentionRouting",
    "IterativeRouting",
    "KMeansRouting",
    "Length",
    "LossParts",
    "MarginLoss",
    "Mask",
    "PrimaryCaps",
    "ReconstructionLoss",
    "RoutedCaps",
    "Routing",
    "RoutingByAgreement",
    "SelfAttentionRouting",
    "SelfRouting",
    "SpreadLoss",
    "VariationalRouting",
    "Votes",
    "couplings",
]
