"""Argument checks: every message names the op, the rule, the value that it got, and often the remedy."""

import math
import numbers
import os
import re
import reprlib
import warnings
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..environment.names import PACKAGE
from ..environment.private_torch import TracerWarning, tracing_state, transformed

# The derivative of a squash holds eps to the power -3/2, which must fit into float32.
SMALLEST_EPS = 1e-20

# torch.jit.trace warns of every comparison of sizes. The comparisons here lead to an error or don't depend on the
# batch size, so the warning is switched off, as torch does for its own modules. Other tracer warnings stay.
warnings.filterwarnings(
    "ignore",
    "Converting a tensor to a Python boolean",
    category=TracerWarning,
    module=rf"{PACKAGE}\.",
)

# No count, size or number of iterations is larger.
MOST = 2**31 - 1

# The errors that say that a tensor does not fit in memory: of the extension (csrc/out_of_memory.h) and of torch, whose
# sizes may also exceed 64 bits.
_NO_MEMORY = re.compile(
    r"std::bad_alloc( of (?P<bytes>\d+) bytes)?|.*DefaultCPUAllocator: .* (?P<of_torch>\d+) bytes"
    r"|Storage size calculation overflowed|.*Overflow when unpacking long",
    re.DOTALL,
)

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def shape_of(tensor: Tensor) -> str:
    """For error branches only: torch.compile can't turn a dynamic size into text."""
    return "[" + ", ".join(str(n) for n in tensor.shape) + "]"


def dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# Shown by repr(); other objects are shown by the name of their type.
_PLAIN = (numbers.Number, type(None), str, os.PathLike, torch.dtype, torch.device, torch.SymInt, torch.SymFloat)


class _Shown(reprlib.Repr):
    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, Tensor):
            return f"{_with_article(dtype_of(x))} tensor {shape_of(x)}"
        if isinstance(x, tuple):  # a shape, a named tuple
            return self.repr_tuple(x, level)
        if isinstance(x, _PLAIN):
            return repr(x)
        if hasattr(type(x), "__array_interface__"):
            return f"{_with_article(str(x.dtype))} array {list(x.shape)}"
        return x.__qualname__ if isinstance(x, type) else type(x).__name__


_SHOWN = _Shown()
_SHOWN.maxlevel, _SHOWN.maxstring, _SHOWN.maxother = 3, 80, 80
LONGEST = 200


def _with_article(dtype: str) -> str:
    return f"{'an' if dtype.startswith('int') else 'a'} {dtype}"


def shown(value: object) -> str:
    """A value as text for a message: one line of bounded length, without a tensor's numbers. For error branches."""
    text = _SHOWN.repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def tensor(op: str, name: str, value: object, shape: str) -> Tensor:
    """A strided tensor of the rank that ``shape`` (such as "[B, I, K]") spells out."""
    if not isinstance(value, Tensor):
        remedy = "; torch.fx traces models that hold the layer, such as nn.Sequential(layer)" if is_proxy(value) else ""
        raise TypeError(f"{op}: {name} must be a torch.Tensor {shape}, got {type(value).__name__}{remedy}")
    dense(op, name, value)
    if value.dim() != shape.count(",") + 1:
        raise ValueError(f"{op}: {name} must have shape {shape}, got {shape_of(value)}")
    return value


def dense(op: str, name: str, value: Tensor) -> None:
    if value.layout != torch.strided:
        raise TypeError(f"{op}: {name} must be a dense tensor, got layout {value.layout}; call {name}.to_dense() first")


def is_proxy(value: object) -> bool:
    """Whether the value is a proxy for a tensor in a symbolic trace of torch.fx."""
    return isinstance(value, torch.fx.Proxy)


def floating(op: str, name: str, value: Tensor) -> None:
    if value.dtype not in FLOATING:
        raise TypeError(
            f"{op}: {name} must be float32, float64, bfloat16 or float16, got {dtype_of(value)}; "
            f"convert it with {name}.float()"
        )


def same_device(op: str, anchor: str, anchor_value: Tensor, name: str, value: Tensor) -> None:
    if value.device != anchor_value.device:
        raise ValueError(
            f"{op}: all tensors must be on one device, got {anchor} on {anchor_value.device} and "
            f"{name} on {value.device}; move one with .to()"
        )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast casts to on this device, None outside of autocast."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def same_dtype(op: str, anchor: str, anchor_value: Tensor, name: str, value: Tensor) -> None:
    """u and weight must agree, except under autocast, which casts both and leaves float64 alone."""
    if value.dtype == anchor_value.dtype:
        return
    castable = torch.float64 not in (value.dtype, anchor_value.dtype)
    if castable and autocast_dtype(value.device) is not None:
        return
    raise TypeError(
        f"{op}: {anchor} and {name} must have one dtype, got {dtype_of(anchor_value)} and {dtype_of(value)}; "
        f"convert one{', or run under torch.autocast' if castable else ''}"
    )


def parameter_dtype(op: str, name: str, value: Tensor, anchor: str, anchor_value: Tensor) -> None:
    """logits and bias may have the anchor's dtype, or float32 beside a 16-bit anchor."""
    floating(op, name, value)
    if value.dtype == anchor_value.dtype or autocast_dtype(value.device) is not None:
        return
    if value.dtype == torch.float32 and anchor_value.dtype in (torch.float16, torch.bfloat16):
        return
    raise TypeError(
        f"{op}: {name} must have the dtype of {anchor} ({dtype_of(anchor_value)}), or float32 beside a "
        f"16-bit {anchor}, got {dtype_of(value)}"
    )


