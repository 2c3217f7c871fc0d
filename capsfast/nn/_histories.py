"""Histories of different lengths, given by lengths, a mask or offsets, and their number of interests."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..calls import checks

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
Count = Literal["floor", "ceil"]
# The largest power of two in an int64. No history is longer than 2^62.
LARGEST_POWER = 62


def whole(op: str, name: str, value: object, shape: str) -> Tensor:
    tensor = checks.tensor(op, name, value, shape)
    if tensor.dtype not in INTEGERS:
        raise TypeError(f"{op}: {name} must hold integers, got {checks.dtype_of(tensor)}")
    # int64, because differences of unsigned numbers are never negative, and a short type may not hold the limit.
    return tensor.to(torch.int64)


def sized(op: str, name: str, value: object, size: int, anchor: Tensor) -> Tensor:
    tensor = whole(op, name, value, "[B]" if name != "offsets" else "[B + 1]")
    if tensor.shape[0] != size:
        raise ValueError(f"{op}: {name} must be [{size}], one for each user, got {checks.shape_of(tensor)}")
    checks.same_device(op, "behaviours", anchor, name, tensor)
    return tensor


def within(op: str, name: str, value: Tensor, least: int, most: int, meaning: str) -> None:
    """Checks that numbers are in a range, if reading them is cheap."""
    if checks.can_be_looked_at(value) and value.numel() and bool(((value < least) | (value > most)).any()):
        raise ValueError(
            f"{op}: {name} must be from {least} to {meaning}={most}, got {int(value.min())} to {int(value.max())}"
        )


def of_lengths(op: str, lengths: object, behaviours: Tensor) -> Tensor:
    """Lengths ``[B]`` to the mask ``[B, I]``."""
    B, I = behaviours.shape[:2]
    checked = sized(op, "lengths", lengths, B, behaviours)
    within(op, "lengths", checked, 0, I, "I")
    return torch.arange(I, device=checked.device) < checked[:, None]


def padded(op: str, values: Tensor, offsets: object, width: int | None) -> tuple[Tensor, Tensor]:
    """Jagged ``values [N, K]`` with ``offsets [B + 1]`` to ``[B, I, K]``, padded with zeros, and its mask.

    width: I; None for the longest history, which must be read from the device.
    """
    if width is None and checks.traced():
        raise ValueError(
            f"{op}: offsets need max_length under torch.jit.trace, which would fix the longest history of the example "
            f"for every call, got None; give the layer a max_length"
        )
    N = values.shape[0]
    checked = whole(op, "offsets", offsets, "[B + 1]")
    if checked.shape[0] == 0:
        raise ValueError(f"{op}: offsets must be [B + 1], at least one number, got none")
    checks.same_device(op, "behaviours", values, "offsets", checked)
    lengths = checked.diff()
    if checks.can_be_looked_at(checked):
        if int(checked[0]) != 0 or int(checked[-1]) != N or bool((lengths < 0).any()):
            raise ValueError(
                f"{op}: offsets must begin with 0, not decrease and end with N={N}, the number of behaviours, "
                f"got {checked.tolist() if checked.shape[0] <= 8 else [*checked[:4].tolist(), '...', int(checked[-1])]}"
            )
        longest = int(lengths.max()) if lengths.numel() else 0
        if width is not None and longest > width:
            raise ValueError(f"{op}: histories must be at most max_length={width} long, got one of {longest}")
    I = int(lengths.max()) if width is None and lengths.numel() else (width or 0)
    mask = torch.arange(I, device=checked.device) < lengths[:, None]
    if N == 0:  # one row to read, so that the result stays connected to the values
        values = F.pad(values, (0, 0, 0, 1))
    # The rows of all positions. Positions behind a history read any row, which is masked later.
    place = (checked[:-1, None] + torch.arange(I, device=checked.device)).clamp(0, max(N - 1, 0))
    return values[place].masked_fill(~mask[..., None], 0.0), mask


def interests_of(lengths: Tensor, J: int, rule: str) -> Tensor:
    """``lengths [B]`` to the mask ``[B, J]`` of ``max(1, min(J, log2(length)))`` interests.

    Powers of two are compared as integers, because a rounded logarithm could change the number.
    """
    number = torch.arange(J, device=lengths.device)
    power = number + 1 if rule == "floor" else number
    least = 2 ** power.clamp(max=LARGEST_POWER)
    enough = lengths[:, None] >= least if rule == "floor" else lengths[:, None] > least
    return (enough & (power <= LARGEST_POWER)) | (number == 0)
