"""NORB matrix files, the format of SmallNORB (LeCun, Huang, Bottou 2004): magic, number of axes, sizes, values."""

from math import prod
from pathlib import Path

import torch
from torch import Tensor

from .labelled import Labelled
from .stored import check_length, check_magic, reading, take

# Little-endian on disk, as is all that follows.
BYTES, INTEGERS = 0x1E3D4C55, 0x1E3D4C54
TYPES = {BYTES: torch.uint8, INTEGERS: torch.int32}
STEMS = {
    "train": "smallnorb-5x46789x9x18x6x2x96x96-training",
    "test": "smallnorb-5x01235x9x18x6x2x96x96-testing",
}
MOST_AXES = 8


def read_norb(path: Path | str) -> Tensor:
    """The values of a NORB matrix file of bytes or 32-bit integers; a name in .gz is decompressed.

    Returns:
        uint8 or int32, with the sizes that the file gives.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not such a file, cut short, too long, or broken gzip.
    """
    path = Path(path)
    op = f"capsfast.data.read_norb: {path}"
    with reading(op, path) as stream:
        head = bytes(take(stream, 8))
        check_magic(op, head)
        magic = int.from_bytes(head[:4], "little")
        if magic not in TYPES:
            raise ValueError(
                f"{op} must start with the magic number {BYTES:08x} (bytes) or {INTEGERS:08x} (integers), "
                f"little-endian, got {f'{magic:08x}' if head else 'an empty file'}; it is not such a NORB file"
            )
        axes = int.from_bytes(head[4:], "little")
        if len(head) == 8 and not 1 <= axes <= MOST_AXES:
            raise ValueError(f"{op} must have 1 to {MOST_AXES} axes, got {axes}; fetch it again")
        # Room for three sizes is there even where there are fewer axes.
        stored = 4 * max(3, axes)
        header = bytes(take(stream, stored))
        if len(header) < stored:
            raise ValueError(f"{op} ends inside its header of {8 + stored} bytes; fetch it again")
        sizes = [int.from_bytes(header[n : n + 4], "little") for n in range(0, 4 * axes, 4)]
        if 0 in sizes:
            raise ValueError(f"{op} must hold something, got sizes {sizes}")
        dtype = TYPES[magic]
        wanted = prod(sizes) * dtype.itemsize
        values = take(stream, wanted + 1)
    check_length(op, values, wanted, sizes)
    return torch.frombuffer(values, dtype=dtype).reshape(sizes)


def norb_files(part: str) -> list[str]:
    """The names of the files of ``"train"`` or ``"test"``: images, classes, and what was turned and lit how."""
    return [f"{STEMS[part]}-{what}.mat" for what in ("dat", "cat", "info")]


def read_smallnorb(images_path: Path, classes_path: Path, info_path: Path) -> Labelled:
    """Stereo pairs as two channels, with their classes and views.

    Raises:
        ValueError: as :func:`read_norb`; files that do not belong together.
    """
    images, classes, info = (read_norb(path) for path in (images_path, classes_path, info_path))
    for path, values, wanted, what in (
        (images_path, images, (torch.uint8, 4), "bytes [N, 2, H, W]"),
        (classes_path, classes, (torch.int32, 1), "integers [N]"),
        (info_path, info, (torch.int32, 2), "integers [N, 4]"),
    ):
        kind = values.dtype, values.dim()
        fits = kind == wanted and (values is not images or values.shape[1] == 2)
        if not fits or (values is info and values.shape[1] != 4):
            raise ValueError(
                f"capsfast.data.load: {path} must hold {what}, got {list(values.shape)} of {values.dtype}; "
                f"it is not the file of that name"
            )
        if len(values) != len(images):
            raise ValueError(
                f"capsfast.data.load: {path} must have a row for each of the {len(images)} images of "
                f"{images_path.name}, got {len(values)}; they do not belong together"
            )
    if int(classes.min()) < 0:
        raise ValueError(f"capsfast.data.load: {classes_path} must hold classes from 0 on, got {int(classes.min())}")
    return Labelled(images, classes.long(), info=info.long())