def plain(value: Any) -> Any:
    """The value with Python's numbers instead of NumPy's, also within tuples, lists and dicts.

    Sizes are often ``np.prod(shape)``. A layer holds, shows and saves Python's numbers. Tensors stay: an option is a
    constant of a traced program, and a tensor need not be.
    """
    kind = type(value)
    if kind in (tuple, list):
        return kind(map(plain, value))
    if kind is dict:
        return {name: plain(entry) for name, entry in value.items()}
    if hasattr(kind, "__array_interface__"):
        number = value.item() if value.shape == () else value
        return float(number) if isinstance(number, numbers.Real) and not isinstance(number, int) else number
    return value


def choice(op: str, name: str, value: object, allowed: Collection[str]) -> None:
    # A comparison with an array would be an array.
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, allowed))}, got {shown(value)}")


def boolean(op: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be True or False, got {shown(value)}")


def integer(op: str, name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} must be an int, got {shown(value)}")
    if not least <= value <= MOST:
        # Python refuses to write an int of thousands of digits.
        got = value if value.bit_length() < 128 else f"an int of {value.bit_length()} bits"
        rule = f"at least {least}" if value < least else f"at most {MOST}"
        raise ValueError(f"{op}: {name} must be {rule}, got {got}")


def without_memory(op: str, error: Exception, remedy: str, on_gpu: bool = False) -> Exception | None:
    """The error to raise in place of ``error`` if a tensor did not fit in memory, None if another thing went wrong.

    The error to raise is a MemoryError, on a GPU a torch.OutOfMemoryError.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        # torch's text has the size. A layer in a layer keeps the message of the inner one.
        return None if text.startswith(f"{PACKAGE}.") else torch.OutOfMemoryError(f"{op}: {text}; {remedy}")
    match = _NO_MEMORY.match(text)
    if match is None:
        return None
    size = match["bytes"] or match["of_torch"]
    wanted = "of more bytes than 64 bits count" if size is None else f"of {size} bytes ({int(size) / 2**30:.3g} GiB)"
    kind, system = (torch.OutOfMemoryError, "GPU") if on_gpu else (MemoryError, "system")
    return kind(f"{op}: the {system} has no memory for a tensor {wanted}; {remedy}")


def in_memory(op: str, remedy: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls the function, and raises :func:`without_memory` if a tensor does not fit in memory."""
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    try:
        return function(*args, **kwargs)
    except (RuntimeError, TypeError) as error:
        told = without_memory(op, error, remedy)
        if told is None:
            raise
        raise told from None


def number(op: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name} must be a number, got {shown(value)}")
    if isinstance(value, int) and value.bit_length() > 1023:
        raise ValueError(f"{op}: {name} must fit in a float, got an int of {value.bit_length()} bits")
    return value


def finite(op: str, name: str, value: object) -> None:
    if not math.isfinite(number(op, name, value)):
        raise ValueError(f"{op}: {name} must be finite, got {value}")


def positive(op: str, name: str, value: object, zero: bool = False) -> None:
    """A finite number above 0, or with ``zero`` from 0 on."""
    if not (0 < number(op, name, value) < math.inf or (zero and value == 0)):
        raise ValueError(f"{op}: {name} must be {'0 or ' if zero else ''}positive and finite, got {value}")


def positive_eps(op: str, eps: object) -> None:
    if not SMALLEST_EPS <= number(op, "eps", eps) < math.inf:
        raise ValueError(
            f"{op}: eps must be positive and finite, at least {SMALLEST_EPS} (below, the gradient of a zero vector "
            f"overflows in float32), got {eps}; eps={SMALLEST_EPS} reproduces layers without an eps"
        )


def transposed(name: str) -> str:
    return f"; {name} looks transposed: give {name}.transpose(1, 2)"


def refuse_capsules(op: str, name: str, value: Tensor, **sizes: int) -> NoReturn:
    """Raises the error for a ``value [B, I, K]`` without the two ``sizes``, named as the layer names them."""
    wanted = ", ".join(f"{symbol}={size}" for symbol, size in sizes.items())
    hint = transposed(name) if list(value.shape[1:]) == [*sizes.values()][::-1] else ""
    raise ValueError(f"{op}: {name} must be [B, {wanted}], got {shape_of(value)}{hint}")


def not_negative(op: str, name: str, value: Tensor | None, meaning: str = "") -> None:
    """Refuses numbers below 0. Tensors whose numbers are expensive to read are not checked."""
    if value is None or not can_be_looked_at(value) or value.numel() == 0:
        return
    # The minimum is the quickest check; it is NaN if the tensor holds a NaN.
    if not value.min().item() >= 0 and bool((value < 0).any()):
        raise ValueError(
            f"{op}: {name}{meaning} must not be negative, got {float(value[value < 0].min()):.3g}; "
            f"clamp it with {name}.clamp_min(0)"
        )


def traced() -> bool:
    """Whether torch.jit.trace is recording."""
    return not torch.compiler.is_compiling() and tracing_state() is not None


def can_be_looked_at(value: Tensor) -> bool:
    """Whether the numbers can be read: not on a GPU (it would synchronise), not while tracing or in torch.func."""
    return value.device.type == "cpu" and is_eager(value)


def is_eager(*values: Tensor | None) -> bool:
    """Whether the call runs at once (not compiled, traced or transformed) on tensors with memory."""
    if torch.compiler.is_compiling() or tracing_state() is not None or transformed():
        return False
    for value in values:
        if value is not None and (type(value) not in (Tensor, torch.nn.Parameter) or value.device.type == "meta"):
            return False
    return True
