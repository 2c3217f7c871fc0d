"""Readers for files of MNIST and SmallNORB, plain or .gz. They do not trust the sizes in the header."""

import gzip
import zlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

GZIP = b"\x1f\x8b"
CHUNK = 1 << 20
# NORB files are little-endian.
BYTES, INTEGERS = 0x1E3D4C55, 0x1E3D4C54
NORB_STEMS = ("smallnorb-5x46789x9x18x6x2x96x96-training", "smallnorb-5x01235x9x18x6x2x96x96-testing")
MOST_AXES = 8
Stream = BinaryIO | gzip.GzipFile


def take(stream: Stream, wanted: int) -> bytearray:
    """Up to ``wanted`` bytes, in chunks, so that a wrong size in a header allocates nothing."""
    content = bytearray()
    while len(content) < wanted:
        chunk = stream.read(min(CHUNK, wanted - len(content)))
        if not chunk:
            break
        content += chunk
    return content


def read_idx(path: Path | str, axes: int) -> Tensor:
    """The unsigned bytes of an IDX file with ``axes`` axes; a .gz file is decompressed.

    Returns:
        uint8, with the sizes in the file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an IDX file of unsigned bytes with this number of axes, too short or long, or broken gzip.
    """

    def header(op: str, magic: bytes, more: Callable[[int], bytes]) -> tuple[torch.dtype, list[int]]:
        expected = bytes([0, 0, 8, axes])
        if magic != expected:
            raise ValueError(
                f"{op} must start with the magic number {expected.hex()} (unsigned bytes, sizes: {axes}), got "
                f"{magic.hex() or 'an empty file'}; it is not such an IDX file"
            )
        sizes = more(4 * axes)
        return torch.uint8, [int.from_bytes(sizes[n : n + 4], "big") for n in range(0, 4 * axes, 4)]

    return _read("read_idx", path, header)


def read_norb(path: Path | str) -> Tensor:
    """The values of a NORB matrix file of bytes or 32-bit integers; a .gz file is decompressed.

    Returns:
        uint8 or int32, with the sizes in the file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not such a file, too short or long, or broken gzip.
    """

    def header(op: str, magic: bytes, more: Callable[[int], bytes]) -> tuple[torch.dtype, list[int]]:
        kind = int.from_bytes(magic, "little")
        if kind not in (BYTES, INTEGERS):
            raise ValueError(
                f"{op} must start with the magic number {BYTES:08x} (bytes) or {INTEGERS:08x} (integers), "
                f"little-endian, got {f'{kind:08x}' if magic else 'an empty file'}; it is not such a NORB file"
            )
        axes = int.from_bytes(more(4), "little")
        if not 1 <= axes <= MOST_AXES:
            raise ValueError(f"{op} must have 1 to {MOST_AXES} axes, got {axes}; fetch it again")
        # The header has room for three sizes even with fewer axes.
        sizes = more(4 * max(3, axes))
        dtype = torch.uint8 if kind == BYTES else torch.int32
        return dtype, [int.from_bytes(sizes[n : n + 4], "little") for n in range(0, 4 * axes, 4)]

    return _read("read_norb", path, header)


def _read(
    name: str,
    path: Path | str,
    header: Callable[[str, bytes, Callable[[int], bytes]], tuple[torch.dtype, list[int]]],
) -> Tensor:
    """The values of a file whose header says their dtype and sizes.

    Args:
        name, path: the function and the file, for errors.
        header: takes the text for errors, the first four bytes, and a function that reads more bytes; returns dtype and
            sizes.
    """
    path = Path(path)
    op = f"capsfast.data.{name}: {path}"

    def more(count: int) -> bytes:
        found = bytes(take(stream, count))
        if len(found) < count:
            raise ValueError(f"{op} ends inside its header; fetch it again")
        return found

    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            magic = bytes(take(stream, 4))
            if magic[:2] == GZIP:
                raise ValueError(f"{op} holds gzip data without a name in .gz; rename or decompress it")
            dtype, sizes = header(op, magic, more)
            if 0 in sizes:
                raise ValueError(f"{op} must hold something, got sizes {sizes}")
            wanted = prod(sizes) * dtype.itemsize
            values = take(stream, wanted + 1)
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{op} is not valid gzip data ({error}); fetch it again") from None
    except EOFError:
        raise ValueError(f"{op} is cut short: its gzip data ends early; fetch it again") from None
    if len(values) < wanted:
        raise ValueError(f"{op} is cut short: sizes {sizes} need {wanted} bytes, got {len(values)}; fetch it again")
    if len(values) > wanted:
        raise ValueError(f"{op} is too long: sizes {sizes} need {wanted} bytes, more follow; fetch it again")
    return torch.frombuffer(values, dtype=dtype).reshape(sizes)


def read_smallnorb(images_path: Path, classes_path: Path) -> tuple[Tensor, Tensor]:
    """Stereo pairs as two channels, uint8 ``[N, 2, H, W]``, and their classes int32 ``[N]``.

    Raises:
        ValueError: as :func:`read_norb`, or the files hold other arrays.
    """
    images, classes = read_norb(images_path), read_norb(classes_path)
    for path, values, fits, what in (
        (images_path, images, images.dim() == 4 and images.shape[1] == 2, "bytes [N, 2, H, W]"),
        (classes_path, classes, classes.dim() == 1, "integers [N]"),
    ):
        if not fits or values.dtype != (torch.uint8 if values is images else torch.int32):
            got = f"{list(values.shape)} of {values.dtype}"
            raise ValueError(f"capsfast.data.load: {path} must hold {what}, got {got}; it is not the file of that name")
    return images, classes
