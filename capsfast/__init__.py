"""Fused capsule-network routing for PyTorch."""

from . import nn
from ._version import __version__
from .backend import backends, use_backend
from .functional import dynamic_routing, route_votes, squash
from .nn import DynamicRouting

__all__ = [
    "DynamicRouting",
    "__version__",
    "backends",
    "dynamic_routing",
    "nn",
    "route_votes",
    "squash",
    "use_backend",
]
