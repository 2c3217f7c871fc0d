"""A user's own files: a folder of pictures, and arrays in an .npz file."""

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import checks
from .images import OP, Images, Split, split
from .vision import torchvision

# Modes of PIL in which a picture has no colour.
GREY = {"1", "L", "LA", "I", "I;16", "I;16B", "F"}
# Opening a folder reads the headers of at most so many pictures.
LOOKED_AT = 1000
NAMES = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("images", "labels"),
)


@contextmanager
def picture(path: str) -> Iterator[Any]:
    """Opens a picture with PIL; errors while reading it in the block become a ValueError that names the file."""
    from PIL import Image

    try:
        with Image.open(path) as found:
            yield found
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{OP}: {path} can't be read as a picture ({first}); replace or remove it") from None


def check_size(path: str, size: tuple[int, int], wanted: tuple[int, int] | None) -> None:
    if wanted is not None and size != wanted:
        (w, h), (width, height) = size, wanted
        raise ValueError(f"{OP}: {path} must be {width} x {height} as others are, got {w} x {h}; give image_size")


class Reader:
    """Reads a picture as ``[C, H, W]``: uint8, or float32 in [0, 1] from 16 bits. size: the required (W, H)."""

    def __init__(self, channels: int, size: tuple[int, int] | None) -> None:
        self.channels, self.size = channels, size

    def __call__(self, path: str) -> Tensor:
        with picture(path) as found:
            if found.mode == "F" or (found.mode == "I" and found.getextrema()[1] < 256):
                rule = "must have 8 or 16 bits, or colours"
                raise ValueError(f"{OP}: {path} {rule}, got PIL's mode {found.mode}; convert it, or give an .npz file")
            # PIL's own conversion would cut 16 bits at 255.
            deep = found.mode.startswith("I")
            values = np.array(found if deep else found.convert("L" if self.channels == 1 else "RGB"))
        check_size(path, values.shape[1::-1], self.size)
        image = torch.from_numpy(values.astype(np.float32) / 65535 if deep else values)
        return image.expand(self.channels, -1, -1) if image.dim() == 2 else image.movedim(2, 0)


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
        with picture(path) as found:
            modes.add(found.mode)
        size = size or (found.size if image_size is None else None)
        check_size(path, found.size, size)
    for each in sets:
        each.loader = Reader(1 if modes <= GREY else 3, size)
    images = [Images(each, name=each.root, image_size=image_size) for each in sets]
    return split(images[0]) if len(images) == 1 else Split(*images)


def _image_folder(folder: Path) -> Any:
    try:
        found = torchvision("datasets").ImageFolder(str(folder), allow_empty=True)
    except FileNotFoundError:
        raise ValueError(f"{OP}: {folder} must have a sub-folder of pictures for each class, got none") from None
    there = set(found.targets)
    empty = [name for name, label in found.class_to_idx.items() if label not in there]
    if empty:
        raise ValueError(f"{OP}: {folder} has no pictures in {', '.join(empty)}; add some, or remove the folder")
    return found


def read_npz(path: Path, image_size: int | None) -> Split:
    """Arrays named as in NAMES: images ``[N, H, W]``, ``[N, H, W, C]`` or ``[N, C, H, W]``, bytes or floats in [0, 1].

    Raises:
        ValueError: not an .npz file, other arrays, pickled objects, or an array shorter than its header says.
    """
    op = f"{OP}: {path}"
    try:
        with zipfile.ZipFile(path) as archive:
            there = [name.removesuffix(".npy") for name in archive.namelist()]
            names = next((each for each in NAMES if set(each) <= set(there)), None)
            if names is None:
                wanted = ", or ".join(" ".join(each) for each in NAMES)
                raise TypeError(f"it must hold arrays named {wanted}, got {' '.join(there) or 'none'}")
            arrays = {name: _array(archive, name) for name in names}
    except TypeError as error:
        raise ValueError(f"{op}: {error}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, MemoryError, RuntimeError, ValueError) as error:
        raise ValueError(f"{op} can't be read as an .npz file ({error}); write it again with numpy.savez") from None
    images = []
    for name, labels in zip(names[::2], names[1::2], strict=True):
        values = arrays[name]
        if values.dim() == 3:
            values = values[:, None]
        elif values.dim() == 4 and values.shape[3] <= 4:
            values = values.movedim(3, 1)
        if values.dim() != 4 or values.shape[1] > 4:
            got = checks.shape_of(arrays[name])
            raise ValueError(f"{op}: {name} must be [N, H, W], [N, H, W, C] or [N, C, H, W], got {got}")
        images.append(Images(values, arrays[labels], name=str(path), image_size=image_size))
    return split(images[0]) if len(images) == 1 else Split(*images)


def _array(archive: zipfile.ZipFile, name: str) -> Tensor:
    """
    Raises:
        TypeError: the array does not hold numbers.
        ValueError: pickled objects, or a length that does not fit the array's sizes.
    """
    with archive.open(f"{name}.npy") as member:
        found = np.lib.format.read_array(member, allow_pickle=False)
    if found.dtype.kind not in "iuf":
        raise TypeError(f"{name} must hold integers or floats, got {found.dtype}; save it as such")
    return torch.from_numpy(np.ascontiguousarray(found, found.dtype.newbyteorder("=")))
