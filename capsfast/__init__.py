"""Fused capsule-network routing for PyTorch."""

import importlib
from typing import TYPE_CHECKING, Any

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
    "accelerate",
    "adopt",
    "backends",
    "compat",
    "diagnose",
    "dynamic_routing",
    "identify",
    "models",
    "nn",
    "route_votes",
    "routing_pass",
    "squash",
    "use_backend",
    "votes_pass",
]

if TYPE_CHECKING:
    from . import adopt, compat, models
    from .adopt import accelerate, identify

# Imported when they are first asked for: sub-packages, and names of one.
_LATE = {"adopt": None, "compat": None, "models": None, "accelerate": "adopt", "identify": "adopt"}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = importlib.import_module(f".{_LATE[name] or name}", __name__)
    return getattr(package, name) if _LATE[name] else package


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
