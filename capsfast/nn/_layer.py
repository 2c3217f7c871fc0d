"""The base class of all layers, losses and networks."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import has_torch_function

from .. import _keywords, kinds
from .._names import ours


def hooked(module: nn.Module) -> bool:
    """Whether the module has hooks, which run at each call besides its forward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _proxy_in(values: tuple[Any, ...]) -> torch.fx.Proxy | None:
    for value in values:
        found = _proxy_in(value) if isinstance(value, tuple) else value
        if isinstance(found, torch.fx.Proxy):
            return found
    return None


def _as_node(layer: nn.Module, tracer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def node(*args: Any, **kwargs: Any) -> Any:
        return tracer.create_proxy("call_module", tracer.path_of_module(layer), args, kwargs)

    # In call_module a Tracer records the module of a node; it may be overridden.
    return tracer.call_module(layer, node, args, kwargs)


@functools.cache
def _without_self(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _checked(owner: type["Layer"]) -> Callable[..., None]:
    """The constructor of a class, with a check of its arguments in front."""
    init: Callable[..., None] = owner.__init__

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling():  # torch.compile cannot follow a signature
            _check(owner, init, self, args, kwargs)
        init(self, *args, **kwargs)

    return checked


def _check(
    owner: type["Layer"], init: Callable[..., None], layer: "Layer", args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """
    Raises:
        TypeError: the call does not fit; names the signature, the error, and layers that can be called this way.
    """
    signature = _without_self(init)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        known = signature.parameters
        open_end = any(each.kind is each.VAR_KEYWORD for each in known.values())
        unknown = [] if open_end else [name for name in kwargs if name not in known]
        said = _keywords.unexpected(unknown[0], known) if unknown else str(error)
        op = getattr(layer, "_op", ".".join((*owner.__module__.split(".")[:2], owner.__name__)))
        meant = kinds.lead(op, layer._others, args, kwargs) if layer._others else ""
        raise TypeError(f"{op}: takes {_keywords.takes(signature)}, {said}{meant}") from None


class Layer(nn.Module):
    """A module that torch.fx keeps as one node if another module calls it.

    This holds even if ``is_leaf_module`` of the Tracer is False, as torch's is for all modules outside torch: the
    forward compares sizes, which proxies do not have. If the module itself is traced, its forward runs on proxies as
    far as it can.
    """

    # Layers of other code that an error of the constructor may suggest.
    _others: tuple[kinds.Form, ...] = ()

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        # Subclasses outside this package check their own constructors.
        if "__init__" in vars(cls) and ours(cls):
            cls.__init__ = _checked(cls)  # type: ignore[method-assign]
        call = Layer.__call__
        if getattr(cls.__call__, "__globals__", None) is call.__globals__:
            # torch.compile counts recompilations by code object and name: each class needs its own.
            code = call.__code__.replace(co_name=f"{cls.__module__}.{cls.__qualname__}.__call__")
            cls.__call__ = types.FunctionType(code, call.__globals__, "__call__")  # type: ignore[assignment]

    # Not in forward, so that hooks run when the node runs.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pair = len(args) > 0 and isinstance(args[0], tuple)
        if pair or has_torch_function(args) or (kwargs and has_torch_function(tuple(kwargs.values()))):
            proxy = _proxy_in((*args, *kwargs.values()))
            if proxy is not None:
                return _as_node(self, proxy.tracer, args, kwargs)
        return nn.Module.__call__(self, *args, **kwargs)

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by torch.jit.script before it compiles."""
        name = type(self).__name__
        raise TypeError(f"capsfast: torch.jit.script cannot compile {name}; use torch.export or torch.jit.trace")
