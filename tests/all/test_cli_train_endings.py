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
import torch

pytest.importorskip("typer")
pytest.importorskip("lightning")
pytest.importorskip("matplotlib")

from capsfast import train as training
from capsfast.train.checkpoint import read_checkpoint
from capsfast.train.learner import Learner

from ..support.commands import done, run

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--conv-channels", "8", "--primary-groups", "4", "--digit-dim", "4", "--batch-size", "8"]
CPU = ["--accelerator", "cpu", "--no-progress"]


def line_of(result: Any, code: int) -> str:
    """The only line that a command prints, on the error stream."""
    assert result.exit_code == code, result.output
    (line,) = result.stderr.splitlines()
    assert result.output == result.stderr
    return str(line)


@pytest.fixture(scope="module")
def new_run(folder: Path) -> list[str]:
    return ["train", "--data", str(folder), *SMALL, *CPU]


@pytest.fixture(scope="module")
def checkpoint(new_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after one epoch. Tests only read it."""
    out = tmp_path_factory.mktemp("run")
    done(*new_run, "--epochs", "1", "--out", out)
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
        result = run("train", "--resume", checkpoint, "--epochs", "3", *CPU)
    assert line_of(result, 1).startswith(f"capsfast train: File too large: {checkpoint.parent}")
    assert read_checkpoint(checkpoint)["global_step"] == 8 and names(checkpoint.parent) == there
    done("train", "--resume", checkpoint, "--epochs", "2", *CPU)
    assert read_checkpoint(checkpoint)["global_step"] == 16


def test_a_full_disk_leaves_the_picture_and_the_numbers_before(checkpoint: Path, tmp_path: Path) -> None:
    picture, numbers = tmp_path / "out" / "confusion.png", tmp_path / "numbers.json"
    words = ["evaluate", checkpoint, "--json", numbers, "--out", tmp_path / "out"]
    done(*words)
    before = numbers.read_text(), picture.read_bytes()
    many = [part for n in range(len(before[1]) // 40) for part in ("--fgsm", f"0.{n:03}")]
    for limit, path, attacks in ((500, picture, ["--fgsm", "0"]), (len(before[1]), numbers, many)):
        with files_of_at_most(limit):
            result = run(*words, *attacks, "--attacked", "1")
        assert result.exit_code == 1
        assert result.stderr.split("\n")[-2:] == [f"capsfast evaluate: File too large: {path}", ""]
    assert (numbers.read_text(), picture.read_bytes()) == before
    assert names(tmp_path) == ["numbers.json", "out"] and names(tmp_path / "out") == ["confusion.png"]


def test_a_folder_that_can_not_be_written_to_ends_before_the_work(
    checkpoint: Path, new_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a file not even root can make a folder."""
    for name in ("fit", "evaluate"):
        monkeypatch.setattr(training, name, None)
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    for words in (["--out", out], ["--json", out / "numbers.json"]):
        assert line_of(run("evaluate", checkpoint, *words), 1) == f"capsfast evaluate: Not a directory: {out}"
    assert line_of(run(*new_run, "--out", out), 1) == f"capsfast train: Not a directory: {out}"


def ctrl_c(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_in_one_line(
    checkpoint: Path, new_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "reconstructions", ctrl_c)
    result = run("reconstruct", checkpoint, "--out", tmp_path / "out")
    assert line_of(result, 130) == "capsfast reconstruct: interrupted" and names(tmp_path / "out") == []
    monkeypatch.setattr(Learner, "configure_optimizers", ctrl_c)
    line = line_of(run(*new_run, "--out", tmp_path / "out"), 130)
    assert line == "capsfast train: interrupted at step 0; there is no checkpoint yet"


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
    words = ["--epochs", "3", "--test-every", "4", "--patience", "50", "--out", out]
    (line,) = run(*new_run, *words).stderr.splitlines()
    start, _, command = line.partition("; to go on: ")
    assert start == f"capsfast train: interrupted by SIGTERM at step 11; {out}/last.ckpt holds step 11"
    monkeypatch.undo()
    python, *resume = shlex.split(command)[2:]
    assert (python, resume) == ("capsfast", ["train", "--resume", f"{out}/last.ckpt"])
    # The resumed run keeps its configuration, and what is given again also counts for the next run.
    for more, steps in (([], 21), (["--epochs", "4"], 28), ([], 28)):
        done(*resume, *more)
        assert read_checkpoint(out / "last.ckpt")["global_step"] == steps
    assert "val_check_interval: 4" in (out / "config.yaml").read_text()
    (out / "config.yaml").write_text("trainer: [")
    assert f"{out / 'config.yaml'} can't be read as the options of a run (" in line_of(run(*resume), 1)


# The machine takes the process away while it writes step.ckpt for the third time.
KILLED = """
import os, signal
from pathlib import Path
from capsfast.cli import main

replace, written = Path.replace, []

def replaced(draft, target):
    written.append(target.name)
    if written.count("step.ckpt") == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(draft, target)

Path.replace = replaced
main()
"""


def test_a_killed_run_goes_on_as_if_nothing_had_happened(new_run: list[str], tmp_path: Path) -> None:
    """SIGKILL leaves the checkpoint of step 10 and a draft. The resumed run ends with the same weights, bit for bit."""
    words = [*new_run, "--epochs", "3", "--checkpoint-every", "5", "--out"]
    out = tmp_path / "killed"
    killed = subprocess.run([sys.executable, "-c", KILLED, *words, str(out)], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (out / ".step.part.ckpt").exists() and read_checkpoint(out / "step.ckpt")["global_step"] == 10
    done("train", "--resume", out / "step.ckpt")
    done(*words, tmp_path / "whole")
    one, other = (read_checkpoint(folder / "last.ckpt") for folder in (out, tmp_path / "whole"))
    assert one["global_step"] == other["global_step"] == 24 and not (out / ".step.part.ckpt").exists()
    assert all(torch.equal(one["state_dict"][name], other["state_dict"][name]) for name in other["state_dict"])


def begun(command: list[str], until: str) -> subprocess.Popen[str]:
    """Starts a command in its own process group, as a terminal does, and waits for a line starting with ``until``."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "capsfast", *command], cwd=ROOT, env=environment, **pipes)
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


def test_ctrl_c_of_a_terminal_ends_all_processes(folder: Path, tmp_path: Path) -> None:
    """Lines come during the run. The signal goes to all processes, and only the first process reports."""
    options = ["--data", str(folder), *SMALL, "--epochs", "100000", "--accelerator", "cpu", "--out", str(tmp_path)]
    process = begun(["train", *options, "--workers", "1", "--devices", "2", "--strategy", "ddp"], "step 1/")
    os.killpg(process.pid, signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130, said + errors
    assert "Traceback" not in errors
    (line,) = (line for line in errors.splitlines() if line.startswith("capsfast"))
    step = read_checkpoint(tmp_path / "last.ckpt")["global_step"]
    assert f"interrupted at step {step}; {tmp_path}/last.ckpt holds step {step}; to go on: " in line
    assert group_is_gone(process)
