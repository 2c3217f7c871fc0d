"""Classes of pixels: targets, losses, overlap, and training from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

pytest.importorskip("lightning")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")

import numpy as np
from PIL import Image

import capsfast
from capsfast import train
from capsfast.data import Batch, open_sets
from capsfast.plot import class_colours
from capsfast.train import ImageData, Learner, SegmentationLearner, pixel_classes
from capsfast.train.run import quiet
from capsfast.train.segmentation import Overlap

from ..support.commands import done, failed, options, record_in, trained

TINY: dict[str, Any] = {"conv_channels": 3, "types": 2, "dims": (2, 3), "digit_dim": 4, "kernel_size": 3}


def test_classes_of_pixels_are_those_of_the_bright_parts() -> None:
    parts = torch.zeros(1, 2, 2, 2, 3)  # two colours
    parts[0, 0, :, 0, 0] = 1.0
    parts[0, 0, :, 0, 1] = torch.tensor([0.3, 0.7])  # 0.5 in the mean
    parts[0, 1, :, 0, 1] = 0.6
    parts[0, 1, :, 1, 2] = 0.4
    batch = Batch(parts.sum(1).clamp(max=1), torch.tensor([[3, 1]]), parts)
    classes = pixel_classes(batch, 4)
    assert classes.dtype == torch.bool and classes.shape == (1, 4, 2, 3)
    assert classes.nonzero().tolist() == [[0, 1, 0, 1], [0, 3, 0, 0], [0, 3, 0, 1]]
    alone = Batch(parts[:, 0], torch.tensor([2]))
    assert pixel_classes(alone, 4).nonzero().tolist() == [[0, 2, 0, 0], [0, 2, 0, 1]]
    assert pixel_classes(Batch(alone.images[:0], alone.labels[:0]), 4).shape == (0, 4, 2, 3)


def mean_overlap(found: torch.Tensor, classes: torch.Tensor) -> float:
    """The mean overlap of bool ``[B, J, H, W]``, class by class."""
    both, either = ((found & classes).sum((0, 2, 3)), (found | classes).sum((0, 2, 3)))
    return float((both[either > 0] / either[either > 0]).mean())


def test_overlap_is_the_mean_of_the_classes_that_occur() -> None:
    found, classes = torch.rand(2, 6, 4, 5, 6) > 0.5
    found[:, 2] = classes[:, 2] = False  # a class that occurs nowhere and is not found
    metric = Overlap(4, average="none")
    for rows in (slice(0, 4), slice(4, 6)):
        metric.update(found[rows].long(), classes[rows].long())
    assert float(metric.compute()) == pytest.approx(mean_overlap(found, classes))


@pytest.mark.parametrize("reconstruction", [True, False])
@pytest.mark.parametrize("kind", ["", "multi:"])
def test_losses(folder: Path, kind: str, reconstruction: bool) -> None:
    sets = open_sets(f"{kind}{folder}")
    learner = Learner("segcaps", **sets.sizes, options=TINY | {"reconstruction": reconstruction})
    assert isinstance(learner, SegmentationLearner) and not learner.has_classes
    batch = sets.train.batch(torch.arange(5))
    found, output = learner.measured(batch)
    classes = pixel_classes(batch, 4)
    lengths = learner.model(batch.images, classes).lengths
    torch.testing.assert_close(lengths, output.lengths)
    there = classes.float()
    margin = there * (0.9 - lengths).clamp_min(0) ** 2 + 0.25 * (1 - there) * (lengths - 0.1).clamp_min(0) ** 2
    torch.testing.assert_close(found["margin"], margin.sum(1).mean())
    error = torch.zeros(())
    assert ("reconstruction" in found) == reconstruction
    if reconstruction:
        error = (output.reconstruction - batch.images * there.amax(1, keepdim=True)).square().sum((1, 2, 3)).mean()
        torch.testing.assert_close(found["reconstruction"], error)
    torch.testing.assert_close(found["loss"], found["margin"] + 0.0005 * error)


def test_a_test_is_of_all_images_together(folder: Path, tmp_path: Path) -> None:
    images = ImageData(f"multi:{folder}", batch_size=7)
    learner = Learner("segcaps", **images.sets.sizes, options=TINY)
    with torch.no_grad():
        learner.model.classes.conv.weight *= 3
    trainer = train.make_trainer(tmp_path, epochs=1, accelerator="cpu", devices=1, progress=False, logger=False)
    with quiet():
        (found,) = trainer.validate(learner, datamodule=images, verbose=False)
    batch = images.sets.test.batch(torch.arange(20))
    with torch.no_grad():
        parts, output = learner.measured(batch)
    lengths = output.lengths
    classes = pixel_classes(batch, 4)
    assert found["test_iou"] == pytest.approx(mean_overlap(lengths > 0.5, classes)) and found["test_iou"] > 0
    right = ((lengths > 0.5) == classes).all(1).float().mean()
    assert found["test_pixels"] == pytest.approx(float(right)) and 0 < right < 1
    assert found["test_margin"] == pytest.approx(float(parts["margin"]), rel=1e-5)
    assert found["test_reconstruction"] == pytest.approx(float(parts["reconstruction"]), rel=1e-5)
    wanted = {name.removeprefix("test_"): value for name, value in found.items()}
    for batch_size in (20, 6):  # the second call begins anew
        assert train.metrics(learner, images.sets.test, batch_size=batch_size) == pytest.approx(wanted, rel=1e-5)
    assert train.metrics(learner, images.sets.test, limit=1)["pixels"] != pytest.approx(wanted["pixels"])


def test_from_the_command_line(folder: Path, tmp_path: Path) -> None:
    """Trains, writes a record, resumes from the checkpoint, and draws. Commands that need classes of images say so."""
    out, last, pictures = tmp_path / "out", tmp_path / "out" / "last.ckpt", tmp_path / "out" / "pictures"
    model = ["--model", "segcaps", "--data", f"multi:{folder}", "--conv-channels", 8, "--types", 2, "--digit-dim", 4]
    model += [*options(dims=[4, 4], kernel_size=3), "--batch-size", 20, "--accelerator", "cpu"]
    said = done("train", *model, "--lr", 0.01, "--epochs", 6, "--best", "--out", out)
    assert "val iou" in said and "test iou" in said and (out / "curve.png").is_file()
    record = record_in(out)
    assert set(record["results"]) == {"test_margin", "test_reconstruction", "test_iou", "test_pixels"}
    margin, overlap = (record["curve"][name] for name in ("val_margin", "val_iou"))
    assert record["best"]["val_iou"] == pytest.approx(max(value for _, value in overlap), rel=1e-4)
    assert margin[-1][1] < margin[0][1]
    done("train", "--resume", last, "--epochs", 7, "--out", out, "--accelerator", "cpu")
    learner, images = train.open_checkpoint(last)
    assert isinstance(learner, SegmentationLearner)
    done("reconstruct", last, "--out", pictures)
    rows = train.segmented(learner, images.sets.test.batch(torch.arange(3)))
    assert list(rows) == ["image", "classes", "predicted", "reconstruction"]
    assert rows["classes"].shape == rows["predicted"].shape == (3, 3, 12, 12)
    for command in ("perturb", "routing", "picture"):
        message = failed(command, last, "--out", pictures)
        assert "for segcaps use evaluate or predict or reconstruct" in message
    assert [path.name for path in pictures.iterdir()] == ["reconstructions.png"]
    assert "leave out --fgsm and --pgd" in failed("evaluate", last, "--fgsm", "0.1")
    assert "test images: margin " in done("evaluate", last)
    found = json.loads((out / "evaluate-1" / "evaluate.json").read_text())["test images"]
    assert found.pop("images") == 20
    tested = record_in(out)["results"]
    assert {name.partition("_")[2]: value for name, value in tested.items()} == pytest.approx(found, rel=1e-4)


def test_predicted_classes_of_pixels(folder: Path, tmp_path: Path) -> None:
    """A PNG for each picture, with the pictures' own folders, and the share of pixels of each class."""
    words = ["--model", "segcaps", "--data", folder, "--max-steps", "1", *options(**TINY | {"dims": [2, 3]})]
    last = trained(tmp_path / "run", *words, "--accelerator", "cpu")
    learner, images = train.open_checkpoint(last)
    with torch.no_grad():
        learner.model.classes.conv.weight *= 3
        learner.model.classes.conv.weight[: TINY["digit_dim"]] = 0  # class 0 nowhere
    torch.save(torch.load(last) | {"state_dict": learner.state_dict()}, last)
    pixels = (255 * images.sets.test.batch(torch.arange(3)).images).round()
    files = [tmp_path / "p" / name for name in ("a/1.png", "b/1.png", "b/1.bmp")]
    for path, image in zip(files, pixels, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].byte().numpy()).save(path)
    done("predict", tmp_path / "p", "--checkpoint", last, "--json", tmp_path / "found.json")
    with torch.no_grad():
        there = learner.output(pixels / 255).lengths > 0.5
    assert there.any() and not there.all()
    found = {load["file"]: load for load in json.loads((tmp_path / "found.json").read_text())}
    for path, classes in zip(files, there, strict=True):
        shares = classes.float().mean((1, 2))
        assert [*found[str(path)]["lengths"].values()] == pytest.approx(shares.tolist())
        assert found[str(path)]["class"] == (str(int(shares.argmax())) if classes.any() else None)
        drawn = Image.open(tmp_path / "run" / "predict-1" / "classes" / f"{path.relative_to(tmp_path / 'p')}.png")
        wanted = (255 * class_colours(classes[None])[0]).round().byte().permute(1, 2, 0)
        assert (torch.from_numpy(np.array(drawn)).int() - wanted.int()).abs().max() <= 1


