"""IDX files, the format of MNIST: four bytes of magic, the sizes, then the values."""

from math import prod
from pathlib import Path

import torch
from torch import Tensor

from .stored import check_length, check_magic, reading, take

UNSIGNED_BYTE = 0x08


def read_idx(path: Path | str, axes: int) -> Tensor:
    """The unsigned bytes of an IDX file with ``axes`` sizes; a name in .gz is decompressed.

    Returns:
        uint8, with the sizes that the file gives.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an IDX file of unsigned bytes with that many axes, cut short, too long, or broken gzip.
    """
    path = Path(path)
    op = f"capsfast.data.read_idx: {path}"
    with reading(op, path) as stream:
        magic = bytes(take(stream, 4))
        check_magic(op, magic)
        expected = bytes([0, 0, UNSIGNED_BYTE, axes])
        if magic != expected:
            raise ValueError(
                f"{op} must start with the magic number {expected.hex()} (unsigned bytes, sizes: {axes}), got "
                f"{magic.hex() or 'an empty file'}; it is not such an IDX file"
            )
        header = bytes(take(stream, 4 * axes))
        if len(header) < 4 * axes:
            raise ValueError(f"{op} ends inside its header of {4 + 4 * axes} bytes; fetch it again")
        sizes = [int.from_bytes(header[n : n + 4], "big") for n in range(0, 4 * axes, 4)]
        if 0 in sizes:
            raise ValueError(f"{op} must hold something, got sizes {sizes}")
        values = take(stream, prod(sizes) + 1)
    check_length(op, values, prod(sizes), sizes)
    return torch.frombuffer(values, dtype=torch.uint8).reshape(sizes)
