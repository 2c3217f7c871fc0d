"""Files that hold something else than they should: readers say so in one sentence, and commands end with status 1.

A case is a file, a defect of the file, and an entry point: a function of Python, or a command.
"""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("lightning")
pytest.importorskip("matplotlib")
pytest.importorskip("safetensors")
pytest.importorskip("torchvision")

import yaml
from PIL import Image
from safetensors.torch import load_file, save

from capsfast import data, train
from capsfast.bench import record
from capsfast.models import EfficientCapsNet

from .support.commands import run

NOBODY = 65534  # a user who may read only what everybody may read
NET: dict[str, Any] = {"image_size": 8, "num_classes": 3, "conv_channels": 4, "reconstruction": False}
TINY = {"conv_channels": 3, "primary_groups": 2, "digit_dim": 4}
CPU = ("--accelerator", "cpu", "--out", "out")
CONFIG, WEIGHTS, CHECKPOINT, OPTIONS = "net/config.json", "net/model.safetensors", "run/last.ckpt", "run/config.yaml"
ARRAYS, RECORD, PICTURE, TABLE = "images.npz", "record.json", "a.png", "labels.csv"


def fitted() -> None:
    trainer = train.make_trainer(Path("out"), epochs=1, accelerator="cpu", progress=False, logger=False)
    train.fit(trainer, train.Learner("capsnet", 1, 8, 3, options=TINY), train.ImageData(ARRAYS), Path(CHECKPOINT))


# Functions, and the words of commands.
ENTRIES: dict[str, Any] = {
    "from_pretrained": lambda: EfficientCapsNet.from_pretrained("net"),
    "predict --pretrained": ("predict", PICTURE, "--model", "efficientcapsnet", "--pretrained", "net", *CPU),
    "open_checkpoint": lambda: train.open_checkpoint(CHECKPOINT),
    "evaluate": ("evaluate", CHECKPOINT, *CPU),
    "predict": ("predict", PICTURE, "--checkpoint", CHECKPOINT, *CPU),
    "validate": ("validate", "--resume", CHECKPOINT, *CPU[:2]),
    "train --resume": ("train", "--resume", CHECKPOINT, *CPU),
    "fit": fitted,
    "fit --config": ("fit", "--config", OPTIONS, *CPU),
    "load": lambda: data.load(ARRAYS),
    "load table": lambda: data.load(TABLE),
    "train --data": ("train", "--data", ARRAYS, *CPU),
    "report": ("report", RECORD),
}

Defect = Callable[[Path], Any]
Change = Callable[[Any], Any]


