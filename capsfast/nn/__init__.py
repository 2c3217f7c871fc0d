"""Layers and losses as modules, which hold parameters and call the functions of capsfast."""

from .class_caps import ClassCaps1d, ClassCaps2d, ClassCaps3d
from .conv_caps import ConvCaps1d, ConvCaps2d, ConvCaps3d
from .couplings import CouplingEntropy, couplings, recorded
from .decoder import ConvDecoder, Decoder
from .dynamic_routing import ClassCaps, DigitCaps, DynamicRouting
from .interest_caps import InterestCapsules, Interests
from .label_attention import LabelAwareAttention, interest_scores
from .losses import CapsNetLoss, LossParts, MarginLoss, ReconstructionLoss, SpreadLoss
from .matrix_routing import MatrixRouting, ScoredCapsules
from .primary_caps import DepthwisePrimaryCaps, FlattenCaps, PrimaryCaps
from .primary_matrix_caps import PrimaryMatrixCaps
from .readout import Length, Mask
from .routed_caps import RoutedCaps
from .routing.agreement import AgreementRouting, RoutingByAgreement
from .routing.attention import AttentionRouting, InvertedAttentionRouting, SelfAttentionRouting
from .routing.base import Capsules, IterativeRouting, Routing
from .routing.cosine import CosineRouting, KMeansRouting
from .routing.em import EMRouting
from .routing.names import ROUTINGS
from .routing.self_routing import SelfRouting
from .routing.variational import VariationalRouting
from .routing.votes import Votes
from .slim_caps import SlimConvCaps2d, SlimConvCaps3d, SlimConvTransposeCaps2d, SlimConvTransposeCaps3d
from .vector_routing import VectorRouting
from .weights import FullWeight, Groups, LowRank, SharedWeight, Weight

__all__ = [
    "ROUTINGS",
    "AgreementRouting",
    "AttentionRouting",
    "CapsNetLoss",
    "Capsules",
    "ClassCaps",
    "ClassCaps1d",
    "ClassCaps2d",
    "ClassCaps3d",
    "ConvCaps1d",
    "ConvCaps2d",
    "ConvCaps3d",
    "ConvDecoder",
    "CosineRouting",
    "CouplingEntropy",
    "Decoder",
    "DepthwisePrimaryCaps",
    "DigitCaps",
    "DynamicRouting",
    "EMRouting",
    "FlattenCaps",
    "FullWeight",
    "Groups",
    "InterestCapsules",
    "Interests",
    "InvertedAttentionRouting",
    "IterativeRouting",
    "KMeansRouting",
    "LabelAwareAttention",
    "Length",
    "LossParts",
    "LowRank",
    "MarginLoss",
    "Mask",
    "MatrixRouting",
    "PrimaryCaps",
    "PrimaryMatrixCaps",
    "ReconstructionLoss",
    "RoutedCaps",
    "Routing",
    "RoutingByAgreement",
    "ScoredCapsules",
    "SelfAttentionRouting",
    "SelfRouting",
    "SharedWeight",
    "SlimConvCaps2d",
    "SlimConvCaps3d",
    "SlimConvTransposeCaps2d",
    "SlimConvTransposeCaps3d",
    "SpreadLoss",
    "VariationalRouting",
    "VectorRouting",
    "Votes",
    "Weight",
    "couplings",
    "interest_scores",
    "recorded",
]
