"""The commands that inspect a checkpoint of ``python -m capsfast train``."""

import csv
import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("lightning")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
pytest.importorskip("PIL")

from PIL import Image, ImageDraw

from capsfast import train
from capsfast.train import stacked

from ..support.commands import CAPSNET, SMALL, done, failed, is_png, options, record_in, run, trained
from ..support.idx_files import write_set


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after two epochs on the digits."""
    return trained(tmp_path_factory.mktemp("digits"), *CAPSNET, epochs=2)


def test_evaluate_under_attack(digits: Path, tmp_path: Path) -> None:
    attacks = ["--fgsm", "0.1", "--fgsm", "0", "--pgd", "0.1", "--pgd-steps", "3", "--attacked", "50"]
    said = done("evaluate", digits, *attacks, "--out", tmp_path, "--json", tmp_path / "e.json")
    assert is_png(tmp_path / "confusion.png") and str(tmp_path / "confusion.png") in said and "FGSM, eps 0.1: " in said
    found = json.loads((tmp_path / "e.json").read_text())
    recorded = record_in(digits.parent)["results"]["test_accuracy"]
    assert found["test images"]["right"] / 360 == pytest.approx(recorded, abs=1e-6)
    assert all(value["images"] == 50 for name, value in found.items() if name != "test images")
    none, weak, strong = (found[name]["right"] for name in ("FGSM, eps 0", "FGSM, eps 0.1", "PGD, eps 0.1, 3 steps"))
    assert strong <= weak + 2 < none


def test_pictures(digits: Path, tmp_path: Path) -> None:
    """Each result has a new folder beside the checkpoint, which a command that is refused leaves to the next."""
    checkpoint = Path(shutil.copy(digits, tmp_path))
    for words, out, files in (
        ("reconstruct", "reconstruct-1", "reconstructions.png"),
        ("perturb --label 3 --label 8", "perturb-1", "perturb-3.png perturb-8.png"),
        ("routing --limit 100", "routing-1", "routing.png"),
        ("picture --count 3", "picture-1", "predictions.png"),
        ("picture --wrong --count 2", "picture-2", "wrong.png"),
    ):
        command, *more = words.split()
        said = done(command, checkpoint, *more)
        assert sorted(path.name for path in (tmp_path / out).iterdir()) == files.split()
        assert all(is_png(tmp_path / out / file) for file in files.split())
        assert all(f"wrote {tmp_path}/{out}/{file}\n" in said for file in files.split())
        assert ("iteration 1: coupling entropy 1.0000" in said) == (command == "routing")
    before = sorted(tmp_path.iterdir())
    message = failed("perturb", checkpoint, "--label", "11")
    assert "label must be one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, got 11" in message
    assert failed("picture", tmp_path / "no" / "no.ckpt") and sorted(tmp_path.iterdir()) == before
    (tmp_path / "file").touch()
    assert failed("picture", checkpoint, "--out", tmp_path / "file").startswith("capsfast picture: ")
    message = failed("picture", checkpoint, "--accelerator", "abacus", "--out", tmp_path)
    assert message.startswith("capsfast: --accelerator abacus: ")


DEEPCAPS = ["--model", "deepcaps", "--types", "3", *SMALL]
CNN = ["--model", "cnn", *options(channels=[4, 4], hidden=[8]), "--accelerator", "cpu"]
ALL = "reconstruct, perturb --label 0, routing --limit 40, evaluate"


@pytest.mark.parametrize(
    ("kind", "arguments", "commands", "pictures"),
    [
        ("", DEEPCAPS, ALL, "confusion perturb-0 reconstructions routing"),
        ("multi:", CAPSNET, ALL, "perturb-0 reconstructions routing"),
        ("affine:", CNN, "evaluate --fgsm 0.1, picture", "confusion predictions"),
    ],
    ids=["deepcaps", "multi", "cnn"],
)
def test_other_models_and_data(
    folder: Path, tmp_path: Path, kind: str, arguments: list[str], commands: str, pictures: str
) -> None:
    checkpoint = trained(tmp_path, "--data", f"{kind}{folder}", *arguments)
    for command, *words in map(str.split, commands.split(", ")):
        done(command, checkpoint, *words)
    written = [*tmp_path.glob("*-1/*.png")]
    assert sorted(path.stem for path in written) == pictures.split() and all(map(is_png, written))


def test_idx_folder_from_training_to_other_data(folder: Path, tmp_path: Path) -> None:
    write_set(tmp_path / "data" / "mnist", end=".gz", size=10)
    checkpoint = trained(tmp_path / "out", "--data", folder, *CAPSNET)
    said = done("evaluate", checkpoint, "--data", "mnist", "--data-dir", tmp_path / "data", "--out", tmp_path)
    assert "of 20 right" in said
    message = failed("evaluate", checkpoint, "--data", "digits")
    assert "needs {'in_channels': 1, 'image_size': 10, 'num_classes': 4}, digits has" in message


def test_a_folder_of_pictures_trained_evaluated_and_predicted(tmp_path: Path) -> None:
    """40 PNG files of two classes, dark and light. The network knows these names."""
    pictures, split = tmp_path / "pictures", tmp_path / "split"
    for n, name in enumerate(["light", "dark"] * 20):
        pixels = torch.randint(0, 80, (14, 10)) + (0 if n % 2 else 170)
        (pictures / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.byte().numpy()).save(pictures / name / f"{n}.png")
    checkpoint = trained(tmp_path / "out", "--image-size", "8", "--data", pictures, *CAPSNET, epochs=20)
    out = ["--out", tmp_path / "e"]
    assert "100.00% of 8 right" in done("evaluate", checkpoint, *out)
    files = [pictures / "dark" / "1.png", pictures / "light" / "2.png"]
    dark, light, _ = done("predict", *files, "--checkpoint", checkpoint, *out).splitlines()
    assert dark.startswith(f"{files[0]}: dark 0.") and light.startswith(f"{files[1]}: light 0.")
    assert is_png(tmp_path / "e" / "predictions.png")
    for part in ("Train", "valid"):
        shutil.copytree(pictures, split / part)
    said = done("evaluate", checkpoint, "--data", split, *out)
    uses = f"to train on: {split}/Train; images for validation: {split}/valid; images for tests: {split}/valid\n"
    assert f"images {uses}" in said and " of 40 right" in said
    said = failed("evaluate", checkpoint, "--data", split / "Train" / "dark")  # not a fault of the checkpoint
    assert said.endswith(f"{split}/Train/dark must have a sub-folder of pictures for each class, got none")
    (pictures / "dark").rename(pictures / "black")
    assert "knows the classes dark, light" in failed("evaluate", checkpoint, "--data", pictures, *out)
    message = failed("test", "--ckpt_path", checkpoint, "--data.data", pictures)
    assert f"{checkpoint} knows the classes dark, light, " in message and message.endswith("has black, light")
    message = failed("test", "--ckpt_path", checkpoint, "--data.data=digits", "--data.image_size=8")
    assert message.endswith("'num_classes': 2}, digits has {'in_channels': 1, 'image_size': 8, 'num_classes': 10}")
    Image.new("F", (8, 8), 0.5).save(tmp_path / "float.tiff")
    message = failed("predict", tmp_path / "float.tiff", "--checkpoint", checkpoint)
    assert "float.tiff must have 8 or 16 bits, or colours, got PIL's mode F" in message


def test_folders_of_pictures_are_classified_in_batches(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """25 pictures at several depths, one of them given twice, and two that are none. At most four are in memory."""
    learner, images = train.open_checkpoint(digits)
    pixels = images.sets.test.batch(torch.arange(25)).images
    paths = [tmp_path / "p" / ("a" if n < 12 else "b/c") / f"{n:02}.png" for n in range(25)]
    for path, image in zip(paths, pixels, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 * image[0]).round().byte().numpy()).save(path)
    bad = [tmp_path / "p" / "a" / "bad.png", tmp_path / "p" / "b" / "empty.jpg"]
    for path in (*bad, tmp_path / "p" / ".hidden.png", tmp_path / "p" / "notes.txt"):
        path.write_text("no picture")
    (tmp_path / "p" / "b" / "again").symlink_to(tmp_path / "p")  # a circle
    sizes: list[int] = []
    original = train.classified
    monkeypatch.setattr(train, "classified", lambda *it: sizes.append(len(it[1])) or original(*it))
    table, numbers = tmp_path / "found.csv", tmp_path / "found.json"
    words = ["--checkpoint", digits, "--batch-size", "4", "--accelerator", "cpu"]
    result = run(
        "predict", tmp_path / "p", paths[3], *words, "--csv", table, "--json", numbers, "--out", tmp_path / "o"
    )
    assert result.exit_code == 1 and max(sizes) == 4 and sum(sizes) == 25
    said = result.stderr.splitlines()
    assert all(f"{path} can't be read as a picture" in line for path, line in zip(bad, said, strict=True))
    assert str(paths[3]) not in result.stdout
    assert is_png(tmp_path / "o" / "predictions.png")
    with torch.no_grad():
        wanted = learner.classify((255 * pixels).round() / 255).activations
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = json.loads(numbers.read_text())
    assert [row["file"] for row in rows] == [each["file"] for each in found] == [str(path) for path in paths]
    assert [row["class"] for row in rows] == [each["class"] for each in found] == [*map(str, wanted.argmax(1).tolist())]
    for lengths in (
        [[float(row[str(j)]) for j in range(10)] for row in rows],
        [[*each["lengths"].values()] for each in found],
    ):
        torch.testing.assert_close(torch.tensor(lengths), wanted)
    lines = run("predict", *paths[:2], *words, "--out", tmp_path / "o").stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == [str(path) for path in paths[:2]]
    (tmp_path / "nothing").mkdir()
    assert failed("predict", tmp_path / "nothing", *words).endswith("must hold pictures, got a folder without any")
    assert failed("predict", paths[0], "no.png", *words) == "capsfast predict: No such file or directory: no.png"


def test_a_network_without_labels(tmp_path: Path, digits: Path) -> None:
    sizes = options(num_parts=4, num_objects=6, template_size=5, dim=8, hidden=16)
    words = ["--conv-channels", "8", "--batch-size", "64", "--accelerator", "cpu", "--max-steps", "3"]
    checkpoint = trained(tmp_path / "out", "--model", "stacked", *words, *sizes)
    assert record_in(tmp_path / "out")["results"].keys() >= {"test_image", "test_parts", "test_reconstruction"}
    said = done("clusters", checkpoint, "--images", "100")
    found = json.loads((tmp_path / "out" / "clusters-1" / "clusters.json").read_text())
    assert found["images"] == 360 and found["clustered"] == 100 and 0.1 <= found["accuracy"] <= 1
    assert f"{found['accuracy']:.2%} of 360 right, by 10 clusters of 100 images" in said
    done("reconstruct", checkpoint, "--out", tmp_path / "pictures")
    assert is_png(tmp_path / "pictures" / "reconstructions.png")
    assert "a network of --model stacked is needed, got capsnet" in failed("clusters", digits)
    message = "a network that classifies images is needed, got stacked; for stacked use clusters or reconstruct"
    for command in (["evaluate", checkpoint], ["predict", __file__, "--checkpoint", checkpoint]):
        assert failed(*command) == f"capsfast {command[0]}: {message}"


def test_clusters_are_those_of_images_without_augmentation(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--model", "stacked", *SMALL[:2], *SMALL[4:], "--max-steps", "1", "--limit-val-batches", "0"]
    words += options(num_parts=2, num_objects=4, template_size=5, dim=4, hidden=8)
    moved = ["--crop", "6", "--crop-padding", "1", "--contrast", "0.5"]
    checkpoint = trained(tmp_path / "out", "--data", folder, *words, *moved)
    _, images = train.open_checkpoint(checkpoint)
    seen: list[Any] = []

    def presences(learner: Any, dataset: Any, limit: int | None = None) -> tuple[Any, Any]:
        batch = dataset.batch(torch.arange(len(dataset)))
        seen.append(batch.images)
        return batch.images.flatten(1), batch.labels

    monkeypatch.setattr(stacked, "object_presences", presences)
    done("clusters", checkpoint)
    wanted = [torch.stack([each.source[n] for n in range(len(each))])[:, :, 2:8, 2:8] for each in images.sets[:3:2]]
    torch.testing.assert_close(seen, wanted)
    multi = trained(tmp_path / "multi", "--data", f"multi:{folder}", *words)
    assert failed("clusters", multi) == "capsfast.train.clustered: images of one class each are needed, these overlap"


def test_the_documented_command_learns(tmp_path: Path) -> None:
    """Few classes and many input capsules: with a deviation of 0.1 the class capsules saturate in the first step."""
    numbers = random.Random(0)
    for kind, n in itertools.product(("disc", "cross", "frame"), range(100)):
        image = Image.new("RGB", (32, 32), tuple(numbers.randrange(60) for _ in range(3)))
        pen, color = ImageDraw.Draw(image), tuple(numbers.randrange(120, 256) for _ in range(3))
        r = numbers.randrange(6, 11)
        x, y = numbers.randrange(r + 1, 31 - r), numbers.randrange(r + 1, 31 - r)
        if kind == "cross":
            pen.line((x - r, y, x + r, y), color, 3)
            pen.line((x, y - r, x, y + r), color, 3)
        else:
            drawn = pen.ellipse if kind == "disc" else pen.rectangle
            drawn((x - r, y - r, x + r, y + r), color if kind == "disc" else None, color, 3)
        (tmp_path / "pictures" / kind).mkdir(parents=True, exist_ok=True)
        image.save(tmp_path / "pictures" / kind / f"{n}.png")
    small = ["--conv-channels", "32", "--batch-size", "32", "--accelerator", "cpu", "--patience", "5"]
    trained(tmp_path / "out", "--data", tmp_path / "pictures", "--image-size", "32", *small, epochs=5)
    assert record_in(tmp_path / "out")["results"]["test_accuracy"] > 0.7
