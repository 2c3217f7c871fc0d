"""Ctrl-C and SIGTERM during training: where it ends, what it keeps, and how it resumes."""

import itertools
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import EarlyStopping

from capsfast import train
from capsfast.train import Interrupted, stopping
from capsfast.train.checkpoint import read_checkpoint

from ..support.training import assert_same_state, fitted, learner_and_images, trained


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """However training ends, afterwards the signals have their old handlers."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after == before


def interrupted(folder: Path, out: Path, hook: str, call: int, act: Callable[[], None], **more: Any) -> Interrupted:
    """How training ends if ``act`` is called before the ``call``-th call of a hook of the learner."""
    resume, workers, hold_out = more.pop("resume", None), more.pop("workers", 0), more.pop("hold_out", None)
    learner, images = learner_and_images(folder, workers, hold_out)
    calls, original = itertools.count(1), getattr(learner, hook)

    def watched(*arguments: Any) -> Any:
        if next(calls) == call:
            act()
        return original(*arguments)

    setattr(learner, hook, watched)
    with pytest.raises(Interrupted) as found:
        fitted(out, learner, images, resume, **{"epochs": 2, **more})
    return found.value


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("hook", "call", "step", "test_every"),
    [
        ("training_step", 5, 5, None),
        ("validation_step", 3, 8, None),
        ("validation_step", 2, 3, 3),
        ("on_validation_epoch_end", 1, 9, None),
    ],
)
def test_a_signal_keeps_the_step_and_resumes_bit_for_bit(
    folder: Path, whole: Path, tmp_path: Path, hook: str, call: int, step: int, test_every: int | None
) -> None:
    """Inside steps and tests, inside epochs and at their ends."""
    number = signal.SIGTERM if call == 5 else signal.SIGINT
    end = interrupted(folder, tmp_path, hook, call, send(number), val_check_interval=test_every)
    last = tmp_path / "last.ckpt"
    assert (end.signal, end.step, end.checkpoint, end.checkpoint_step) == (number, step, last, step)
    assert read_checkpoint(last)["global_step"] == step
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    torch.rand(7)  # the random state of the process must not matter
    learner = trained(folder, tmp_path, last, val_check_interval=test_every)
    assert_same_state(whole, last)
    assert learner.tested_at == 16


def test_a_resumed_run_holds_out_the_same_images(folder: Path, tmp_path: Path) -> None:
    """A checkpoint has their share, also if it is the default: 52 images to train on, 7 steps an epoch."""
    best: Any = {"best": ("val_accuracy", "max")}
    trained(folder, tmp_path / "whole", **best)
    assert interrupted(folder, tmp_path, "training_step", 5, send(signal.SIGTERM), **best).step == 5
    last = tmp_path / "last.ckpt"
    held = read_checkpoint(last)["datamodule_hyper_parameters"]
    assert (held["hold_out"], held["seed"]) == (0.1, 3)
    for wrong in (0.0, 0.2):
        with pytest.raises(
            ValueError, match=rf"hold_out and seed must be those of {last}, 0.1 and 3, got {wrong} and 3; give"
        ):
            trained(folder, tmp_path, last, wrong)
    learner, _ = learner_and_images(folder)
    with pytest.raises(ValueError, match=r"0\.1 and 3, got 0\.1 and 4; give the same"):
        fitted(tmp_path, learner, train.ImageData(str(folder), seed=4), last)
    # Not even if the resumed run asks for no validation.
    shutil.copytree(tmp_path, tmp_path / "copy")
    for out, more in ((tmp_path, best), (tmp_path / "copy", {})):
        trained(folder, out, out / "last.ckpt", **more)
        assert_same_state(tmp_path / "whole" / "last.ckpt", out / "last.ckpt", steps=14)


def choice(checkpoint: Path) -> Any:
    """What is known of the best validation."""
    (state,) = [value for name, value in read_checkpoint(checkpoint)["callbacks"].items() if name.startswith("Best")]
    return state["best_model_score"], state["monitor"]


@pytest.mark.parametrize(("hook", "call"), [("training_step", 7), ("validation_step", 1)])
def test_a_signal_loses_no_validation_that_best_checkpoints_depend_on(
    folder: Path, tmp_path: Path, hook: str, call: int
) -> None:
    """In the last step of an epoch, and in its validation. Its result decides in the resumed run too."""
    best: Any = {"best": ("val_accuracy", "max"), "callbacks": [EarlyStopping("val_accuracy", mode="max", patience=9)]}
    trained(folder, tmp_path / "whole", **best)
    out = tmp_path / "out"
    assert interrupted(folder, out, hook, call, send(signal.SIGTERM), **best).step == 7
    once = choice(out / "last.ckpt")
    assert once[0] is not None and (out / "best.ckpt").exists()
    trained(folder, out, out / "last.ckpt", **best)
    assert_same_state(tmp_path / "whole" / "last.ckpt", out / "last.ckpt", steps=14)
    assert choice(out / "last.ckpt") == choice(tmp_path / "whole" / "last.ckpt")


def twice() -> None:
    send(signal.SIGINT)()
    send(signal.SIGINT)()


def test_a_second_ctrl_c_ends_at_once_with_the_checkpoint_before(
    folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The terminal sends the signal to all processes, and launchers pass it on once more: that is one Ctrl-C.
    assert interrupted(folder, tmp_path / "a", "training_step", 6, twice).checkpoint_step == 6
    monkeypatch.setattr(stopping, "AT_ONCE_AFTER", -1.0)
    end = interrupted(folder, tmp_path, "training_step", 6, twice, checkpoint_every=4)
    assert (end.step, end.checkpoint, end.checkpoint_step) == (5, tmp_path / "step.ckpt", 4)
    assert not (tmp_path / "last.ckpt").exists()
    # A resumed run that ends before its own first checkpoint still has the checkpoint of the run before.
    again = interrupted(folder, tmp_path / "b", "training_step", 2, twice, resume=end.checkpoint)
    assert (again.step, again.checkpoint, again.checkpoint_step) == (5, tmp_path / "step.ckpt", 4)
    trained(folder, tmp_path, again.checkpoint)
    assert_same_state(whole, tmp_path / "last.ckpt")


def test_an_interrupted_test_of_the_end_is_an_interruption(folder: Path, tmp_path: Path) -> None:
    """The test after ``max_steps`` runs outside training, with other signal handlers."""
    for number, hook in itertools.product((signal.SIGINT, signal.SIGTERM), ("validation_step", "test_step")):
        out, share = tmp_path / f"{number}{hook}", 0.2 if hook == "test_step" else None
        end = interrupted(folder, out, hook, 1, send(number), max_steps=5, hold_out=share)
        assert (end.signal, end.step, end.checkpoint, end.checkpoint_step) == (number, 5, out / "last.ckpt", 5)


def test_a_process_told_to_ignore_ctrl_c_does(folder: Path, whole: Path, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        learner, images = learner_and_images(folder)
        learner.on_train_epoch_end = send(signal.SIGINT)  # type: ignore[method-assign]
        fitted(tmp_path, learner, images, epochs=2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert_same_state(whole, tmp_path / "last.ckpt")


def test_workers_live_through_ctrl_c_and_end_with_training(folder: Path, whole: Path, tmp_path: Path) -> None:
    """A terminal sends the signal to all processes."""
    seen = []

    def to_all() -> None:
        workers = multiprocessing.active_children()
        seen.extend(workers)
        for pid in [worker.pid for worker in workers] + [os.getpid()]:
            assert pid is not None
            os.kill(pid, signal.SIGINT)

    end = interrupted(folder, tmp_path, "training_step", 3, to_all, workers=2)
    assert end.checkpoint_step == 3
    assert len(seen) >= 2 and not any(each.is_alive() for each in seen)
    trained(folder, tmp_path, tmp_path / "last.ckpt")
    assert_same_state(whole, tmp_path / "last.ckpt")
