"""A user's own files: pictures in folders or in a table, and arrays in an .npz file."""

import csv
import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..calls import checks
from ..storage.files import reading
from .images import OP, PARTS, Images, Split, parted
from .vision import torchvision

# Modes of PIL in which a picture has no colour.
GREY = {"1", "L", "LA", "I", "I;16", "I;16B", "F"}
# Opening a folder reads the headers of at most so many pictures.
LOOKED_AT = 1000
# Names of the parts. Case and characters other than letters do not count; "set" or "data" may follow the name.
NAMES_OF_PARTS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev", "eval", "evaluation"),
    "test": ("test", "tests", "testing"),
}
# The table in a folder, with columns file and label, and perhaps split.
TABLE = "labels.csv"
# Besides hidden files: archives of macOS, thumbnails of Synology and Windows.
LEFT_BY_SYSTEMS = ("__macosx", "@eadir", "$recycle.bin", "thumbs.db")
# Names of the arrays of a part.
STYLES = (("x_{}", "y_{}"), ("{}_images", "{}_labels"))
WHOLE = ("images", "labels")


def picture(path: str, channels: int = 0) -> tuple[str, tuple[int, int], Any]:
    """PIL's mode of a picture, its width and height, and with ``channels`` its numbers ``[H, W]`` or ``[H, W, 3]``.

    Raises:
        OSError: no such file, or forbidden.
        ValueError: not a picture, or a damaged one.
    """
    from PIL import Image

    values = None
    with reading(OP, path, "a picture", "replace or remove it"), Image.open(path) as image:
        if channels:
            # PIL's own conversion would cut 16 bits at 255.
            kept = image.mode[0] in "IF"
            values = np.array(image if kept else image.convert("L" if channels == 1 else "RGB"))
        return image.mode, image.size, values


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
    """Pictures with their labels.

    Args:
        root: where they are from, for messages.
        samples: path and label of each picture, and where it was found, for messages.
        classes: the names of the labels.
    """

    def __init__(self, root: str, samples: list[tuple[str, int, str]], classes: list[str]) -> None:
        self.root, self.samples, self.classes = root, samples, classes
        self.loader: Callable[[str], Tensor] | None = None
        self.targets = [label for _, label, _ in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        assert self.loader is not None
        path, label, _ = self.samples[row]
        return self.loader(path), label


def _in_folders(folder: Path) -> Pictures:
    """The pictures of a folder with a sub-folder for each class, in the order of their names.

    Hidden files and folders do not count. Links are followed; a folder or a file that several links reach counts once.

    Raises:
        ValueError: no sub-folders, a class without pictures, or sub-folders that are no classes.
    """
    kinds = ", ".join(_endings())
    inner = {path.name: path for path in _visible(folder) if path.is_dir()}
    if not inner:
        raise ValueError(f"{OP}: {folder} must have a sub-folder of pictures for each class, got none")
    if {"image", "mask"} <= {name.lower().removesuffix("s") for name in inner}:
        remedy = "segcaps learns the pixels of overlapping objects, multi:NAME"
        raise ValueError(f"{OP}: {folder} must have a sub-folder of pictures for each class, got masks; {remedy}")
    _check_classes(folder, inner)
    samples: list[tuple[str, int, str]] = []
    for label, name in enumerate(classes := sorted(inner)):
        pictures = [(path, label, path) for path in _below(inner[name], folder)]
        if not pictures:
            raise ValueError(f"{OP}: {folder} has no pictures in {name}; add some ({kinds}), or remove the folder")
        samples += pictures
    return Pictures(str(folder), samples, classes)


def _listed(table: Path) -> dict[str, Pictures]:
    """The pictures of a table by part: CSV with a line for each picture, whose path begins at the table's folder.

    Raises:
        ValueError: not such a table, or a line with a missing entry, picture or class, or another split.
    """
    with reading(OP, table, "a table of pictures", "save it as CSV in UTF-8"):
        text = table.read_bytes().decode("utf-8-sig")
        lines = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True)
        rows = [(lines.line_num, row) for row in lines]
    header = lines.fieldnames or ()
    if not {"file", "label"} <= {*header}:
        got = ",".join(header)
        raise ValueError(
            f"{OP}: {table} must begin with file,label or file,label,split, got {got}; name the columns so"
        )

    def refused(line: int, rule: str, got: str) -> ValueError:
        return ValueError(f"{OP}: line {line} of {table} must have {rule}, got {got!r}")

    parts: dict[str, list[tuple[int, str, str]]] = {}
    for line, row in rows:
        for column in ("file", "label", *(["split"] if "split" in header else [])):
            if not row[column]:
                raise refused(line, f"a {column}", "")
        part = _part(row.get("split") or "train")
        if part is None:
            raise refused(line, f"a split of {', '.join(PARTS)}", row["split"])
        path = str(table.parent / row["file"])
        if not os.path.isfile(path):
            raise refused(line, "the path of a picture as file", path)
        parts.setdefault(part, []).append((line, path, row["label"]))
    if "train" not in parts or ("split" in header and len(parts) < 2):
        got = ", ".join(parts) or "no lines"
        raise ValueError(f"{OP}: {table} must have pictures to train on, and for validation or tests, got {got}")
    # So 10 comes after 9.
    names = {name for _, _, name in parts["train"]}
    classes = sorted(names, key=int if all(name.isdecimal() for name in names) else str)
    numbers = {name: label for label, name in enumerate(classes)}
    found: dict[str, list[tuple[str, int, str]]] = {}
    for part, (line, path, name) in ((part, picture) for part, pictures in parts.items() for picture in pictures):
        if name not in numbers:
            raise refused(line, "a label that pictures to train on have too", name)
        found.setdefault(part, []).append((path, numbers[name], f"{path} (line {line} of {table})"))
    return {part: Pictures(str(table), samples, classes) for part, samples in found.items()}


