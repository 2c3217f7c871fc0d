"""How ``train`` and other commands end if they cannot go on: status, one line, and the files that are left."""

import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("lightning")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from capsfast import train as training
from capsfast.cli.app import app
from capsfast.train.checkpoint import read_checkpoint
from capsfast.train.learner import Learner

from ..support.idx_files import write_set

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--conv-channels", "8", "--primary-groups", "4", "--digit-dim", "4", "--batch-size", "8"]
CPU = ["--accelerator", "cpu", "--no-progress"]


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)


def line_of(result: Any, code: int) -> str:
    """The only line that a command prints, on the error stream."""
    assert result.exit_code == code, result.output
    (line,) = result.stderr.splitlines()
    assert result.output == result.stderr
    return str(line)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images of 8 x 8 for training, 20 for tests: 8 steps an epoch."""
    path = tmp_path_factory.mktemp("images")
    write_set(path, size=8)
    return path


@pytest.fixture(scope="module")
def new_run(images: Path) -> list[str]:
    return ["train", "--data", str(images), *SMALL, *CPU]


@pytest.fixture(scope="module")
def checkpoint(new_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after one epoch. Tests only read it."""
    out = tmp_path_factory.mktemp("run")
    result = run(*new_run, "--epochs", "1", "--out", out)
    assert result.exit_code == 0, result.output
    return out / "last.ckpt"


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a disk that fills up: a file takes its first bytes, then no more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_full_disk_leaves_the_checkpoint_before(checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(checkpoint.parent, tmp_path / "run") / checkpoint.name
    there = names(checkpoint.parent)
    with files_of_at_most(20_000):
        result = run("train", "--resume", checkpoint, "--epochs", "3", *CPU, "--out", checkpoint.parent)
    assert line_of(result, 1).startswith(f"capsfast train: File too large: {checkpoint.parent}")
    assert read_checkpoint(checkpoint)["global_step"] == 8
    assert names(checkpoint.parent) == there
    result = run("train", "--resume", checkpoint, "--epochs", "2", *CPU, "--out", checkpoint.parent)
    assert result.exit_code == 0 and read_checkpoint(checkpoint)["global_step"] == 16


def test_a_disk_too_full_for_the_log(new_run: list[str], tmp_path: Path) -> None:
    with files_of_at_most(3_000):  # config.yaml is smaller
        result = run(*new_run, "--epochs", "1000", "--log-every-n-steps", "1", "--out", tmp_path / "out")
    assert line_of(result, 1).startswith(f"capsfast train: File too large: {tmp_path / 'out'}")


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (["evaluate"], "confusion.png"),
        (["reconstruct"], "reconstructions.png"),
        (["perturb", "--label", "1"], "perturb-1.png"),
        (["routing"], "routing.png"),
    ],
)
def test_a_full_disk_leaves_the_picture_before(checkpoint: Path, tmp_path: Path, command: list[str], file: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / file).write_text("before")
    with files_of_at_most(500):
        result = run(*command, checkpoint, "--out", out)
    assert result.exit_code == 1
    assert result.stderr.split("\n")[-2:] == [f"capsfast {command[0]}: File too large: {out / file}", ""]
    assert (out / file).read_text() == "before" and names(out) == [file]


