"""A user's own files: a folder of pictures, and arrays in an .npz file."""

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .. import checks
from ..files import reading
from .images import OP, Images, Split, parted
from .vision import torchvision

# Modes of PIL in which a picture has no colour.
GREY = {"1", "L", "LA", "I", "I;16", "I;16B", "F"}
# Opening a folder reads the headers of at most so many pictures.
LOOKED_AT = 1000
# Names of the parts of a split, in any case, with anything that is no letter, and before "set" or "data".
TRAINING, TESTS = ("train", "training"), ("test", "tests", "testing")
VALIDATION = ("val", "valid", "validation", "dev", "eval", "evaluation")
# Besides hidden files: archives of macOS, thumbnails of Synology and Windows.
LEFT_BY_SYSTEMS = ("__macosx", "@eadir", "$recycle.bin", "thumbs.db")
NAMES = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("images", "labels"),
)


def picture(path: str, channels: int = 0) -> tuple[str, tuple[int, int], Any]:
    """PIL's mode of a picture, its width and height, and with ``channels`` its numbers ``[H, W]`` or ``[H, W, 3]``.

    Raises:
        OSError: no such file, or forbidden.
        ValueError: not a picture, or a damaged one.
    """
    from PIL import Image

    values = None
    with reading(OP, path, "a picture", "replace or remove it"), Image.open(path) as found:
        if channels:
            # PIL's own conversion would cut 16 bits at 255.
            kept = found.mode[0] in "IF"
            values = np.array(found if kept else found.convert("L" if channels == 1 else "RGB"))
        return found.mode, found.size, values


def read_picture(path: str, channels: int, size: tuple[int, int] | None = None) -> Tensor:
    """A picture as ``[C, H, W]``: uint8, or float32 in [0, 1] from 16 bits.

    Raises:
        OSError, ValueError: as :func:`picture`; also a picture of floats or 32 bits, or not of this width and height.
    """
    mode, got, values = picture(path, channels)
    _check_size(path, got, size)
    deep = mode.startswith("I")
    if mode == "F" or (mode == "I" and values.max() < 256):
        rule = "must have 8 or 16 bits, or colours"
        raise ValueError(f"{OP}: {path} {rule}, got PIL's mode {mode}; convert it, or give an .npz file")
    image = torch.from_numpy(values.astype(np.float32) / 65535 if deep else values)
    return image.expand(channels, -1, -1) if image.dim() == 2 else image.movedim(2, 0)


