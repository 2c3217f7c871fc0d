"""The progress of training, with and without a terminal."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from capsfast import backends
from capsfast.data import Batch
from capsfast.train import Learner, run
from capsfast.train.progress import Guessing, Lines, Table

from ..support.idx_files import write_set
from ..support.training import trained
from .test_networks import SMALL

START = (
    r"capsnet \(conv_channels=6, primary_groups=2, primary_dim=4, digit_dim=5\): [\d ]+ parameters, 18 input capsules; "
    rf"device cpu, backend {'cpp' if backends()['cpp'].available else 'reference'}; images: 60 train, 20 test"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_set(tmp_path / "images", size=10)
    return tmp_path / "images"


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[tuple[int, int, str]]:
    """Step, epoch and text of each line after the first."""
    start, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(START, start), start
    found = [re.fullmatch(r"step (\d+)/16, epoch (\d)/2: (.*)", line) for line in lines]
    return [(int(each[1]), int(each[2]), each[3]) for each in found if each]


def test_lines_of_steps_tests_and_checkpoints(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "table_or_lines", lambda: Lines(steps=3, seconds=0))
    out = tmp_path / "out"
    trained(folder, out, progress=True, checkpoint_every=10)
    found = lines_of(capsys)
    steps = [(step, epoch) for step, epoch, text in found if "elapsed" in text]
    assert steps == [(1, 1), (4, 1), (7, 1), (10, 2), (13, 2), (16, 2)]
    number = r"[\d.e+-]+"
    line = rf"loss {number}, margin {number}, reconstruction {number}, \d+ images/s, 0:00:\d\d elapsed, 0:00:\d\d left"
    assert re.fullmatch(line, next(text for step, _, text in found if step == 4))
    tests = [step for step, _, text in found if re.search("test accuracy .*, test margin .*, test recon", text)]
    assert tests == [8, 16]
    wrote = [(step, text) for step, _, text in found if text.startswith("wrote")]
    assert wrote == [(8, f"wrote {out}/last.ckpt"), (10, f"wrote {out}/step.ckpt"), (16, f"wrote {out}/last.ckpt")]


def test_a_terminal_keeps_a_row_for_each_epoch(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A head and a row for each epoch; the losses are means of the epoch. 100 columns are enough."""
    monkeypatch.setattr(run, "table_or_lines", Table)
    for name, value in {"COLUMNS": "100", "FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    losses: list[Any] = []
    step = Learner.training_step
    monkeypatch.setattr(Learner, "training_step", lambda *it: losses.append(loss := step(*it)) or loss)
    trained(folder, tmp_path / "one", progress=True)
    plain = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    lines = re.sub(r"\r|\x1b\[[\d?]*[A-Za-z]", "\n", plain).splitlines()
    rows = [line.split() for line in lines if re.match(r" +\d/2 ", line)]
    assert max(map(len, lines)) <= 100 and [row[:2] for row in rows] == [["1/2", "8"], ["2/2", "16"]]
    (head,) = (line.split() for line in lines if line.split()[:2] == ["epoch", "step"])
    assert {"loss", "margin", "reconstruction", "accuracy", "images/s", "time"} <= {*head}
    for row, mean in zip(rows, (sum(losses[:8]) / 8, sum(losses[8:]) / 8), strict=True):
        assert float(row[2]) == pytest.approx(float(mean), rel=1e-3)


def test_the_table_needs_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    assert type(run.table_or_lines()) is Lines
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert type(run.table_or_lines()) is Table


@pytest.mark.parametrize(
    "name", ["capsnet", "deepcaps", "matrixcapsnet", "efficientcapsnet", "invertedattention", "cnn"]
)
def test_the_diagnosis_of_guessing_leaves_training_as_it_was(name: str) -> None:
    learner = Learner(name, 1, 10, 4, options=SMALL[name])
    guessing, batch = Guessing(), Batch(torch.rand(8, 1, 10, 10), torch.arange(8) % 4)
    guessing.on_train_batch_end(SimpleNamespace(), learner, None, batch, 0)  # type: ignore[arg-type]
    learner.train().measured(batch)[0]["loss"].backward()
    if name in ("capsnet", "deepcaps"):
        with torch.no_grad():
            learner.model.routing.W.mul_(1e4)

    def state() -> list[Any]:
        tensors = [*learner.parameters(), *learner.buffers(), *(parameter.grad for parameter in learner.parameters())]
        copies = [None if tensor is None else tensor.clone() for tensor in tensors]
        return [torch.get_rng_state(), *copies, *(module.training for module in learner.modules())]

    before = state()
    with torch.inference_mode():  # as a test runs
        found = guessing._finding(SimpleNamespace(is_global_zero=True), learner)  # type: ignore[arg-type]
        other_rank = guessing._finding(SimpleNamespace(is_global_zero=False), learner)  # type: ignore[arg-type]
    for old, new in zip(before, state(), strict=True):
        assert torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new
    assert other_rank is None
    assert (found is not None and found.name == "saturated") if name in ("capsnet", "deepcaps") else found is None
