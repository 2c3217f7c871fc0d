"""Fused capsule-network routing for PyTorch."""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

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

# The command line imports what a command needs: torch takes seconds, and --help does not need torch. Everywhere else
# the ops are registered with torch at once.
_COMMAND_LINE = "-m capsfast " in f"{' '.join(sys.orig_argv)} " or os.path.basename((sys.argv or [""])[0]) == "capsfast"

if TYPE_CHECKING or not _COMMAND_LINE:
    from . import nn
    from ._version import __version__
    from .backend import backends, use_backend
    from .diagnostics import diagnose
    from .functional import dynamic_routing, route_votes, squash
    from .nn import DynamicRouting
    from .passes import Moments, routing_pass, votes_pass
if TYPE_CHECKING:
    from . import adopt, compat, export, models
    from .adopt import accelerate, identify
    from .graphs import graphed

# Public names by the modules that they are, or that define them, for those that are imported at first use.
_MODULES = {name: name for name in ("adopt", "compat", "export", "models", "nn")}
_MODULES |= {"DynamicRouting": "nn", "accelerate": "adopt", "diagnose": "diagnostics", "graphed": "graphs"}
_MODULES |= {"Moments": "passes", "__version__": "_version", "backends": "backend", "identify": "adopt"}
_MODULES |= {"dynamic_routing": "functional", "route_votes": "functional", "routing_pass": "passes"}
_MODULES |= {"squash": "functional", "use_backend": "backend", "votes_pass": "passes"}


if not TYPE_CHECKING:  # with it, type checkers would take every name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f".{_MODULES[name]}", __name__)
        return module if name == _MODULES[name] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
