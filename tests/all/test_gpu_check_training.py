"""Training in benchmarks/gpu_check.py: which networks, what is missing, a rehearsal on the CPU."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from capsfast.cli.app import app

from ..support.gpu_check import outcome, run_step

pytest.importorskip("lightning")


def training(gpu: Any, out: Path, fused: list[str], **options: Any) -> dict[str, Any]:
    plan = gpu("plan").Plan(gpu("runner").Runner(out / "gpu-check", 530, {}), out, "cuda", train=True, **options)
    plan.runner.outcomes += [outcome(gpu, name) for name in ("machine", "build", "limits")]
    plan.runner.outcomes.append(outcome(gpu, "backends", fused=fused))
    return {each.name: each for group in list(plan.groups())[3:] for each in group}


def test_networks_alone_are_trained(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu("plan"), "missing_data", lambda name: "")
    steps = training(gpu, tmp_path, ["cuda"])
    assert list(steps) == [f"training-{name}" for name in gpu("networks").RUNS]
    assert not any(each.why_not for each in steps.values())
    chosen = training(gpu, tmp_path, ["cuda"], only=["training-capsnet-mnist"])
    assert [name for name, each in chosen.items() if not each.why_not] == ["training-capsnet-mnist"]
    assert {each.why_not for each in training(gpu, tmp_path, []).values()} == {"no fused backend for cuda"}


def test_what_is_missing_is_named(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSFAST_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "mnist needs the IDX files" in gpu("plan").missing_data("mnist")
    assert gpu("plan").missing_data("digits") == ""
    monkeypatch.setattr(gpu("plan"), "missing_module", lambda *names: "python has no lightning")
    assert {each.why_not for each in training(gpu, tmp_path, ["cuda"]).values()} == {"python has no lightning"}


def test_commands_are_those_of_capsfast(gpu: Any, tmp_path: Path) -> None:
    """Every option of every run exists."""
    import typer

    train = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    known = {option for parameter in train.params for option in (*parameter.opts, *parameter.secondary_opts)}
    module = gpu("networks")
    for name in module.RUNS:
        words = module.words(name, "cuda", tmp_path, rehearse=False)
        assert words[0] == "train" and {each for each in words if each.startswith("--")} <= known
        assert words[words.index("--accelerator") + 1] == "gpu"


def test_every_run_has_a_network(gpu: Any, tmp_path: Path) -> None:
    """The learner is made as the command makes it, with the words of the run, for small images."""
    import typer

    from capsfast.cli import training as command

    train = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    module = gpu("networks")
    for name, own in module.RUNS.items():
        words = module.words(name, "cpu", tmp_path, rehearse=True)
        learner, images = command._new(train.make_context("train", words[1:]))
        asked = dict(zip(own[::2], own[1::2], strict=True))
        assert learner.hparams["model"] == asked.get("--model", "capsnet")
        assert learner.hparams["loss"] == asked.get("--loss")
        assert learner.hparams["options"].get("routing") == asked.get("--routing")
        assert images.options["data"] == asked["--data"].replace("fashion-mnist", "digits").replace("mnist", "digits")


@pytest.mark.parametrize(("words", "seconds"), [([], 530), (["--train"], 590), (["--train", "--seconds", "7"], 7)])
def test_time_for_everything(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], seconds: float
) -> None:
    found: list[float] = []

    class SeenError(Exception):
        pass

    def runner(folder: Path, seconds: float, about: Any) -> None:
        found.append(seconds)
        raise SeenError

    monkeypatch.setenv("OUT", str(tmp_path))
    gpu("plan")
    check = importlib.import_module("gpu_check")
    monkeypatch.setattr(check, "Runner", runner)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words])
    with pytest.raises(SeenError):
        check.main()
    assert found == [seconds]


@pytest.mark.parametrize("name", ["capsnet-overlapping", "matrix-mnist"])
def test_a_rehearsal(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("PYTHONPATH", gpu("plan").own_environment()["PYTHONPATH"])
    words = ("--device", "cpu", "--run", name, "--out", str(tmp_path), "--rehearse")
    found = run_step(gpu, monkeypatch, "training", tmp_path / "training.json", *words)
    assert found["steps"] == 2 and 0 <= found["results"]["test_accuracy"] <= 1
    assert (tmp_path / "training" / name / "last.ckpt").exists()
