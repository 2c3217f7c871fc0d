"""``capsfast.data``: SmallNORB and CIFAR-10, whole and damaged."""

import gzip
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from capsfast import data
from capsfast.data import cifar
from capsfast.data.norb import norb_files

from ..support.stored_files import NORB_MAGIC, cifar_batch, norb_bytes, python2_pickle, write_cifar, write_smallnorb


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No data in the usual places."""
    monkeypatch.delenv("CAPSFAST_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("end", ["", ".gz"])
def test_smallnorb(homeless: Path, end: str) -> None:
    written = write_smallnorb(homeless / "smallnorb", end)
    split = data.load("smallnorb", homeless)
    for part, found in (("train", split.train), ("test", split.test)):
        images, classes, info = (written[name] for name in norb_files(part))
        assert found.info is not None and found.labels.dtype == torch.int64
        assert torch.equal(found.images, images) and torch.equal(found.labels, classes.long())
        assert torch.equal(found.info, info.long())
    assert split.num_classes == 5
    sets = data.open_sets("smallnorb", str(homeless), image_size=6, crop=4)
    assert (sets.channels, sets.image_size) == (2, 4) and sets.train.source.info is not None
    assert sets.train.batch(torch.arange(3)).images.shape == (3, 2, 4, 4)


GOOD = norb_bytes(torch.arange(24, dtype=torch.uint8).view(2, 3, 4))
BROKEN = {
    "cut short": ("x", GOOD[:-1], "cut short: sizes [2, 3, 4] need 24 bytes, got 23"),
    "integers cut short": ("x", norb_bytes(torch.arange(5, dtype=torch.int32))[:-2], "sizes [5] need 20 bytes, got 18"),
    "too long": ("x", GOOD + b"\0", "too long: sizes [2, 3, 4] need 24 bytes"),
    "floats": ("x", b"\x51\x4c\x3d\x1e" + GOOD[4:], "(integers), little-endian, got 1e3d4c51"),
    "big-endian": ("x", GOOD[3::-1] + GOOD[4:], "got 554c3d1e"),
    "empty": ("x", b"", "got an empty file"),
    "header only": ("x", GOOD[:19], "ends inside its header of 20 bytes"),
    "no header": ("x", GOOD[:6], "ends inside its header"),
    "no axes": ("x", GOOD[:4] + bytes(16), "must have 1 to 8 axes, got 0"),
    "many axes": ("x", GOOD[:4] + b"\xff" * 16, "must have 1 to 8 axes, got 4294967295"),
    "nothing": ("x", norb_bytes(torch.zeros(0, 3, 4, dtype=torch.uint8)), "must hold something, got sizes [0, 3, 4]"),
    "huge": ("x", NORB_MAGIC[torch.uint8] + b"\3\0\0\0" + b"\xff\xff\xff\x7f" * 3, "cut short"),
    "not gzip": ("x.gz", GOOD, "not valid gzip data"),
    "gzip cut short": ("x.gz", gzip.compress(GOOD)[:-12], "its gzip data ends early"),
    "gzip by another name": ("x", gzip.compress(GOOD), "holds gzip data without a name in .gz"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_norb_file_is_named(tmp_path: Path, name: str) -> None:
    file, content, rule = BROKEN[name]
    path = tmp_path / file
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"capsfast\.data\.read_norb") as error:
        data.read_norb(path)
    assert str(path) in str(error.value) and rule in str(error.value)


@pytest.mark.parametrize(
    ("which", "values", "rule"),
    [
        (0, torch.zeros(20, 1, 4, 4, dtype=torch.uint8), "must hold bytes [N, 2, H, W], got [20, 1, 4, 4]"),
        (1, torch.zeros(20, 1, dtype=torch.int32), "must hold integers [N], got [20, 1]"),
        (1, torch.zeros(19, dtype=torch.int32), "must have a row for each of the 20 images"),
        (1, torch.full((20,), -1, dtype=torch.int32), "must hold classes from 0 on, got -1"),
        (2, torch.zeros(20, 3, dtype=torch.int32), "must hold integers [N, 4], got [20, 3]"),
    ],
)
def test_smallnorb_files_must_belong_together(homeless: Path, which: int, values: torch.Tensor, rule: str) -> None:
    write_smallnorb(homeless)
    file = homeless / norb_files("train")[which]
    file.write_bytes(norb_bytes(values))
    with pytest.raises(ValueError, match=re.escape(rule)) as error:
        data.load("smallnorb", homeless)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("end", [".bin", ""])
@pytest.mark.parametrize("inner", [True, False])
def test_cifar10(homeless: Path, end: str, inner: bool) -> None:
    folder = homeless / "cifar10"
    if inner:
        folder = folder / ("cifar-10-batches-bin" if end else "cifar-10-batches-py")
    written = write_cifar(folder, end)
    split = data.load("cifar10", homeless)
    images, labels = (torch.cat([written[f"data_batch_{n}"][part] for n in range(1, 6)]) for part in (0, 1))
    assert torch.equal(split.train.images, images.view(60, 3, 32, 32)) and torch.equal(split.train.labels, labels)
    assert torch.equal(split.test.images.flatten(1), written["test_batch"][0]) and split.num_classes == 10


def test_cifar10_prefers_the_binary_files(homeless: Path) -> None:
    write_cifar(homeless, "")
    written = write_cifar(homeless, ".bin")
    found = data.load("cifar10", homeless).test.images
    assert torch.equal(found.flatten(1), written["test_batch"][0])


def test_cifar_pickles_of_python_3(tmp_path: Path) -> None:
    images, labels = cifar_batch(3)
    for protocol in (2, 3, 4):
        content = {"data": images.numpy(), "labels": labels.tolist(), "filenames": ["x"] * 3}
        (tmp_path / "x").write_bytes(pickle.dumps(content, protocol=protocol))
        found = data.read_cifar_pickle(tmp_path / "x")
        assert torch.equal(found.images.flatten(1), images) and torch.equal(found.labels, labels)


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda content: content[:-1], "3 records and 3072 bytes"),
        (lambda content: b"", "got 0 bytes"),
        (lambda content: b"\x0a" + content[1:], "labels from 0 to 9, got 10"),
    ],
)
def test_broken_cifar_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], rule: str) -> None:
    write_cifar(tmp_path, count=4)
    file = tmp_path / "data_batch_2.bin"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=r"read_cifar_binary") as error:
        data.load("cifar10", tmp_path)
    assert str(file) in str(error.value) and rule in str(error.value)


def test_cifar_batches_are_of_one_length(tmp_path: Path) -> None:
    """A file that is cut between two records looks whole."""
    write_cifar(tmp_path, count=4)
    file = tmp_path / "data_batch_5.bin"
    file.write_bytes(file.read_bytes()[: 3 * 3073])
    with pytest.raises(ValueError, match=r"as many images each, got .*data_batch_4 4, data_batch_5 3, test_batch 4"):
        data.load("cifar10", tmp_path)


class Trap:
    """What a pickle must not be able to do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


