"""Argument checks: every message names the op, the rule, what came, and often the remedy."""

import numbers
import os
import reprlib
import warnings
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from .axes import axes_of
from .options import GRADIENT, NORMALIZE, SOFTMAX, SQUASH, Options, PassOptions

# Its power -3/2, which the derivative of a squash holds, is still a float32.
SMALLEST_EPS = 1e-20

OTHER_ORDERS = "; docs/migration.md turns weights of other layers into this order"

# torch.jit.trace warns of every comparison of sizes. Those of this package lead to errors, or to the same for any
# batch. torch does so for its own modules. Numbers that become constants, as in int(tensor), are warned of.
warnings.filterwarnings(
    "ignore",
    "Converting a tensor to a Python boolean",
    category=torch.jit._trace.TracerWarning,
    module=r"capsfast\.",
)

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def shape_of(tensor: Tensor) -> str:
    """For error branches only: torch.compile can't turn a dynamic size into text."""
    return "[" + ", ".join(str(n) for n in tensor.shape) + "]"


def dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# What is shown as it is; every other object by the name of its type.
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
    """A value as messages show it: a line of bounded length, without the numbers of a tensor. For error branches."""
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
    """Whether torch.fx traces symbolically, and this stands for a tensor."""
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
    """The dtype autocast would cast to on this device, None outside of autocast."""
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


def choice(op: str, name: str, value: object, allowed: Collection[str]) -> None:
    # A comparison with an array would be an array.
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, allowed))}, got {shown(value)}")


def boolean(op: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be True or False, got {shown(value)}")


def positive_eps(op: str, eps: object) -> None:
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"{op}: eps must be a number, got {shown(eps)}")
    if not SMALLEST_EPS <= eps < float("inf"):
        raise ValueError(
            f"{op}: eps must be positive and finite, at least {SMALLEST_EPS} (below, the gradient of a zero vector "
            f"overflows in float32), got {eps}; eps={SMALLEST_EPS} reproduces layers without an eps"
        )


def options(op: str, given: Options) -> None:
    if isinstance(given.num_iterations, bool) or not isinstance(given.num_iterations, int):
        raise TypeError(f"{op}: num_iterations must be an int, got {shown(given.num_iterations)}")
    if given.num_iterations < 1:
        raise ValueError(f"{op}: num_iterations must be at least 1, got {given.num_iterations}")
    choice(op, "softmax", given.softmax, SOFTMAX)
    choice(op, "gradient", given.gradient, GRADIENT)
    boolean(op, "leaky", given.leaky)
    choice(op, "squash", given.squash, SQUASH)
    positive_eps(op, given.eps)
    boolean(op, "squash_last", given.squash_last)


def product(op: str, u: object, weight: object) -> tuple[Tensor, Tensor]:
    """u [B, I, K] and weight [I or 1, J, D, K], or pose matrices u [B, I, P, Q] and weight [I or 1, J, Q, R].

    Returns them as the ops take them: pose matrices as u [B, I, P Q] and weight [I or 1, J, R, Q].
    """
    if isinstance(u, Tensor) and u.dim() == 4:
        u, weight = tensor(op, "u", u, "[B, I, P, Q]"), tensor(op, "weight", weight, "[I, J, Q, R]")
        symbol, axis = "Q", 2
    else:
        u = tensor(op, "u", u, "[B, I, K]")
        if isinstance(weight, Tensor) and weight.dim() != 4:
            raise ValueError(f"{op}: weight must have shape [I, J, D, K], got {shape_of(weight)}{OTHER_ORDERS}")
        weight = tensor(op, "weight", weight, "[I, J, D, K]")
        symbol, axis = "K", 3
    floating(op, "u", u)
    floating(op, "weight", weight)
    I, size = u.shape[1], u.shape[-1]
    rows = weight.shape[0]
    if (rows != I and rows != 1) or weight.shape[axis] != size:
        _refuse_product(op, u, weight, symbol)
    if symbol == "Q" and (u.shape[2] == 0 or size == 0):
        raise ValueError(f"{op}: pose matrices [P, Q] must not be empty, got u {shape_of(u)}")
    same_device(op, "u", u, "weight", weight)
    same_dtype(op, "u", u, "weight", weight)
    return (u, weight) if symbol == "K" else (u.flatten(2), weight.transpose(2, 3))


def _transposed(name: str) -> str:
    return f"; {name} looks transposed: give {name}.transpose(1, 2)"


def _refuse_product(op: str, u: Tensor, weight: Tensor, symbol: str) -> NoReturn:
    """Whose fault it is that u and weight don't fit; ``symbol`` is the axis that the products sum over, "K" or "Q"."""
    I, size, rows = u.shape[1], u.shape[-1], weight.shape[0]
    got = f"(weight {shape_of(weight)}, u {shape_of(u)})"
    if symbol == "K" and weight.shape[3] == I and rows in (1, size):
        raise ValueError(f"{op}: u must be [B, I, K] with K={I}, got K={size} {got}{_transposed('u')}")
    if rows != I and rows != 1:
        raise ValueError(f"{op}: weight must have 1 or I={I} rows, got {rows} {got}{OTHER_ORDERS}")
    if symbol == "K":
        raise ValueError(
            f"{op}: weight must end in K={size}, the size of the input capsules, got {weight.shape[3]} "
            f"{got}{OTHER_ORDERS}"
        )
    raise ValueError(
        f"{op}: weight must be [I, J, Q, R] with Q={size}, the size of the input capsules [P, Q], "
        f"got {weight.shape[2]} {got}"
    )