def test_pictures_of_a_network_on_a_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images come from the CPU and go back there. Meta tensors stand for tensors on a GPU."""
    sets, gpu = open_sets(f"multi:{folder}"), torch.device("cuda:0")
    learner = Learner("segcaps", **sets.sizes, options=TINY)
    assert isinstance(learner, SegmentationLearner)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for module in learner.modules():
        for name, value in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(FakeTensor(mode, value.data.to("meta"), gpu)))
    monkeypatch.setattr(SegmentationLearner, "device", gpu)
    batch = sets.test.batch(torch.arange(3))
    with mode, capsfast.use_backend("reference"):
        rows = train.segmented(learner, batch)
    assert list(rows) == ["image", "classes", "predicted", "reconstruction"]
    assert {row.device.type for row in rows.values()} == {"cpu"}


def test_colours_of_classes() -> None:
    classes = torch.zeros(1, 3, 1, 4, dtype=torch.bool)
    classes[0, 0, 0, :2] = True
    classes[0, 2, 0, 1:3] = True
    colours = class_colours(classes)[0, :, 0].T  # a row for each pixel
    assert not colours[3].any() and not torch.equal(colours[0], colours[2])
    torch.testing.assert_close(colours[1], (colours[0] + colours[2]) / 2)
    many = class_colours(torch.eye(12, dtype=torch.bool)[None, :, None])[0, :, 0].T
    assert len(torch.unique(many, dim=0)) == 12


def test_documented_results_are_recorded() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    record, text = (
        json.loads((docs / "records" / "segcaps-digits.json").read_text()),
        (docs / "training.md").read_text(),
    )
    iou, pixels = (f"{record['results'][name]:.2%}".replace("%", " %") for name in ("test_iou", "test_pixels"))
    assert f"ten digits is {iou}" in text and f"{pixels} of the test\npixels" in text and record["command"] in text
    assert abs(record["seconds"] - 1362) < 1 and "took 1362 s" in text
