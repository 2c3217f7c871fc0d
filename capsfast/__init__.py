"""Fused capsule-network routing for PyTorch."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from . import nn
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
    "export",
    "models",
    "nn",
    "route_votes",
    "routing_pass",
    "squash",
    "use_backend",
    "votes_pass",
]

if TYPE_CHECKING:
    from . import export, models

_LAZY = ("export", "models")


def __getattr__(name: str) -> ModuleType:
    """Networks and exporters are imported when they are first asked for."""
    if name in _LAZY:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
