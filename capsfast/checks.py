"""Argument checks: every message names the op, the rule, what came, and often the remedy."""

from collections.abc import Mapping

import torch
from torch import Tensor

from .options import GRADIENT, NORMALIZE, SOFTMAX, SQUASH, Options, PassOptions

# Its power -3/2, which the derivative of a squash holds, is still a float32.
SMALLEST_EPS = 1e-20

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def shape_of(tensor: Tensor) -> str:
    """For error branches only: torch.compile can't turn a dynamic size into text."""
    return "[" + ", ".join(str(n) for n in tensor.shape) + "]"


def dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def tensor(op: str, name: str, value: object, shape: str) -> Tensor:
    """A strided tensor of the rank that ``shape`` (such as "[B, I, K]") spells out."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor {shape}, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{op}: {name} must be a dense tensor, got layout {value.layout}; call {name}.to_dense() first")
    if value.dim() != shape.count(",") + 1:
        raise ValueError(f"{op}: {name} must have shape {shape}, got {shape_of(value)}")
    return value


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


def choice(op: str, name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def boolean(op: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be True or False, got {value!r}")


def positive_eps(op: str, eps: object) -> None:
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"{op}: eps must be a number, got {eps!r}")
    if not SMALLEST_EPS <= eps < float("inf"):
        raise ValueError(
            f"{op}: eps must be positive and finite, at least {SMALLEST_EPS} (below, the gradient of a zero vector "
            f"overflows in float32), got {eps}"
        )


def options(op: str, given: Options) -> None:
    if isinstance(given.num_iterations, bool) or not isinstance(given.num_iterations, int):
        raise TypeError(f"{op}: num_iterations must be an int, got {given.num_iterations!r}")
    if given.num_iterations < 1:
        raise ValueError(f"{op}: num_iterations must be at least 1, got {given.num_iterations}")
    choice(op, "softmax", given.softmax, SOFTMAX)
    choice(op, "gradient", given.gradient, GRADIENT)
    boolean(op, "leaky", given.leaky)
    choice(op, "squash", given.squash, SQUASH)
    positive_eps(op, given.eps)


def product(op: str, u: Tensor, weight: Tensor) -> None:
    """u [B, I, K] and weight [I or 1, J, D, K]: dtypes, devices, and the sizes they share."""
    floating(op, "u", u)
    floating(op, "weight", weight)
    I, K = u.shape[1:]
    rows = weight.shape[0]
    if rows != I and rows != 1:
        raise ValueError(f"{op}: weight must have 1 or I={I} rows, got {rows} {_shapes(weight, u)}")
    if weight.shape[3] != K:
        raise ValueError(
            f"{op}: weight must end in K={K}, the size of the input capsules, "
            f"got {weight.shape[3]} {_shapes(weight, u)}"
        )
    same_device(op, "u", u, "weight", weight)
    same_dtype(op, "u", u, "weight", weight)


def _shapes(weight: Tensor, u: Tensor) -> str:
    return f"(weight {shape_of(weight)}, u {shape_of(u)})"


# Where the size J stands in the arguments that have it.
_AXIS_OF_J = {"query": 1, "precision": 1, "center": 1, "prior": 1, "logits": -1, "bias": 0, "out_mask": 1}


def outputs(op: str, anchor: str, value: Tensor, axis: int, saying: Mapping[str, object], needed: bool = True) -> int:
    """J: the size of ``axis`` of the anchor or, where that is 1, what the first of ``saying`` that is given says.

    If none is given and one is ``needed`` that is an error. Whether they agree is seen when their shapes are checked.
    """
    J: int = value.shape[axis]
    if J != 1:
        return J
    for name, given in saying.items():
        if isinstance(given, Tensor) and given.dim() > 1:
            return given.shape[_AXIS_OF_J[name]]
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
            f'{op}: leaky adds an entry to a softmax, so normalize must be "out" or "in", got {given.normalize!r}'
        )


def pass_parameters(
    op: str, anchor: str, anchor_value: Tensor, sizes: tuple[int, int, int, int], given: Mapping[str, Tensor | None]
) -> None:
    """What a pass scores against, by name, and the masks, against ``sizes`` = (B, I, J, D) of the anchor tensor."""
    B, I, J, D = sizes
    routing_parameters(op, anchor, anchor_value, sizes, given["logits"], None, given["mask"], given["out_mask"])
    symbols = {"B": B, "I": I, "J": J, "D": D}
    for name, axes in _PARAMETER_AXES.items():
        value = given[name]
        if value is None:
            continue
        spelled = f"[{', '.join(axes)}]"
        tensor(op, name, value, spelled)
        if any(size != symbols[axis] for size, axis in zip(value.shape, axes, strict=True)):
            wanted = ", ".join(str(symbols[axis]) for axis in axes)
            raise ValueError(
                f"{op}: {name} must be {spelled} = [{wanted}], got {shape_of(value)} "
                f"({anchor} {shape_of(anchor_value)})"
            )
        parameter_dtype(op, name, value, anchor, anchor_value)
        same_device(op, anchor, anchor_value, name, value)
    precision = given["precision"]
    if precision is not None and _can_be_looked_at(precision) and bool((precision < 0).any()):
        raise ValueError(
            f"{op}: precision, an inverse variance, must not be negative, got {float(precision.min()):.3g}; "
            f"clamp it with precision.clamp_min(0)"
        )


_PARAMETER_AXES = {
    **dict.fromkeys(("query", "precision", "center"), ("B", "J", "D")),
    "prior": ("B", "J"),
    **dict.fromkeys(("activation", "lse"), ("B", "I")),
}


def _can_be_looked_at(value: Tensor) -> bool:
    """Whether its numbers are there: a look would make a GPU wait, and is none while tracing or inside torch.func."""
    known = value.device.type == "cpu" and not torch.compiler.is_compiling()
    return known and type(value) in (Tensor, torch.nn.Parameter) and not torch._C._are_functorch_transforms_active()


def routing_parameters(
    op: str,
    anchor: str,
    anchor_value: Tensor,
    sizes: tuple[int, int, int, int],
    logits: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    out_mask: Tensor | None,
) -> None:
    """logits, bias and masks against ``sizes`` = (B, I, J, D) of the anchor tensor."""
    B, I, J, D = sizes
    if logits is not None:
        if isinstance(logits, Tensor) and logits.dim() == 3:
            tensor(op, "logits", logits, "[B, I, J]")
            good = logits.shape[0] == B and logits.shape[1] == I and logits.shape[2] == J
        else:
            tensor(op, "logits", logits, "[I, J]")
            good = logits.shape[0] == I and logits.shape[1] == J
        if not good:
            raise ValueError(
                f"{op}: logits must be [I, J] = [{I}, {J}] or [B, I, J] = [{B}, {I}, {J}], "
                f"got {shape_of(logits)} ({anchor} {shape_of(anchor_value)})"
            )
        parameter_dtype(op, "logits", logits, anchor, anchor_value)
    if bias is not None:
        tensor(op, "bias", bias, "[J, D]")
        if bias.shape[0] != J or bias.shape[1] != D:
            raise ValueError(
                f"{op}: bias must be [J, D] = [{J}, {D}], got {shape_of(bias)} ({anchor} {shape_of(anchor_value)})"
            )
        parameter_dtype(op, "bias", bias, anchor, anchor_value)
    for name, value, symbol, size in (("mask", mask, "I", I), ("out_mask", out_mask, "J", J)):
        if value is None:
            continue
        tensor(op, name, value, f"[B, {symbol}]")
        if value.dtype != torch.bool:
            raise TypeError(
                f"{op}: {name} must be bool (True = use), got {dtype_of(value)}; convert it with {name}.bool()"
            )
        if value.shape[0] != B or value.shape[1] != size:
            raise ValueError(
                f"{op}: {name} must be [B, {symbol}] = [{B}, {size}], "
                f"got {shape_of(value)} ({anchor} {shape_of(anchor_value)})"
            )
    for name, value in (("logits", logits), ("bias", bias), ("mask", mask), ("out_mask", out_mask)):
        if value is not None:
            same_device(op, anchor, anchor_value, name, value)