def refuse_capsules(op: str, name: str, value: Tensor, **sizes: int) -> NoReturn:
    """``value [B, I, K]`` does not have the two ``sizes``, under the names that the layer has for them."""
    wanted = ", ".join(f"{each}={size}" for each, size in sizes.items())
    hint = _transposed(name) if list(value.shape[1:]) == [*sizes.values()][::-1] else ""
    raise ValueError(f"{op}: {name} must be [B, {wanted}], got {shape_of(value)}{hint}")


def votes(op: str, value: object) -> tuple[Tensor, tuple[int, ...]]:
    """votes [B, I, J, D] or [B, I, J, D, *spatial], with one axis for all of spatial; and the sizes of spatial."""
    if not isinstance(value, Tensor) or value.dim() < 4:
        tensor(op, "votes", value, "[B, I, J, D]")
    assert isinstance(value, Tensor)
    dense(op, "votes", value)
    floating(op, "votes", value)
    spatial = tuple(value.shape[4:])
    return (value.flatten(4) if len(spatial) > 1 else value), spatial


def outputs(op: str, anchor: str, value: Tensor, axis: int, saying: Mapping[str, object], needed: bool = True) -> int:
    """J: the size of ``axis`` of the anchor or, where that is 1, what the first of ``saying`` that is given says.

    If none is given and one is ``needed`` that is an error. Whether they agree is seen when their shapes are checked.
    """
    J: int = value.shape[axis]
    if J != 1:
        return J
    for name, given in saying.items():
        if isinstance(given, Tensor) and given.dim() > 1:
            return given.shape[axes_of(name, given).index("J")]
    if needed:
        raise ValueError(
            f"{op}: {anchor} {shape_of(value)} is shared by all output capsules, so another argument must say how many "
            f"there are, got none of {', '.join(saying)}; pass prior=torch.zeros(B, J)"
        )
    return J


def pass_options(op: str, given: PassOptions) -> None:
    choice(op, "normalize", given.normalize, NORMALIZE)
    boolean(op, "leaky", given.leaky)
    boolean(op, "second", given.second)
    if given.leaky and given.normalize not in SOFTMAX:
        raise ValueError(
            f'{op}: leaky adds an entry to a softmax, so normalize must be "out" or "in", got {shown(given.normalize)}'
        )


def parameters(
    op: str,
    anchor: str,
    anchor_value: Tensor,
    sizes: tuple[int, int, int, int],
    given: Mapping[str, Tensor | None],
    spatial: tuple[int, ...] = (),
) -> None:
    """The arguments beside the anchor tensor, by name, against its ``sizes`` = (B, I, J, D): shapes, dtypes, devices.

    Those with an axis B may end in the sizes of ``spatial``.
    """
    symbols = dict(zip("BIJD", sizes, strict=True))
    for name, value in given.items():
        if value is None:
            continue
        axes = axes_of(name, value)
        if _is_usual(value, tuple(symbols[axis] for axis in axes), name.endswith("mask"), anchor_value):
            continue
        own = spatial if axes[0] == "B" and isinstance(value, Tensor) and value.dim() > len(axes) else ()
        if not own:
            tensor(op, name, value, f"[{', '.join(axes)}]")
        elif value.dim() != len(axes) + len(own):
            spelled = ", ".join((*axes, *map(str, own)))
            raise ValueError(f"{op}: {name} must have shape [{spelled}], got {shape_of(value)}")
        else:
            dense(op, name, value)
        if name.endswith("mask") and value.dtype != torch.bool:
            raise TypeError(
                f"{op}: {name} must be bool (True = use), got {dtype_of(value)}; convert it with {name}.bool()"
            )
        wanted = [*(symbols[axis] for axis in axes), *own]
        if any(size != right for size, right in zip(value.shape, wanted, strict=True)):
            rule = " or ".join(
                f"[{', '.join(each)}] = [{', '.join(str(symbols[axis]) for axis in each)}]"
                for each in (("IJ", "BIJ") if name == "logits" else (axes,))
            )
            if own:
                rule += f", and may end in the positions {list(spatial)}"
            raise ValueError(f"{op}: {name} must be {rule}, got {shape_of(value)} ({anchor} {shape_of(anchor_value)})")
        if not name.endswith("mask"):
            parameter_dtype(op, name, value, anchor, anchor_value)
        same_device(op, anchor, anchor_value, name, value)
    not_negative(op, "precision", given.get("precision"), ", an inverse variance,")


def _is_usual(value: object, wanted: tuple[int, ...], mask: bool, anchor: Tensor) -> bool:
    """Whether nothing can be wrong with an argument: the check of nearly all, and the quickest."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.shape != wanted:
        return False
    return value.dtype == (torch.bool if mask else anchor.dtype) and value.device == anchor.device


def not_negative(op: str, name: str, value: Tensor | None, meaning: str = "") -> None:
    """No number below 0, where a look at them is cheap."""
    if value is None or not can_be_looked_at(value) or value.numel() == 0:
        return
    # The minimum is the quickest look. It is no number where one of them is none.
    if not value.min().item() >= 0 and bool((value < 0).any()):
        raise ValueError(
            f"{op}: {name}{meaning} must not be negative, got {float(value[value < 0].min()):.3g}; "
            f"clamp it with {name}.clamp_min(0)"
        )


def traced() -> bool:
    """Whether torch.jit.trace records what happens."""
    return not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None


def can_be_looked_at(value: Tensor) -> bool:
    """Whether its numbers are there: a look would make a GPU wait, and is none while tracing or inside torch.func."""
    return value.device.type == "cpu" and is_eager(value)


def is_eager(value: Tensor) -> bool:
    """Whether the call is no part of a program that is made or transformed, and its tensor one with memory."""
    if torch.compiler.is_compiling() or traced() or value.device.type == "meta":
        return False
    return type(value) in (Tensor, torch.nn.Parameter) and not torch._C._are_functorch_transforms_active()
