"""The base class of all layers, losses and networks."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Protocol, TypeVar

import torch
from torch import nn
from torch.overrides import has_torch_function

from .. import kinds
from ..calls import checks, keywords
from ..calls.options import Options
from ..environment.names import PACKAGE, ours
from . import _arguments

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

# The arguments that extra_repr shows.
PLAIN = (int, float, str, tuple)


def hooked(module: nn.Module) -> bool:
    """Whether the module has hooks, which run at each call besides its forward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _proxy_in(values: tuple[Any, ...]) -> torch.fx.Proxy | None:
    for value in values:
        proxy = _proxy_in(value) if isinstance(value, tuple) else value
        if isinstance(proxy, torch.fx.Proxy):
            return proxy
    return None


def _as_node(layer: nn.Module, tracer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def node(*args: Any, **kwargs: Any) -> Any:
        return tracer.create_proxy("call_module", tracer.path_of_module(layer), args, kwargs)

    # In call_module a Tracer records the module of a node; it may be overridden.
    return tracer.call_module(layer, node, args, kwargs)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """With the keywords of ``**options: Unpack[Keywords]`` instead of ``options``."""
    signature, parameters = inspect.signature(function), []
    for parameter in signature.parameters.values():
        keywords = getattr(parameter.annotation, "__args__", ()) if parameter.kind is parameter.VAR_KEYWORD else ()
        if keywords:
            default = Options._field_defaults
            parameters += [
                inspect.Parameter(name, parameter.KEYWORD_ONLY, default=default.get(name), annotation=annotation)
                for name, annotation in keywords[0].__annotations__.items()
            ]
        else:
            parameters.append(parameter)
    return signature.replace(parameters=parameters)


def _checked(owner: type["Layer"]) -> Callable[..., None]:
    """The constructor of a class, with a check of its arguments in front."""
    init: Callable[..., None] = owner.__init__

    # torch.compile cannot follow a signature, nor a function that holds one.
    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            args, kwargs = checks.plain(args), checks.plain(kwargs)
            _check(owner, self, args, kwargs)
        checks.in_memory(self._op, "take smaller sizes", init, self, *args, **kwargs)

    checked.__signature__ = _signature(init)  # type: ignore[attr-defined]
    return checked


@functools.cache
def _without_self(owner: Any) -> inspect.Signature:
    whole = inspect.signature(owner.__init__)
    return whole.replace(parameters=[*whole.parameters.values()][1:])


def _check(owner: Any, layer: "Layer", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """
    Raises:
        TypeError: the call does not fit; names the signature, the error, and layers that can be called this way.
        TypeError, ValueError: an argument that is not as annotated, see :func:`_arguments.option`.
    """
    signature, op = _without_self(owner), layer._op
    known = signature.parameters
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        open_end = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        unknown = [] if open_end else [name for name in kwargs if name not in known]
        said = keywords.unexpected(unknown[0], known) if unknown else str(error)
        meant = kinds.lead(op, layer._others, args, kwargs) if layer._others else ""
        raise TypeError(f"{op}: takes {keywords.takes(signature)}, {said}{meant}") from None
    for name, value in arguments.items():
        if value is not known[name].default:
            _arguments.option(op, name, known[name].annotation, value)


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """The function that resets a module's own tensors, without the tensors of its parts; None if there is none."""
    kind: Any = type(module)
    if isinstance(module, Layer) and kind.reset_parameters is Layer.reset_parameters:
        return None if kind._initialise is Layer._initialise else module._initialise
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _tensors_of(module: nn.Module) -> list[str]:
    """The names of the tensors and lists of parameters that a module itself resets. A list is reset by its owner."""
    lists = (nn.ParameterList, nn.ParameterDict)
    if isinstance(module, lists):
        return []
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return [name for name, _ in tensors] + [name for name, child in module.named_children() if isinstance(child, lists)]


def _reset_parts(module: nn.Module) -> None:
    """Resets the modules in a module, in the order in which its constructor made them."""
    for part in module.children():
        _reset_parts(part)
        reset = _reset_of(part)
        if reset is not None:
            reset()


class _HasForward(Protocol[P, R_co]):
    def forward(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class Node(nn.Module):
    """A module that torch.fx keeps as one node if another module calls it.

    This holds even if ``is_leaf_module`` of the Tracer is False, as torch's is for all modules outside torch: the
    forward compares sizes, which proxies do not have. If the module itself is traced, its forward runs on proxies as
    far as it can.
    """

    # The name of the class in messages.
    _op: ClassVar[str] = PACKAGE

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        call = Node.__call__
        if getattr(cls.__call__, "__globals__", None) is call.__globals__:
            # torch.compile counts recompilations by code object and name: each class needs its own.
            code = call.__code__.replace(co_name=f"{cls.__module__}.{cls.__qualname__}.__call__")
            cls.__call__ = types.FunctionType(code, call.__globals__, "__call__")  # type: ignore[assignment]

    if TYPE_CHECKING:
        # For type checkers a call is the forward of the class.
        def __call__(self: _HasForward[P, R_co], *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    else:
        # Not in forward, so that hooks run when the node runs.
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            pair = len(args) > 0 and isinstance(args[0], tuple)
            if pair or has_torch_function(args) or (kwargs and has_torch_function(tuple(kwargs.values()))):
                proxy = _proxy_in((*args, *kwargs.values()))
                if proxy is not None:
                    return _as_node(self, proxy.tracer, args, kwargs)
            if torch.compiler.is_compiling():
                return nn.Module.__call__(self, *args, **kwargs)
            # As checks.in_memory(), without the two frames that it adds to every call of every layer in a network.
            try:
                return nn.Module.__call__(self, *args, **kwargs)
            except (RuntimeError, TypeError) as error:
                told = checks.without_memory(self._op, error, "take a smaller batch")
                if told is None:
                    raise
                raise told from None

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by torch.jit.script before it compiles."""
        name = type(self).__name__
        raise TypeError(f"capsfast: torch.jit.script cannot compile {name}; use torch.export or torch.jit.trace")


class Layer(Node):
    """A module whose name in messages, checks and text follow from its constructor.

    Arguments are checked by their annotations before the constructor runs. ``extra_repr`` shows arguments without a
    default and arguments that differ from their default, if the layer holds them under their names.
    """

    _op = "capsfast.Layer"
    # Layers of other code that an error of the constructor may suggest.
    _others: kinds.Forms | None = None

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "_op" not in vars(cls) and ours(cls):
            folder = cls.__module__.removeprefix(f"{PACKAGE}.").split(".")[:-1]
            cls._op = ".".join(("capsfast", *folder, cls.__name__))
        # Subclasses outside this package check their own constructors.
        if "__init__" in vars(cls) and ours(cls):
            cls.__init__ = _checked(cls)  # type: ignore[method-assign]

    def _initialise(self) -> None:
        """Initialises the layer's tensors, and tensors of parts that start otherwise here. Constructors end with it."""

    def reset_parameters(self) -> None:
        """Sets all parameters and buffers, also those of the parts, to the values of a new layer, drawn anew.

        After the same ``torch.manual_seed`` the values are those of a new layer.

        Raises:
            TypeError: a part holds parameters and has no ``reset_parameters``; nothing is changed.
        """
        for name, module in self.named_modules():
            tensors = _tensors_of(module)
            if tensors and _reset_of(module) is None:
                raise TypeError(
                    f"{self._op}: reset_parameters needs that of every part, got {name or 'the layer itself'}, a "
                    f"{type(module).__name__} that holds {', '.join(tensors)} and has none; define it, or remove a "
                    f"parametrization first"
                )
        _reset_parts(self)
        self._initialise()

    def extra_repr(self) -> str:
        texts = []
        # A user's subclass may take other arguments.
        own: Any = next(kind for kind in type(self).__mro__ if ours(kind))
        for parameter in [*inspect.signature(own.__init__).parameters.values()][1:]:
            required, value = parameter.default is parameter.empty, getattr(self, parameter.name, parameter.default)
            if value is parameter.empty or not (isinstance(value, PLAIN) or (required and value is None)):
                continue
            if required:
                texts.append(repr(value))
            elif parameter.name == "num_iterations" or not (
                value == parameter.default or _arguments.for_all_axes(value, parameter.default)
            ):
                texts.append(f"{parameter.name}={value!r}")
        return ", ".join(texts)
