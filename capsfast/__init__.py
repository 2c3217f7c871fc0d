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
    "export",
    "graphed",
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
    from . import adopt, compat, export, models
    from .adopt import accelerate, identify
    from .graphs import graphed

# Imported at first use: a public name, and the module that it is or that defines it.
_LATER = {name: name for name in ("adopt", "compat", "export", "models")}
_LATER |= {"accelerate": "adopt", "identify": "adopt", "graphed": "graphs"}


if not TYPE_CHECKING:  # with it, type checkers would take every name

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f".{_LATER[name]}", __name__)
        return module if name == _LATER[name] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