BATCH = {b"data": cifar_batch(3)[0].numpy(), b"labels": [0, 1, 2]}
PICKLES: dict[str, tuple[Any, str]] = {
    "cut short": (python2_pickle(BATCH)[:-900], "can't be read as a batch of CIFAR-10"),
    "no pickle": (b"\0" * 50, "can't be read as a batch of CIFAR-10"),
    "empty": (b"", "can't be read as a batch of CIFAR-10: Ran out of input"),
    "a list": ([1, 2], "must be a dict"),
    "no labels": ({b"data": BATCH[b"data"]}, "must be a dict with an array under data and a list under labels"),
    "labels of text": ({**BATCH, b"labels": ["a", "b", "c"]}, "must have labels from 0 to 9"),
    "large labels": ({**BATCH, b"labels": [0, 10, 2]}, "must have labels from 0 to 9, got 10"),
    "few labels": ({**BATCH, b"labels": [0, 1]}, "each of its 2 labels, got [3, 3072]"),
    "none": ({b"data": cifar_batch(0)[0].numpy(), b"labels": []}, "each of its 0 labels"),
    "floats": ({**BATCH, b"data": torch.zeros(3, 3072).numpy()}, "an array of something else than bytes"),
    "columns": ({**BATCH, b"data": cifar_batch(3)[0].T.contiguous().numpy().T}, "not stored row by row"),
    "objects": ({**BATCH, b"filenames": {1, 2}.__class__}, "it names __builtin__.set, which no batch needs"),
    "too long": (python2_pickle(BATCH) + b"\0", "is too long: bytes follow its pickle"),
}


