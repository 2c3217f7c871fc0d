"""What all layers, losses and networks derive from."""

import types
from typing import Any

import torch
from torch import nn
from torch.overrides import has_torch_function


def _proxy_in(values: tuple[Any, ...]) -> torch.fx.Proxy | None:
    for value in values:
        found = _proxy_in(value) if isinstance(value, tuple) else value
        if isinstance(found, torch.fx.Proxy):
            return found
    return None


def _as_node(layer: nn.Module, tracer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def node(*args: Any, **kwargs: Any) -> Any:
        return tracer.create_proxy("call_module", tracer.path_of_module(layer), args, kwargs)

    # There a Tracer notes in which module a node is, and may have code of its own.
    return tracer.call_module(layer, node, args, kwargs)


class Layer(nn.Module):
    """A module that torch.fx keeps as one node where another module calls it, whatever its forward looks at.

    So it is whether or not ``is_leaf_module`` of a Tracer says so, which torch's says of torch's own modules alone: the
    forward compares sizes, and proxies have none. Of a module that is itself traced the forward runs on proxies, as far
    as it can.
    """

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        call = Layer.__call__
        if getattr(cls.__call__, "__globals__", None) is call.__globals__:
            # torch.compile counts what it compiles by code, and learns sizes by its name: each class has its own.
            code = call.__code__.replace(co_name=f"{cls.__module__}.{cls.__qualname__}.__call__")
            cls.__call__ = types.FunctionType(code, call.__globals__, "__call__")  # type: ignore[assignment]

    # Not in forward: hooks are to run when the node does.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pair = bool(args) and isinstance(args[0], tuple)
        if pair or has_torch_function(args) or (kwargs and has_torch_function(tuple(kwargs.values()))):
            proxy = _proxy_in((*args, *kwargs.values()))
            if proxy is not None:
                return _as_node(self, proxy.tracer, args, kwargs)
        return nn.Module.__call__(self, *args, **kwargs)

    def __prepare_scriptable__(self) -> nn.Module:
        """What torch.jit.script asks for before it compiles."""
        raise TypeError(
            f"capsfast: torch.jit.script cannot compile {type(self).__name__}; script "
            f"capsfast.export.scriptable(model), where every DynamicRouting is replaced, or use torch.jit.trace"
        )
