"""Fused capsule-network routing for PyTorch."""

from . import models, nn
from ._version import __version__
from .backend import backends, use_backend
from .diagnostics import diagnose
from .functional import dynamic_routing, route_votes, squash
from .nn import DynamicRouting
from .passes import Moments, routing_pass, votes_pass

__all__ = [
    "DynamicRouting",
    "Moments",
    "__version__",
    "backends",
    "diagnose",
    "dynamic_routing",
    "models",
    "nn",
    "route_votes",
    "routing_pass",
    "squash",
    "use_backend",
    "votes_pass",
]
