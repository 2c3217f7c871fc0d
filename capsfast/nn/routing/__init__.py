"""Routings: from votes and activations of input capsules to poses and activations of output capsules."""

from .agreement import AgreementRouting
from .attention import AttentionRouting, SelfAttentionRouting
from .base import Capsules, IterativeRouting, Routing
from .cosine import CosineRouting, KMeansRouting
from .em import EMRouting
from .inverted_attention import InvertedAttentionRouting
from .names import ROUTINGS
from .self_routing import SelfRouting
from .variational import VariationalRouting
from .votes import Votes

__all__ = [
    "ROUTINGS",
    "AgreementRouting",
    "AttentionRouting",
    "Capsules",
    "CosineRouting",
    "EMRouting",
    "InvertedAttentionRouting",
    "IterativeRouting",
    "KMeansRouting",
    "Routing",
    "SelfAttentionRouting",
    "SelfRouting",
    "VariationalRouting",
    "Votes",
]