def test_a_full_disk_leaves_the_numbers_before(checkpoint: Path, tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    options = ["--json", numbers, "--out", tmp_path / "out"]
    assert run("evaluate", checkpoint, *options).exit_code == 0
    before, picture = numbers.read_text(), (tmp_path / "out" / "confusion.png").stat().st_size
    attacks = [part for n in range(picture // 40) for part in ("--fgsm", f"0.{n:03}")]
    with files_of_at_most(picture):
        result = run("evaluate", checkpoint, *attacks, "--attacked", "1", *options)
    assert result.exit_code == 1
    assert result.stderr.split("\n")[-2:] == [f"capsfast evaluate: File too large: {numbers}", ""]
    assert numbers.read_text() == before and ".numbers.part.json" not in names(tmp_path)


@pytest.mark.parametrize("command", ["train", "evaluate", "json", "reconstruct", "perturb", "routing"])
def test_a_folder_that_can_not_be_written_to_ends_before_the_work(
    checkpoint: Path, new_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Below a file not even root can make a folder."""

    def work(*_: Any, **__: Any) -> None:
        raise AssertionError("the work has begun")

    for name in ("fit", "evaluate", "reconstructions", "perturbations", "routing_statistics"):
        monkeypatch.setattr(training, name, work)
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    result = {
        "train": lambda: run(*new_run, "--out", out),
        "json": lambda: run("evaluate", checkpoint, "--json", out / "numbers.json", "--out", tmp_path / "out"),
    }.get(command, lambda: run(command, checkpoint, "--out", out))()
    shown = {"json": "evaluate"}.get(command, command)
    assert line_of(result, 1) == f"capsfast {shown}: Not a directory: {out}"


@pytest.mark.parametrize("command", ["evaluate", "reconstruct", "perturb", "routing"])
def test_ctrl_c_ends_in_one_line(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def ctrl_c(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    for name in ("evaluate", "reconstructions", "perturbations", "routing_statistics"):
        monkeypatch.setattr(training, name, ctrl_c)
    result = run(command, checkpoint, "--out", tmp_path / "out")
    assert result.exit_code == 130
    *before, last = result.stderr.strip().splitlines()
    assert last == f"capsfast {command}: interrupted"
    # Only this command prints its progress.
    assert before == (["[0:00] 0 of 20 done; test images"] if command == "evaluate" else [])
    assert names(tmp_path / "out") == []


def test_ctrl_c_before_training_says_that_there_is_nothing(
    new_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ctrl_c(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Learner, "configure_optimizers", ctrl_c)
    line = line_of(run(*new_run, "--out", tmp_path / "out"), 130)
    assert line == "capsfast train: interrupted at step 0; there is no checkpoint yet"
    line = line_of(run("train", "--resume", tmp_path / "out" / "last.ckpt"), 1)
    assert line.endswith("last.ckpt does not exist; training writes last.ckpt into its folder after every epoch")


def test_sigterm_names_itself_and_the_command_that_goes_on(
    new_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has the options that the checkpoint does not hold, and a folder that needs quotes."""
    original = Learner.training_step

    def step(self: Learner, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch, batch_idx)

    monkeypatch.setattr(Learner, "training_step", step)
    out = tmp_path / "my run"
    options = ["--epochs", "3", "--test-every", "4", "--patience", "50"]
    line = line_of(run(*new_run, *options, "--out", out), 143)
    start, _, command = line.partition("; to go on: ")
    assert start == f"capsfast train: interrupted by SIGTERM at step 11; {out}/last.ckpt holds step 11"
    monkeypatch.undo()
    words = ["train", "--resume", f"{out}/last.ckpt"]
    assert shlex.split(command) == ["python", "-m", "capsfast", *words]
    before = (out / "config.yaml").read_text()
    assert run(*words).exit_code == 0
    assert read_checkpoint(out / "last.ckpt")["global_step"] == 24
    # The resumed run keeps its configuration, also for the next run.
    assert (out / "config.yaml").read_text() == before and "val_check_interval: 4" in before
    assert run(*words, "--epochs", "4").exit_code == 0
    assert read_checkpoint(out / "last.ckpt")["global_step"] == 32


def begun(command: list[str], until: str) -> subprocess.Popen[str]:
    """Starts a command in its own process group, as a terminal does, and waits for a line starting with ``until``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "capsfast", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(until):
            return process
    raise AssertionError(process.communicate()[1])


def group_is_gone(process: subprocess.Popen[str], seconds: float = 30) -> bool:
    """Waits, because the first process may end a moment before the others."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    return False


@pytest.mark.parametrize(
    "more", [["--workers", "2"], pytest.param(["--devices", "2", "--strategy", "ddp"], marks=pytest.mark.slow)]
)
def test_ctrl_c_of_a_terminal_ends_all_processes(images: Path, tmp_path: Path, more: list[str]) -> None:
    """Lines come during the run. The signal goes to all processes, and only the first process reports."""
    options = ["--data", str(images), *SMALL, "--epochs", "100000", "--accelerator", "cpu", "--out", str(tmp_path)]
    process = begun(["train", *options, *more], "step 1/")
    os.killpg(process.pid, signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130, said + errors
    assert "Traceback" not in errors
    (line,) = (line for line in errors.splitlines() if line.startswith("capsfast"))
    step = read_checkpoint(tmp_path / "last.ckpt")["global_step"]
    assert f"interrupted at step {step}; {tmp_path}/last.ckpt holds step {step}; to go on: " in line
    assert group_is_gone(process)
