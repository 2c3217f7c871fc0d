"""What all layers, losses and networks derive from."""

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import has_torch_function

from .. import _keywords


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


class _Signature:
    """Of the constructor that a class has when it is asked for, without which __new__ hides it in Python 3.10."""

    def __get__(self, layer: object, cls: type) -> inspect.Signature:
        if layer is not None:
            raise AttributeError("__signature__")
        return without_self(cls.__init__)  # type: ignore[misc]


def without_self(function: Callable[..., Any]) -> inspect.Signature:
    """Of the function itself, not of one that it stands for."""
    signature = inspect.signature(function, follow_wrapped=False)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def check_call(cls: "type[Layer]", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Whether a class of capsfast can be made with these arguments.

    Raises:
        TypeError: no; the message says what may be meant.
    """
    signature = without_self(cls.__init__)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        op = getattr(cls, "_op", ".".join((*cls.__module__.split(".")[:2], cls.__name__)))
        known, said = signature.parameters, str(error)
        unknown = [name for name in kwargs if name not in known]
        if unknown and not any(each.kind is each.VAR_KEYWORD for each in known.values()):
            said = _keywords.unexpected(unknown[0], known)
        instead = cls._instead(op, args, kwargs)
        raise TypeError(f"{op}: takes {_keywords.takes(signature)}, {said}{instead}") from None


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

    __signature__ = _Signature()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Copies and pickles make an object without arguments. What somebody's own constructor takes is theirs to say.
        if (args or kwargs) and getattr(cls.__init__, "__globals__", {}).get("__name__", "").startswith("capsfast."):
            check_call(cls, args, kwargs)
        return super().__new__(cls)

    @classmethod
    def _instead(cls, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What the error of a constructor ends in: what else could be called so."""
        return ""

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
        name = type(self).__name__
        raise TypeError(f"capsfast: torch.jit.script cannot compile {name}; use torch.export or torch.jit.trace")
