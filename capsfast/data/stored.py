"""Readers for files of MNIST and SmallNORB, plain or compressed. They check the sizes in a header before they read."""

import gzip
import zlib
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
from torch import Tensor

GZIP, GZIP_MOST = b"\x1f\x8b", 1032  # how gzip data begins, and the most bytes that one byte of it becomes
# NORB files are little-endian.
NORB = {0x1E3D4C55: torch.uint8, 0x1E3D4C54: torch.int32}
NORB_STEMS = ("smallnorb-5x46789x9x18x6x2x96x96-training", "smallnorb-5x01235x9x18x6x2x96x96-testing")
MOST_AXES = 8
# Reads a number of integers of four bytes, "big" or "little".
Read = Callable[[int, str], list[int]]


def read_idx(path: Path | str, axes: int) -> Tensor:
    """The unsigned bytes of an IDX file with ``axes`` axes, uint8 with the sizes in the file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an IDX file of unsigned bytes with this number of axes, too short or long, or broken gzip.
    """

    def header(read: Read) -> tuple[torch.dtype, list[int]]:
        (magic,) = read(1, "big")
        if magic != 0x800 + axes:
            raise ValueError(f"must start with the magic number {0x800 + axes:08x} of {axes} sizes, got {magic:08x}")
        return torch.uint8, read(axes, "big")

    return _read("read_idx", path, header)


def read_norb(path: Path | str) -> Tensor:
    """The values of a NORB matrix file of bytes or 32-bit integers, uint8 or int32 with the sizes in the file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not such a file, too short or long, or broken gzip.
    """

    def header(read: Read) -> tuple[torch.dtype, list[int]]:
        magic, axes = read(2, "little")
        if magic not in NORB:
            names = " or ".join(f"{number:08x} ({dtype})" for number, dtype in NORB.items())
            raise ValueError(f"must start with the magic number {names}, little-endian, got {magic:08x}")
        if not 1 <= axes <= MOST_AXES:
            raise ValueError(f"must have 1 to {MOST_AXES} axes, got {axes}")
        # The header has room for three sizes even with fewer axes.
        return NORB[magic], read(max(3, axes), "little")[:axes]

    return _read("read_norb", path, header)


def _read(name: str, path: Path | str, header: Callable[[Read], tuple[torch.dtype, list[int]]]) -> Tensor:
    """The values of a file whose header says their dtype and sizes. name: the function, for errors."""
    path = Path(path)
    with path.open("rb") as plain:
        packed = plain.read(2) == GZIP
    try:
        with gzip.open(path) if packed else path.open("rb") as stream:

            def read(count: int, order: str) -> list[int]:
                found = stream.read(4 * count)
                if len(found) < 4 * count:
                    raise ValueError("ends inside its header")
                return [int.from_bytes(found[n : n + 4], order) for n in range(0, 4 * count, 4)]  # type: ignore[arg-type]

            dtype, sizes = header(read)
            wanted = prod(sizes) * dtype.itemsize
            # So a wrong size in a header takes no memory.
            fits = 0 < wanted <= path.stat().st_size * (GZIP_MOST if packed else 1)
            values = bytearray(wanted + 1 if fits else 0)
            got = stream.readinto(values)
        if got != wanted or not fits:
            more = "more" if got > wanted else "fewer"
            raise ValueError(f"is damaged: sizes {sizes} need {wanted} bytes, at least 1, got {more}")
    except (gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        what = str(error) if type(error) is ValueError else f"is not valid gzip data: {error}"
        raise ValueError(f"capsfast.data.{name}: {path} {what}; fetch it again") from None
    return torch.frombuffer(values, dtype=dtype, count=prod(sizes)).reshape(sizes)


def read_smallnorb(images_path: Path, classes_path: Path) -> tuple[Tensor, Tensor]:
    """Stereo pairs as two channels, uint8 ``[N, 2, H, W]``, and their classes int32 ``[N]``.

    Raises:
        ValueError: as :func:`read_norb`, or the files hold other arrays.
    """
    images, classes = read_norb(images_path), read_norb(classes_path)
    for path, values, dtype, fits, what in (
        (images_path, images, torch.uint8, images.dim() == 4 and images.shape[1] == 2, "bytes [N, 2, H, W]"),
        (classes_path, classes, torch.int32, classes.dim() == 1, "integers [N]"),
    ):
        if not fits or values.dtype != dtype:
            got = f"{list(values.shape)} of {values.dtype}"
            raise ValueError(f"capsfast.data.load: {path} must hold {what}, got {got}; it is not the file of that name")
    return images, classes