class Pictures(Dataset[tuple[Tensor, int]]):
    """The pictures of a folder with a sub-folder for each class, in the order of their names.

    Hidden files and folders do not count. Links are followed; a folder or a file that several links reach counts once.

    Raises:
        ValueError: no sub-folders, a class without pictures, or sub-folders that are no classes.
    """

    def __init__(self, folder: Path) -> None:
        self.root = str(folder)
        self.loader: Callable[[str], Tensor] | None = None
        kinds = ", ".join(_endings())
        inner = {each.name: each for each in _visible(folder) if each.is_dir()}
        if not inner:
            raise ValueError(f"{OP}: {folder} must have a sub-folder of pictures for each class, got none")
        _check_classes(folder, inner)
        self.classes = sorted(inner)
        self.samples: list[tuple[str, int]] = []
        for label, name in enumerate(self.classes):
            pictures = [(path, label) for path in _below(inner[name], folder)]
            if not pictures:
                raise ValueError(f"{OP}: {folder} has no pictures in {name}; add some ({kinds}), or remove the folder")
            self.samples += pictures
        self.targets = [label for _, label in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        assert self.loader is not None
        path, label = self.samples[row]
        return self.loader(path), label


def _endings() -> tuple[str, ...]:
    found: tuple[str, ...] = torchvision("datasets").folder.IMG_EXTENSIONS
    return found


def _visible(folder: Path) -> list[Path]:
    """What a folder holds, sorted, without what systems, editors and archives leave there."""
    return sorted(each for each in folder.iterdir() if _is_visible(each.name))


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name.lower() not in LEFT_BY_SYSTEMS


def _file(path: str) -> tuple[int, int]:
    """The same for all links to a file."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _fail(error: OSError) -> None:
    raise error


def _below(folder: Path, root: Path) -> list[str]:
    """The pictures anywhere below a folder. A link to the root, or to a folder above it, would lead to all classes."""
    endings, above, seen = _endings(), os.path.realpath(root), set()
    found: list[tuple[str, list[str]]] = []
    for here, folders, files in os.walk(folder, onerror=_fail, followlinks=True):
        real = os.path.realpath(here)
        if real in seen or Path(above).is_relative_to(real):
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(filter(_is_visible, folders))
        found.append((here, sorted(each for each in files if _is_visible(each) and each.lower().endswith(endings))))
    pictures: dict[tuple[int, int], str] = {}
    for path in (os.path.join(here, name) for here, names in sorted(found) for name in names):
        pictures.setdefault(_file(path), path)
    return [*pictures.values()]


def _check_classes(folder: Path, inner: dict[str, Path]) -> None:
    """Raises ValueError if the sub-folders hold only folders of equal names, as the parts of a split do.

    A split has two classes or more. One name, such as cat/images and dog/images, is no split.
    """
    held: list[set[str]] = []
    for path in inner.values():
        there = _visible(path)
        if any(each.suffix.lower() in _endings() for each in there):
            return
        held.append({each.name for each in there if each.is_dir()})
    fewest = min(held, key=len)
    if len(fewest) < 2 or not all(fewest <= names for names in held):
        return
    to_classes = "move the pictures of each class into one folder"
    if len(inner) == 1:
        remedy = f"give {inner[min(inner)]}, or {to_classes}"
    else:
        known = f"{' or '.join(TRAINING)}, and {', '.join((*TESTS, *VALIDATION))}"
        remedy = f"name the parts of a split {known}; for classes {to_classes}"
    got = f"{', '.join(sorted(inner))} with nothing but folders of equal names ({', '.join(sorted(fewest))})"
    raise ValueError(f"{OP}: {folder} must have a sub-folder of pictures for each class, got {got}; {remedy}")


def _parts(folder: Path) -> list[Path]:
    """The sub-folders for training and for tests, or the folder itself.

    Raises:
        ValueError: two sub-folders for the same, or another sub-folder that may be a part.
    """
    found: dict[tuple[str, ...], list[Path]] = {TRAINING: [], TESTS: [], VALIDATION: []}
    others: list[Path] = []
    for each in (each for each in _visible(folder) if each.is_dir()):
        # Also "Train", "training_set" and "val2017".
        word = "".join(filter(str.isalpha, each.name.lower()))
        kinds = [names for names in found if {word, word.removesuffix("set"), word.removesuffix("data")} & {*names}]
        (found[kinds[0]] if kinds else others).append(each)
    train, test, validation = found.values()
    if not (train and (test or validation)):
        return [folder]
    for names in (train, test or validation):
        if len(names) > 1:
            raise ValueError(
                f"{OP}: {folder} must have one folder of each part, got {', '.join(each.name for each in names)}; "
                "join or rename them"
            )
    classes = {each.name for each in _visible(train[0]) if each.is_dir()}
    if unknown := [
        each.name for each in others if classes & {inner.name for inner in _visible(each) if inner.is_dir()}
    ]:
        known = ", ".join((*TRAINING, *TESTS, *VALIDATION))
        raise ValueError(
            f"{OP}: {folder} has {', '.join(unknown)} beside {train[0].name}, with folders of the same names; name it "
            f"one of {known}, or move it elsewhere"
        )
    if test and validation:
        unread = "; ".join(f"{each} is not read" for each in validation)
        warnings.warn(f"{OP}: {test[0]} is used for tests; {unread}", stacklevel=2)
    return [*train, *(test or validation)]


def read_pictures(folder: Path, image_size: int | None) -> Split:
    """A folder with a sub-folder of pictures for each class, or with sub-folders of a split that have these.

    Raises:
        ValueError: a class has no pictures or is in one part only; sub-folders that are no classes; a file that is in
            two classes or parts; a damaged picture; sizes differ without image_size.
    """
    sets = [Pictures(each) for each in _parts(folder)]
    if sets[0].classes != sets[-1].classes:
        names = ", ".join(sorted(set(sets[0].classes) ^ set(sets[-1].classes)))
        where = " and ".join(each.root for each in sets)
        raise ValueError(f"{OP}: {where} must have the same classes, got {names} in one only")
    paths = [path for each in sets for path, _ in each.samples]
    there: dict[tuple[int, int], str] = {}
    for path in paths:
        if (other := there.setdefault(_file(path), path)) is not path:
            raise ValueError(f"{OP}: {path} must be in one class and one part, got the file {other} again; remove one")
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


def read_npz(path: Path, image_size: int | None) -> Split:
    """Arrays named as in NAMES: images ``[N, H, W]``, ``[N, H, W, C]`` or ``[N, C, H, W]``, bytes or floats in [0, 1].

    Raises:
        ValueError: not an .npz file, other arrays, pickled objects, or an array shorter than its header says.
    """
    op = f"{OP}: {path}"
    with reading(OP, path, "an .npz file", "write it again with numpy.savez"), np.load(path) as archive:
        there = list(archive.files)
        names = next((each for each in NAMES if set(each) <= set(there)), ())
        arrays = [archive[name] for name in names]
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
