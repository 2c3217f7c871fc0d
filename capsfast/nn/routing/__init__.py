"""Routings: from votes and activations of input capsules to poses and activations of output capsules."""

from .agreement import AgreementRouting
from .base import Capsules, IterativeRouting, Routing
from .em import EMRouting
from .names import ROUTINGS
from .votes import Votes

__all__ = ["ROUTINGS", "AgreementRouting", "Capsules", "EMRouting", "IterativeRouting", "Routing", "Votes"]