def put(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def halved(path: Path) -> None:
    content = path.read_bytes()
    half = len(content) // 2
    if path.suffix == ".yaml":
        # Up to the end of a line, or of a word behind a key, it would be a file without an error. It ends within the
        # next key that follows a value.
        half += re.search(rb"(?<=[^:]\n) *\w\w+:", content[half:]).end() - 2  # type: ignore[union-attr]
    path.write_bytes(content[:half])


BYTES = {
    "empty": b"",
    "zeros": bytes(4096),
    "binary": bytes(range(256)) * 8,
    "words": b"no such thing",
    "latin-1": 'gr\xfc\xdfe: "\xe4"\n'.encode("latin-1"),
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "pickle": pickle.dumps({"state_dict": {}}),
    "list": b"[1, 2]",
    "number": b"3",
    "open": b'{"a": [1, ',
    "deep": b"[" * 100_000,
    "digits": b'{"image_size": ' + b"1" * 5000 + b"}",
}
BROKEN: dict[str, Defect] = {name: partial(put, content) for name, content in BYTES.items()}
BROKEN |= {"halved": halved, "forbidden": lambda path: path.chmod(0)}
ABSENT: dict[str, Defect] = {"missing": Path.unlink, "folder": folder, "loop": loop}


# What the content becomes.
def without(name: str) -> Change:
    return lambda content: {key: value for key, value in content.items() if key != name}


def of(part: str, change: Change) -> Change:
    return lambda content: {**content, part: change(content[part])}


def values(name: str, *several: Any, part: str | None = None) -> dict[str, Change]:
    """The name with each of the values."""
    changes = {f"{name}={value}": lambda content, value=value: {**content, name: value} for value in several}
    return changes if part is None else {key: of(part, change) for key, change in changes.items()}


def weights(name: str) -> dict[str, Change]:
    return {
        "without": without(name),
        "extra": lambda content: {**content, "more": torch.ones(3)},
        "mis-shaped": lambda content: {**content, name: torch.ones(4, 1, 3, 5)},
        "no weights": lambda content: {},
    }


# How the content is read from a file, and written.
FORMATS: dict[str, tuple[Callable[[Path], Any], Callable[[Any, Path], Any]]] = {
    ".json": (lambda path: json.loads(path.read_text()), lambda content, path: path.write_text(json.dumps(content))),
    ".yaml": (lambda path: yaml.safe_load(path.read_text()), lambda it, path: path.write_text(yaml.safe_dump(it))),
    ".ckpt": (lambda path: torch.load(path, weights_only=False), torch.save),
    ".safetensors": (load_file, lambda content, path: path.write_bytes(save(content))),
}


def changed(change: Change, path: Path) -> None:
    read, write = FORMATS[path.suffix]
    write(change(read(path)), path)


def changes(*several: dict[str, Change]) -> dict[str, Defect]:
    return {name: partial(changed, change) for each in several for name, change in each.items()}


def named(names: str, path: Path) -> None:
    path.write_bytes(save(load_file(path), {"class_names": names}))


WRONG = (None, -1, 1.5, "text", [1], ["a"], {"a": 1})
MODEL, DATA = "hyper_parameters", "datamodule_hyper_parameters"
OF_LIGHTNING = ("pytorch-lightning_version", "global_step", "loops")
TO_GO_ON = ("callbacks", "optimizer_states", "lr_schedulers")
PRETRAINED, OPENED, RESUMED = (
    ("from_pretrained", "predict --pretrained"),
    ("open_checkpoint", "evaluate"),
    ("train --resume",),
)
GROUPS: list[tuple[str, tuple[str, ...], dict[str, Defect]]] = [
    (CONFIG, PRETRAINED, BROKEN | ABSENT | changes(values("colour", "red"), values("strides", *WRONG))),
    (CONFIG, PRETRAINED, changes(values("num_classes", *WRONG, 4, 10**30), {"lacks": without("conv_channels")})),
    (CONFIG, PRETRAINED, changes({"another network": lambda _: {"conv_channels": 4, "types": 2}})),
    (WEIGHTS, PRETRAINED, BROKEN | ABSENT | changes(weights("convs.0.weight"))),
    (WEIGHTS, PRETRAINED, {f"names {names}": partial(named, names) for names in ("a, b", "3", "[1, 2, 3]")}),
    (WEIGHTS, PRETRAINED, {"header": partial(put, (9).to_bytes(8, "little") + b"not JSON!" + bytes(90))}),
    (WEIGHTS, PRETRAINED[1:], {"too few names": partial(named, '["a"]')}),
    (
        CHECKPOINT,
        (*OPENED, "predict", "validate", *RESUMED, "fit"),
        BROKEN
        | ABSENT
        | changes(
            {"state dict alone": lambda content: content["state_dict"]},
            *(values(key, None, [1], 1.5) for key in ("state_dict", MODEL, DATA, *OF_LIGHTNING)),
            {name: of("state_dict", change) for name, change in weights("model.conv.weight").items()},
            *(values("colour", "red", part=part) for part in (MODEL, DATA)),
        ),
    ),
    (
        CHECKPOINT,
        (*OPENED, "validate"),
        changes(
            *(values(name, *WRONG, part=MODEL) for name in ("model", "num_classes")),
            *(
                values(name, *wrong, part=MODEL)
                for name, wrong in {"class_names": (["a"], 3), "lr": (None, -1, "text")}.items()
            ),
        ),
    ),
    (
        CHECKPOINT,
        (*OPENED, *RESUMED),
        changes(
            values("batch_size", *WRONG[2:], part=DATA),
            values("shift", -1, "text", part=DATA),
            values("hold_out", -1, 2, 0.001, "text", [1], part=DATA),
        ),
    ),
    (CHECKPOINT, (*RESUMED, "fit"), changes(*(values(key, None, 3, [1]) for key in TO_GO_ON))),
    (
        OPTIONS,
        ("fit --config",),
        BROKEN
        | ABSENT
        | changes(
            *(values(group, 3, "text", [1], {1: 2}, {"colour": "red"}) for group in ("model", "data", "trainer")),
            values("lr", *WRONG[:2], *WRONG[3:], part="model"),
            values("data", "text", [1], part="data"),
            values("devices", -1, "text", part="trainer"),
        ),
    ),
    (OPTIONS, RESUMED, BROKEN | changes(values("trainer", 3, "text", [1], {"max_epochs": "text"}))),
    (OPTIONS, ("fit --config", *RESUMED), changes(values("patience", *WRONG[2:]), values("best", 3, "text"))),
    (ARRAYS, ("load", "train --data"), BROKEN),
    (TABLE, ("load table",), BROKEN),
    (PICTURE, ("predict",), BROKEN | ABSENT),
    (RECORD, ("report",), BROKEN | ABSENT),
    (RECORD, ("report",), changes({"lacks": without("rows")}, values("rows", 3, [3]), values("environment", 3, {}))),
]
CASES = [
    pytest.param(file, defect, ENTRIES[entry], id=f"{Path(file).name}, {name}: {entry}")
    for file, entries, defects in GROUPS
    for name, defect in defects.items()
    for entry in entries
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file as it should be, which all entry points read."""
    root = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        numbers = np.random.default_rng(0).integers(0, 256, (30, 8, 8)).astype(np.uint8)
        arrays: dict[str, Any] = {}
        for part in ("train", "val", "test"):
            arrays |= {f"x_{part}": numbers, f"y_{part}": np.arange(30) % 3}
        np.savez(ARRAYS, **arrays)
        EfficientCapsNet(**NET).save_pretrained("net")
        Image.new("L", (8, 8)).save(PICTURE)
        for name in ("b.png", "c.png", "d.png"):
            Image.new("L", (8, 8)).save(name)
        Path(TABLE).write_text("file,label,split\na.png,x,train\nb.png,y,train\nc.png,x,test\nd.png,y,test\n")
        record.save(Path(RECORD), record.environment(torch.device("cpu")), [])
        options = [word for name, value in TINY.items() for word in ("--option", f"{name}={value}")]
        done = run("train", "--data", root / ARRAYS, *options, "--epochs", "1", *CPU[:2], "--out", "run")
        assert done.exit_code == 0, done.output
        shutil.copytree(".", "good")
        for entry in ENTRIES.values():
            if isinstance(entry, tuple):
                assert (result := run(*entry)).exit_code == 0, result.output
            else:
                entry()
    return root / "good"


@contextmanager
def as_nobody() -> Iterator[None]:
    """The superuser may read everything."""
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(NOBODY)
        yield
    finally:
        os.seteuid(user)


@pytest.mark.rows(24)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("file", "defect", "entry"), CASES)
def test_the_sentence(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, defect: Defect, entry: Any
) -> None:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    for each in (tmp_path, tmp_path / "net", tmp_path / "run"):
        each.chmod(0o777)
    monkeypatch.chdir(tmp_path)
    defect(Path(file))
    with as_nobody() if defect is BROKEN["forbidden"] else nullcontext():
        if isinstance(entry, tuple):
            result = run(*entry)
            assert result.exit_code == 1 and not result.stdout, result.output
            said = result.stderr.strip()
        else:
            with pytest.raises((ValueError, TypeError, RuntimeError, OSError)) as error:
                entry()
            said = str(error.value)
            if isinstance(error.value, OSError) and error.value.filename is not None:
                assert error.value.filename in (file, Path(file)) and error.value.errno
                return
    assert said.startswith("capsfast") and "\n" not in said
    # Of the two files of a network either may be wrong.
    place = r"\bnet\b" if file in (CONFIG, WEIGHTS) else re.escape(file)
    assert re.search(place, said)
