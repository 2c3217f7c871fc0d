"""IDX files, the format of MNIST: four bytes of magic, the sizes, then the values."""

import gzip
import zlib
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

GZIP = b"\x1f\x8b"
UNSIGNED_BYTE = 0x08
CHUNK = 1 << 20


def _read(stream: BinaryIO | gzip.GzipFile, wanted: int) -> bytearray:
    """Up to ``wanted`` bytes, in chunks: a size that the file only claims is never allocated."""
    content = bytearray()
    while len(content) < wanted:
        chunk = stream.read(min(CHUNK, wanted - len(content)))
        if not chunk:
            break
        content += chunk
    return content


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
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            magic = bytes(_read(stream, 4))
            if magic[:2] == GZIP:
                raise ValueError(f"{op} holds gzip data without a name in .gz; rename or decompress it")
            expected = bytes([0, 0, UNSIGNED_BYTE, axes])
            if magic != expected:
                raise ValueError(
                    f"{op} must start with the magic number {expected.hex()} (unsigned bytes, sizes: {axes}), got "
                    f"{magic.hex() or 'an empty file'}; it is not such an IDX file"
                )
            header = bytes(_read(stream, 4 * axes))
            if len(header) < 4 * axes:
                raise ValueError(f"{op} ends inside its header of {4 + 4 * axes} bytes; fetch it again")
            sizes = [int.from_bytes(header[n : n + 4], "big") for n in range(0, 4 * axes, 4)]
            if 0 in sizes:
                raise ValueError(f"{op} must hold something, got sizes {sizes}")
            values = _read(stream, prod(sizes) + 1)
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{op} is not valid gzip data ({error}); fetch it again") from None
    except EOFError:
        raise ValueError(f"{op} is cut short: its gzip data ends early; fetch it again") from None
    if len(values) < prod(sizes):
        raise ValueError(
            f"{op} is cut short: sizes {sizes} need {prod(sizes)} bytes, got {len(values)}; fetch it again"
        )
    if len(values) > prod(sizes):
        raise ValueError(f"{op} is too long: sizes {sizes} need {prod(sizes)} bytes, more follow; fetch it again")
    return torch.frombuffer(values, dtype=torch.uint8).reshape(sizes)
