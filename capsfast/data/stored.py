"""Readers for files of MNIST and SmallNORB, plain or compressed. They check the sizes in a header before they read."""

import gzip
import zlib
from math import prod
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

GZIP, GZIP_MOST = b"\x1f\x8b", 1032  # how gzip data begins, and the most bytes that one byte of it becomes
# NORB files are little-endian.
NORB = {0x1E3D4C55: torch.uint8, 0x1E3D4C54: torch.int32}
NORB_STEMS = ("smallnorb-5x46789x9x18x6x2x96x96-training", "smallnorb-5x01235x9x18x6x2x96x96-testing")
MOST_AXES = 8


def read_idx(path: Path | str, axes: int) -> Tensor:
    """The unsigned bytes of an IDX file with ``axes`` axes, uint8 with the sizes in the file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an IDX file of unsigned bytes with this number of axes, too short or long, or broken gzip.
    """
    return _read("read_idx", path, "big", {0x800 + axes: torch.uint8}, axes)


def read_norb(path: Path | str) -> Tensor:
    """The values of a NORB matrix file of bytes or 32-bit integers, uint8 or int32 with the sizes in the file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not such a file, too short or long, or broken gzip.
    """
    return _read("read_norb", path, "little", NORB)


def _read(
    name: str, path: Path | str, order: Literal["big", "little"], kinds: dict[int, torch.dtype], axes: int = 0
) -> Tensor:
    """The values of a file of one of these ``kinds``, dtypes by magic number. name: the function, for errors. axes: if
    0, the file says how many."""
    path = Path(path)
    with path.open("rb") as plain:
        packed = plain.read(2) == GZIP
    try:
        with gzip.open(path) if packed else path.open("rb") as stream:

            def read(count: int) -> list[int]:
                data = stream.read(4 * count)
                if len(data) < 4 * count:
                    raise ValueError("ends inside its header")
                return [int.from_bytes(data[n : n + 4], order) for n in range(0, 4 * count, 4)]

            (magic,) = read(1)
            if magic not in kinds:
                names = " or ".join(f"{number:08x} ({dtype})" for number, dtype in kinds.items())
                raise ValueError(f"must start with the magic number {names}, {order}-endian, got {magic:08x}")
            count = axes or read(1)[0]
            if not 1 <= count <= MOST_AXES:
                raise ValueError(f"must have 1 to {MOST_AXES} axes, got {count}")
            # NORB's header has room for three sizes even with fewer axes.
            dtype, sizes = kinds[magic], read(axes or max(3, count))[:count]
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
