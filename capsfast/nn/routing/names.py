"""The routings by name."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from ...calls import checks, keywords
from .agreement import AgreementRouting
from .attention import AttentionRouting, InvertedAttentionRouting, SelfAttentionRouting
from .base import Routing
from .cosine import CosineRouting, KMeansRouting
from .em import EMRouting
from .self_routing import SelfRouting
from .variational import VariationalRouting

ROUTINGS: dict[str, type[Routing]] = {
    "dynamic": AgreementRouting,
    "attention": AttentionRouting,
    "cosine": CosineRouting,
    "em": EMRouting,
    "inverted-attention": InvertedAttentionRouting,
    "k-means": KMeansRouting,
    "self": SelfRouting,
    "self-attention": SelfAttentionRouting,
    "variational": VariationalRouting,
}

# A name, a Routing class, or a function that makes a routing from the same arguments.
RoutingChoice = str | Callable[..., Routing]
OF_ONES_OWN = "; docs/passes.md shows how to write your own routing"
# A layer adds these options, for the routing's own parameters.
FACTORY_KEYWORDS = ("device", "dtype")


def routing_class(op: str, routing: RoutingChoice) -> Callable[..., Routing]:
    """The routing class with this name; a class or a function is returned as it is.

    Raises:
        ValueError: no routing has this name.
        TypeError: not a name, a Routing class or a function.
    """
    if isinstance(routing, str):
        checks.choice(op, "routing", routing, ROUTINGS)
        return ROUTINGS[routing]
    if not callable(routing) or isinstance(routing, nn.Module):
        remedy = "; give its class, and its options to the layer" if isinstance(routing, Routing) else ""
        raise TypeError(f"{op}: routing must be a name or a Routing class, got {type(routing).__name__}{remedy}")
    if inspect.isclass(routing) and not issubclass(routing, Routing):
        raise TypeError(
            f"{op}: routing must be a name or a Routing class, got the class {routing.__name__}; "
            f"derive it from capsfast.nn.Routing{OF_ONES_OWN}"
        )
    return routing


def make_routing(
    op: str, routing: RoutingChoice, in_caps: int, out_caps: int, in_dim: int, out_dim: int, **options: Any
) -> Routing:
    """A routing for these sizes.

    A device or dtype of None is passed only to routings with this option; a num_iterations of None is not passed.

    Raises:
        ValueError, TypeError: no such routing, an option that it does not have, or one that it rejects.
    """
    make = routing_class(op, routing)
    if options.get("num_iterations", 1) is None:
        del options["num_iterations"]
    if inspect.isclass(make):
        known = options_of(make)
        options = {
            name: value
            for name, value in options.items()
            if name in known or name not in FACTORY_KEYWORDS or value is not None
        }
        for name in options:
            if name not in known:
                remedy = (
                    "; its __init__ must take **factory_kwargs and hand it on"
                    if name in (*FACTORY_KEYWORDS, "backend")
                    else ""
                )
                there, hint = ", ".join(known) if known else "none", keywords.meant(name, known)
                raise TypeError(
                    f"{op}: routing {routing_name(routing)} has no option {name}{hint}; it has {there}{remedy}"
                )
    routing_layer = make(in_caps, out_caps, in_dim, out_dim, **options)
    if not isinstance(routing_layer, Routing):
        raise TypeError(
            f"{op}: routing must make a capsfast.nn.Routing, got {type(routing_layer).__name__}{OF_ONES_OWN}"
        )
    if "backend" not in vars(routing_layer):
        raise TypeError(
            f"{op}: routing must be made by Routing.__init__, got {type(routing_layer).__name__} without it; call "
            f"super().__init__(in_caps, out_caps, in_dim, out_dim, **factory_kwargs) in its __init__"
        )
    return routing_layer


def options_of(routing: Callable[..., Any]) -> list[str]:
    """The keyword options of a routing class and its bases; [] if it is not a class."""
    if not inspect.isclass(routing):
        return []
    options: list[str] = []
    for base in routing.__mro__:
        if not issubclass(base, Routing) or "__init__" not in vars(base):
            continue
        parameters = inspect.signature(base.__init__).parameters.values()
        options += [what.name for what in parameters if what.kind == what.KEYWORD_ONLY and what.name not in options]
        if not any(what.kind == what.VAR_KEYWORD for what in parameters):
            break
    return options


def routing_name(routing: RoutingChoice) -> str:
    return routing if isinstance(routing, str) else getattr(routing, "__name__", type(routing).__name__)