def _part(name: str) -> str | None:
    """The part that a folder or an entry names. Also "Train", "training_set" and "val2017"."""
    word = "".join(filter(str.isalpha, name.lower()))
    words = {word, word.removesuffix("set"), word.removesuffix("data")}
    return next((part for part, names in NAMES_OF_PARTS.items() if words & {*names}), None)


def _endings() -> tuple[str, ...]:
    endings: tuple[str, ...] = torchvision("datasets").folder.IMG_EXTENSIONS
    return endings


def _visible(folder: Path) -> list[Path]:
    """What a folder holds, sorted, without what systems, editors and archives leave there."""
    return sorted(path for path in folder.iterdir() if _is_visible(path.name))


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name.lower() not in LEFT_BY_SYSTEMS


def _file(path: str) -> tuple[int, int]:
    """A key that is the same for all links to a file."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _fail(error: OSError) -> None:
    raise error


def pictures_below(folder: Path) -> list[str]:
    """The pictures anywhere below a folder, without hidden files and folders; one that several links reach counts once.

    Raises:
        OSError: a folder can't be read.
    """
    return _below(folder, None)


def _below(folder: Path, root: Path | None) -> list[str]:
    """The pictures anywhere below a folder. A link to the root, or to a folder above it, would lead to all classes."""
    endings, above, seen = _endings(), root and os.path.realpath(root), set()
    found: list[tuple[str, list[str]]] = []
    for here, folders, files in os.walk(folder, onerror=_fail, followlinks=True):
        real = os.path.realpath(here)
        if real in seen or (above and Path(above).is_relative_to(real)):
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(filter(_is_visible, folders))
        found.append((here, sorted(file for file in files if _is_visible(file) and file.lower().endswith(endings))))
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
        if any(path.suffix.lower() in _endings() for path in there):
            return
        held.append({path.name for path in there if path.is_dir()})
    fewest = min(held, key=len)
    if len(fewest) < 2 or not all(fewest <= names for names in held):
        return
    to_classes = "move the pictures of each class into one folder"
    if len(inner) == 1:
        remedy = f"give {inner[min(inner)]}, or {to_classes}"
    else:
        remedy = f"name the parts of a split {', '.join(PARTS)}; for classes {to_classes}"
    got = f"{', '.join(sorted(inner))} with nothing but folders of equal names ({', '.join(sorted(fewest))})"
    raise ValueError(f"{OP}: {folder} must have a sub-folder of pictures for each class, got {got}; {remedy}")


def _parts(folder: Path) -> dict[str, Path]:
    """The sub-folders of the parts, or the folder itself as a single part.

    Raises:
        ValueError: two sub-folders for the same, or another sub-folder that may be a part.
    """
    folders: dict[str | None, list[Path]] = {}
    for child in (path for path in _visible(folder) if path.is_dir()):
        folders.setdefault(_part(child.name), []).append(child)
    others = folders.pop(None, [])
    if "train" not in folders or len(folders) < 2:
        return {"train": folder}
    for paths in folders.values():
        if len(paths) > 1:
            raise ValueError(
                f"{OP}: {folder} must have one folder of each part, got {', '.join(path.name for path in paths)}; "
                "join or rename them"
            )
    parts = {part: folders[part][0] for part in PARTS if part in folders}
    classes = {path.name for path in _visible(parts["train"]) if path.is_dir()}
    if unknown := [
        other.name for other in others if classes & {inner.name for inner in _visible(other) if inner.is_dir()}
    ]:
        raise ValueError(
            f"{OP}: {folder} has {', '.join(unknown)} beside {parts['train'].name}, with folders of the same names; "
            f"name it {' or '.join(PARTS)}, or move it elsewhere"
        )
    return parts


def read_pictures(path: Path, image_size: int | None) -> Split:
    """A folder with a sub-folder of pictures for each class, or with such folders of the parts, or a table.

    Raises:
        ValueError: a class has no pictures or is in some parts only; sub-folders that are no classes; a file that is in
            two classes or parts; a damaged picture; sizes differ without image_size; a table with a wrong line.
    """
    table = path / TABLE if path.is_dir() else path
    if not table.is_file():
        sets = {part: _in_folders(folder) for part, folder in _parts(path).items()}
    else:
        sets = _listed(table)
    whole = sets["train"]
    for files in sets.values():
        if files.classes != whole.classes:
            names = ", ".join(sorted({*files.classes} ^ {*whole.classes}))
            raise ValueError(f"{OP}: {whole.root} and {files.root} must have the same classes, got {names} in one only")
    samples = [sample for files in sets.values() for sample in files.samples]
    there: dict[tuple[int, int], str] = {}
    for file, _, place in samples:
        if (other := there.setdefault(_file(file), place)) is not place:
            raise ValueError(f"{OP}: {place} must be in one class and one part, got the file {other} again; remove one")
    size, modes = None, set()
    for file, _, _ in samples[:: -(-len(samples) // LOOKED_AT)]:
        mode, got, _ = picture(file)
        modes.add(mode)
        size = size or got
        _check_size(file, got, size if image_size is None else None)
    for files in sets.values():
        files.loader = partial(
            read_picture, channels=1 if modes <= GREY else 3, size=size if image_size is None else None
        )
    return parted({part: Images(files, name=files.root, image_size=image_size) for part, files in sets.items()})


def _check_size(path: object, got: tuple[int, int], wanted: tuple[int, int] | None) -> None:
    if wanted is not None and got != wanted:
        (w, h), (width, height) = got, wanted
        raise ValueError(f"{OP}: {path} must be {width} x {height} as others are, got {w} x {h}; give image_size")


def read_npz(path: Path, image_size: int | None) -> Split:
    """Arrays named as in STYLES for each part, or as in WHOLE: images ``[N, H, W]``, ``[N, H, W, C]`` or
    ``[N, C, H, W]``, bytes or floats in [0, 1].

    Raises:
        ValueError: not an .npz file, other arrays, pickled objects, or an array shorter than its header says.
    """
    op = f"{OP}: {path}"
    with reading(OP, path, "an .npz file", "write it again with numpy.savez"), np.load(path) as archive:
        there = {*archive.files}
        known = [{part: tuple(name.format(part) for name in style) for part in PARTS} for style in STYLES]
        present = [{part: pair for part, pair in layout.items() if there & {*pair}} for layout in known]
        parts = next((layout for layout in present if "train" in layout and len(layout) > 1), {"train": WHOLE})
        names = [name for pair in parts.values() for name in pair]
        complete = there >= {*names}
        arrays = [archive[name] for name in names] if complete else []
    if not complete:
        wanted = ", ".join(
            f"{' '.join(layout['train'] + layout['test'])} (and {' '.join(layout['val'])})" for layout in known
        )
        got = " ".join(sorted(there)) or "none"
        raise ValueError(f"{op}: it must hold arrays named {wanted}, or {' '.join(WHOLE)}, got {got}")
    tensors = []
    for name, present in zip(names, arrays, strict=True):
        # numpy gives bytes for what is not an array.
        kind = getattr(present, "dtype", type(present).__name__)
        if getattr(kind, "kind", "") not in ("i", "u", "f") or present.itemsize > 8:
            raise ValueError(f"{op}: {name} must hold integers or floats, got {kind}; save it as such")
        tensors.append(torch.from_numpy(np.ascontiguousarray(present, present.dtype.newbyteorder("="))))
    images = {}
    for part, name, values, labels in zip(parts, names[::2], tensors[::2], tensors[1::2], strict=True):
        fitting = values[:, None] if values.dim() == 3 else values
        if values.dim() == 4 and values.shape[3] <= 4:
            fitting = values.movedim(3, 1)
        if fitting.dim() != 4 or fitting.shape[1] > 4:
            got = checks.shape_of(values)
            raise ValueError(f"{op}: {name} must be [N, H, W], [N, H, W, C] or [N, C, H, W], got {got}")
        images[part] = Images(fitting, labels, name=str(path), image_size=image_size)
    return parted(images)
