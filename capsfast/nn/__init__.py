"""Modules: thin shells that own parameters."""

from .conv_caps import ConvCaps2d
from .coupling_entropy import CouplingEntropy
from .couplings import couplings
from .decoder import ConvDecoder, Decoder
from .dynamic_routing import ClassCaps, DigitCaps, DynamicRouting
from .losses import CapsNetLoss, LossParts, MarginLoss, ReconstructionLoss, SpreadLoss
from .object_caps import ObjectCaps
from .part_caps import PartCaps, TemplateMixture
from .primary_caps import FlattenCaps, PrimaryCaps
from .readout import Length, Mask
from .routed_caps import RoutedCaps
from .routing import ROUTINGS, AgreementRouting, Capsules, IterativeRouting, Routing, Votes
from .routing_by_agreement import RoutingByAgreement
from .set_transformer import SetTransformer

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
    "ObjectCaps",
    "PartCaps",
    "PrimaryCaps",
    "ReconstructionLoss",
    "RoutedCaps",
    "Routing",
    "RoutingByAgreement",
    "SetTransformer",
    "SpreadLoss",
    "TemplateMixture",
    "Votes",
    "couplings",
]
