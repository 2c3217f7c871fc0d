"""A run that is killed at any moment leaves checkpoints that load, and from which training goes on."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

from capsfast.train.checkpoint import read_checkpoint

from ..support.killed import MOMENTS, TIMES
from ..support.training import assert_same_state, trained

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """One thread, as in the killed process: sums over more threads round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def killed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-m", "tests.support.killed", str(folder), str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return out


def newest(out: Path) -> tuple[int, Path] | None:
    """The newest checkpoint. All checkpoints must load."""
    found = [out / name for name in ("last.ckpt", "step.ckpt") if (out / name).exists()]
    return max(((read_checkpoint(path)["global_step"], path) for path in found), default=None)


def test_killed_at_any_time(killed: Path, folder: Path) -> None:
    for seconds in TIMES:
        out = killed / f"after-{seconds}"
        found = newest(out)
        assert found is not None
        step, path = found
        trained(folder, out, path, epochs=1000, max_steps=step + 1, checkpoint_every=1)
        assert newest(out) == (step + 1, out / "step.ckpt")


@pytest.mark.parametrize(("moment", "call"), [(moment, call) for moment in MOMENTS for call in MOMENTS[moment]])
def test_killed_while_it_writes(killed: Path, folder: Path, whole: Path, moment: str, call: int) -> None:
    """In the middle of a file, before it is renamed, and after. The new file counts once it is renamed."""
    out = killed / f"{moment}-{call}"
    done = call if moment == "renamed" else call - 1
    found = newest(out)
    if done == 0:
        assert found is None and [path.name for path in out.iterdir()] == [".step.part.ckpt"]
        return
    assert found == (done, out / "step.ckpt")
    trained(folder, out, out / "step.ckpt", checkpoint_every=1)
    assert_same_state(whole, out / "last.ckpt")
    # Unfinished files of the killed process are gone.
    assert sorted(path.name for path in out.iterdir()) == ["last.ckpt", "step.ckpt"]
