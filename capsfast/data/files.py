"""A user's own files: a folder of pictures, and arrays in an .npz file."""

import zipfile
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import checks
from .images import OP, Images, Split, parted
from .vision import torchvision

# Modes of PIL in which a picture has no colour.
GREY = {"1", "L", "LA", "I", "I;16", "I;16B", "F"}
# Opening a folder reads the headers of at most so many pictures.
LOOKED_AT = 1000
# The error for a damaged .npz file depends on its bytes. A single array: a TypeError, in Python 3.10 an AttributeError.
DAMAGED = (
    zipfile.BadZipFile,
    *(zlib.error, AttributeError, EOFError, MemoryError, RuntimeError, TypeError, ValueError),
)
NAMES = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("images", "labels"),
)


def picture(path: str, channels: int = 0) -> tuple[str, tuple[int, int], Any]:
    """PIL's mode of a picture, its width and height, and with ``channels`` its numbers ``[H, W]`` or ``[H, W, 3]``.

    Raises:
        ValueError: not a picture, or a damaged one.
    """
    from PIL import Image

    values = None
    try:
        with Image.open(path) as found:
            if channels:
                # PIL's own conversion would cut 16 bits at 255.
                kept = found.mode[0] in "IF"
                values = np.array(found if kept else found.convert("L" if channels == 1 else "RGB"))
            return found.mode, found.size, values
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{OP}: {path} can't be read as a picture ({first}); replace or remove it") from None


def read_picture(path: str, channels: int, size: tuple[int, int] | None = None) -> Tensor:
    """A picture as ``[C, H, W]``: uint8, or float32 in [0, 1] from 16 bits.

    Raises:
        ValueError: as :func:`picture`, a picture of floats or of 32 bits, or not of this width and height.
    """
    mode, got, values = picture(path, channels)
    _check_size(path, got, size)
    deep = mode.startswith("I")
    if mode == "F" or (mode == "I" and values.max() < 256):
        rule = "must have 8 or 16 bits, or colours"
        raise ValueError(f"{OP}: {path} {rule}, got PIL's mode {mode}; convert it, or give an .npz file")
    image = torch.from_numpy(values.astype(np.float32) / 65535 if deep else values)
    return image.expand(channels, -1, -1) if image.dim() == 2 else image.movedim(2, 0)


def read_pictures(folder: Path, image_size: int | None) -> Split:
    """A folder with a sub-folder of pictures per class, or with ``train`` and ``test`` (or ``val``) that have these.

    Raises:
        ValueError: a class has no pictures or is in one part only; a damaged picture; sizes differ without image_size.
    """
    parts = [part for part in ("train", "test", "val") if (folder / part).is_dir()][:2]
    folders = [folder / part for part in parts] if len(parts) == 2 and parts[0] == "train" else [folder]
    sets = [_image_folder(each) for each in folders]
    if sets[0].classes != sets[-1].classes:
        names = ", ".join(sorted(set(sets[0].classes) ^ set(sets[-1].classes)))
        raise ValueError(f"{OP}: {' and '.join(map(str, folders))} must have the same classes, got {names} in one only")
    paths = [path for each in sets for path, _ in each.samples]
    size, modes = None, set()
    for path in paths[:: -(-len(paths) // LOOKED_AT)]:
        mode, got, _ = picture(path)
        modes.add(mode)
        size = size or got
        _check_size(path, got, size if image_size is None else None)
    for each in sets:
        each.loader = partial(
            read_picture, channels=1 if modes <= GREY else 3, size=size if image_size is None else None
        )
    return parted([Images(each, name=each.root, image_size=image_size) for each in sets])


def _check_size(path: object, got: tuple[int, int], wanted: tuple[int, int] | None) -> None:
    if wanted is not None and got != wanted:
        (w, h), (width, height) = got, wanted
        raise ValueError(f"{OP}: {path} must be {width} x {height} as others are, got {w} x {h}; give image_size")


def _image_folder(folder: Path) -> Any:
    try:
        found = torchvision("datasets").ImageFolder(str(folder), allow_empty=True)
    except FileNotFoundError:
        raise ValueError(f"{OP}: {folder} must have a sub-folder of pictures for each class, got none") from None
    there = set(found.targets)
    if empty := [name for name, label in found.class_to_idx.items() if label not in there]:
        raise ValueError(f"{OP}: {folder} has no pictures in {', '.join(empty)}; add some, or remove the folder")
    return found


def read_npz(path: Path, image_size: int | None) -> Split:
    """Arrays named as in NAMES: images ``[N, H, W]``, ``[N, H, W, C]`` or ``[N, C, H, W]``, bytes or floats in [0, 1].

    Raises:
        ValueError: not an .npz file, other arrays, pickled objects, or an array shorter than its header says.
    """
    op = f"{OP}: {path}"
    try:
        with np.load(path) as archive:
            there = list(archive.files)
            names = next((each for each in NAMES if set(each) <= set(there)), ())
            arrays = [archive[name] for name in names]
    except DAMAGED as error:
        raise ValueError(f"{op} can't be read as an .npz file ({error}); write it again with numpy.savez") from None
    if not names:
        wanted = ", or ".join(" ".join(each) for each in NAMES)
        raise ValueError(f"{op}: it must hold arrays named {wanted}, got {' '.join(there) or 'none'}")
    tensors = []
    for name, found in zip(names, arrays, strict=True):
        # numpy gives bytes for what is not an array.
        kind = getattr(found, "dtype", type(found).__name__)
        if getattr(kind, "kind", "") not in ("i", "u", "f") or found.itemsize > 8:
            raise ValueError(f"{op}: {name} must hold integers or floats, got {kind}; save it as such")
        tensors.append(torch.from_numpy(np.ascontiguousarray(found, found.dtype.newbyteorder("="))))
    images = []
    for name, values, labels in zip(names[::2], tensors[::2], tensors[1::2], strict=True):
        fitting = values[:, None] if values.dim() == 3 else values
        if values.dim() == 4 and values.shape[3] <= 4:
            fitting = values.movedim(3, 1)
        if fitting.dim() != 4 or fitting.shape[1] > 4:
            got = checks.shape_of(values)
            raise ValueError(f"{op}: {name} must be [N, H, W], [N, H, W, C] or [N, C, H, W], got {got}")
        images.append(Images(fitting, labels, name=str(path), image_size=image_size))
    return parted(images)