@pytest.mark.parametrize("name", PICKLES)
def test_broken_cifar_pickle_is_named(tmp_path: Path, name: str) -> None:
    content, rule = PICKLES[name]
    path = tmp_path / "data_batch_1"
    path.write_bytes(content if isinstance(content, bytes) else python2_pickle(content))
    with pytest.raises(ValueError, match=r"read_cifar_pickle") as error:
        data.read_cifar_pickle(path)
    assert str(path) in str(error.value) and rule in str(error.value)


def test_cifar_pickles_run_no_code(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(pickle.dumps({**BATCH, b"filenames": Trap(tmp_path / "trapped")}))
    with pytest.raises(ValueError, match="which no batch needs"):
        data.read_cifar_pickle(tmp_path / "x")
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("named", sorted(cifar._Plain.KNOWN))
@pytest.mark.parametrize(("attribute", "value"), [("__defaults__", ("utf8",)), ("__call__", "x"), ("shape", (3,))])
def test_cifar_pickles_change_nothing(
    tmp_path: Path, named: tuple[str, str], attribute: str, value: str | tuple[Any, ...]
) -> None:
    """BUILD would set attributes on what a pickle names, which the next file would find."""
    name = "c{}\n{}\n".format(*named).encode()
    state = pickle.dumps({attribute: value}, 2)[2:-1]
    (tmp_path / "good").write_bytes(python2_pickle(BATCH))
    # As its state, and as the state of its slots.
    for content in (b"\x80\x02" + name + state + b"b.", b"\x80\x02" + name + b"N" + state + b"\x86b."):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(ValueError, match="can't be read as a batch of CIFAR-10"):
            data.read_cifar_pickle(tmp_path / "bad")
        assert torch.equal(data.read_cifar_pickle(tmp_path / "good").labels, torch.arange(3))


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("reader", [data.read_cifar_pickle, data.read_cifar_binary])
def test_cifar_files_are_read_up_to_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Callable[..., Any], end: str
) -> None:
    monkeypatch.setattr(cifar, "MOST_BYTES", 1000)
    content = python2_pickle(BATCH)
    path = tmp_path / f"x{end}"
    path.write_bytes(gzip.compress(content) if end else content)
    with pytest.raises(ValueError, match="is too long: a batch has at most 1000 bytes, more follow"):
        reader(path)


def test_a_disk_that_fails_is_not_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> bytearray:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(cifar, "take", fail)
    (tmp_path / "x").write_bytes(python2_pickle(BATCH))
    with pytest.raises(OSError, match="Input/output error"):
        data.read_cifar_pickle(tmp_path / "x")


@pytest.mark.parametrize(
    ("name", "write", "file"),
    [
        ("smallnorb", write_smallnorb, norb_files("test")[2]),
        ("cifar10", write_cifar, "data_batch_3.bin"),
    ],
)
def test_missing_files_are_named(homeless: Path, name: str, write: Callable[..., Any], file: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"{name} needs the files .*CAPSFAST_DATA") as error:
        data.load(name)
    assert str(homeless / "cache" / "capsfast" / name) in str(error.value) and file in str(error.value)
    write(homeless / name)
    (homeless / name / file).unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(f"{name} needs the files {file} (.gz too) in ")) as error:
        data.load(name, homeless)
    assert str(homeless / name) in str(error.value)
