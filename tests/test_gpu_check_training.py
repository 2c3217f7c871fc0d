"""Training in benchmarks/gpu_check.py: which networks, what is missing, a rehearsal on the CPU."""

from pathlib import Path
from typing import Any

import pytest

from capsfast.cli.app import app

from .support.gpu_check import outcome, run_step

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


def test_a_rehearsal(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", gpu("plan").own_environment()["PYTHONPATH"])
    words = ("--device", "cpu", "--run", "capsnet-mnist", "--out", str(tmp_path), "--rehearse")
    found = run_step(gpu, monkeypatch, "training", tmp_path / "training.json", *words)
    assert found["steps"] == 2 and 0 <= found["results"]["test_accuracy"] <= 1
    assert (tmp_path / "training" / "capsnet-mnist" / "last.ckpt").exists()
