"""Saved and loaded networks: from the package, from folders, from the Hugging Face Hub."""

import copy
import json
import pickle
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("safetensors")

from capsfast import models
from capsfast.environment.install import in_the_checkout
from capsfast.models import CNN, CapsNet, DeepCaps, EfficientCapsNet
from capsfast.models._network import PRETRAINED, Network
from capsfast.nn import EMRouting

RECORDS = Path(__file__).parent.parent / "docs" / "records"
SHIPPED = [(CapsNet, "mnist"), *((EfficientCapsNet, name) for name in ("fashion-mnist", "mnist", "multi-mnist"))]
SMALL: dict[str, dict[str, Any]] = {
    "CNN": {"image_size": 8, "channels": (3, 4), "hidden": (5,)},
    "CapsAutoEncoder": {"image_size": 8, "conv_channels": 4, "primary_groups": 2, "num_caps": 3},
    "CapsNet": {"image_size": (8, 9), "conv_channels": 4, "primary_groups": 2, "decoder_hidden": (5,)},
    "DeepCaps": {"image_size": 8, "conv_channels": 4, "types": 2, "routing": "em"},
    "EfficientCapsNet": {"image_size": 8, "squash": "paper", "reconstruction": False},
    "InvertedAttentionCapsNet": {"image_size": 8, "conv_channels": 4, "types": 2, "num_caps": 3},
    "MatrixCapsNet": {"image_size": 16, "in_channels": 1, "conv_channels": 4, "conv_types": (2, 2)},
    "SegCaps": {"image_size": 8, "conv_channels": 4, "kernel_size": 3, "dims": [2, 3, 4]},
    "StackedCapsuleAutoencoder": {"image_size": 16, "num_parts": 4, "num_objects": 6, "conv_channels": 4},
}


def small(name: str = "EfficientCapsNet", **more: Any) -> Any:
    torch.manual_seed(0)
    return getattr(models, name)(**SMALL[name], **more)


def digits() -> tuple[Tensor, Tensor]:
    """600 digits of scikit-learn, 8 x 8, drawn on 28 x 28."""
    load = pytest.importorskip("sklearn.datasets").load_digits
    images, labels = (torch.from_numpy(each[:600]) for each in load(return_X_y=True))
    larger = F.interpolate(images.view(-1, 1, 8, 8).float() / 16, size=(18, 18), mode="bicubic").clamp(0, 1)
    return F.pad(larger, [5] * 4), labels


def same(one: Any, two: Any) -> bool:
    a, b = one.state_dict(), two.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_these_come_with_the_package() -> None:
    found = {(function.__name__, name) for function in (CapsNet, EfficientCapsNet, CNN) for name in function._shipped()}
    assert found == {(function.__name__, name) for function, name in SHIPPED}
    assert sum(path.stat().st_size for path in PRETRAINED.rglob("*") if path.is_file()) < 6e6


@pytest.mark.parametrize(("network", "name"), SHIPPED, ids=lambda each: getattr(each, "__name__", each))
def test_a_network_of_the_package(network: type[Network], name: str) -> None:
    model: Any = network.from_pretrained(name)
    assert type(model) is network and not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    output = model(torch.rand(2, *model.image_shape))
    assert output.lengths.shape == (2, 10) and output.reconstruction.shape == (2, *model.image_shape)
    assert (model.class_names is not None) == (name == "fashion-mnist")
    if RECORDS.is_dir():
        record = json.loads((RECORDS / f"pretrained-{network.__name__.lower()}-{name}.json").read_text())
        weights = PRETRAINED / f"{network.__name__.lower()}-{name}" / "model.safetensors"
        assert record["shipped"]["bytes"] == weights.stat().st_size and not record["environment"]["commit"]["changed"]
        assert abs(record["shipped"]["test_accuracy"] - record["results"]["test_accuracy"]) < 0.001
        assert record["parameters"] == sum(parameter.numel() for parameter in model.parameters())


def accuracy(network: Any, **options: Any) -> float:
    images, labels = digits()
    with torch.no_grad():
        found = network.from_pretrained("mnist", **options).classify(images).activations.argmax(1)
    return float((found == labels).float().mean())


def test_knows_digits_of_another_data_set() -> None:
    assert min(accuracy(CapsNet), accuracy(EfficientCapsNet)) > 0.93


def test_finds_two_digits_over_each_other() -> None:
    """By chance both would be right in 2 %. These digits are not from MNIST, so the bounds are far below the record.

    The decoder rebuilds each digit from its capsule, more similar to this digit than to the other.
    """
    images, labels = digits()
    model = EfficientCapsNet.from_pretrained("multi-mnist")
    pairs = [(n, n + 1) for n in range(0, 400, 2) if labels[n] != labels[n + 1]]
    first, second = (torch.tensor(tensor) for tensor in zip(*pairs, strict=True))
    one, two = F.pad(images[first], (2, 6, 4, 4)), F.pad(images[second], (6, 2, 4, 4))
    wanted = torch.stack([labels[first], labels[second]], 1).sort(1).values
    with torch.no_grad():
        found = model.classify((one + two).clamp(0, 1))
        again = model.reconstruct(found.poses, labels[first])
    assert (found.activations.topk(2).indices.sort(1).values == wanted).all(1).float().mean() > 0.12
    assert ((again - one).square().sum((1, 2, 3)) < (again - two).square().sum((1, 2, 3))).float().mean() > 0.55


@pytest.mark.parametrize("name", SMALL)
def test_a_folder_holds_any_network(name: str, tmp_path: Path) -> None:
    model = small(name)
    model.save_pretrained(tmp_path / "folder")
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["config.json", "model.safetensors"]
    loaded = type(model).from_pretrained(tmp_path / "folder")
    assert type(loaded) is type(model) and same(loaded, model) and not loaded.training
    x = torch.rand(2, *model.image_shape)
    outputs = [each.eval()(x)[0] for each in (model, loaded)]
    if isinstance(outputs[0], Tensor):
        assert torch.equal(*outputs)
    for other in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.save_pretrained(tmp_path / "again")
        for file in ("config.json", "model.safetensors"):
            assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "folder" / file).read_bytes()


def test_options_in_place_of_those_that_were_saved(tmp_path: Path) -> None:
    model = small()
    model.class_names = list("abcdefghij")
    model.half().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["squash"] == "paper"
    loaded = EfficientCapsNet.from_pretrained(tmp_path, backend="reference", dtype=torch.float64)
    assert loaded.routing.W.dtype == torch.float64 and torch.equal(loaded.routing.W, model.routing.W.double())
    assert loaded.class_names == list("abcdefghij") and loaded.routing.routing.backend == "reference"
    with pytest.raises(RuntimeError, match="size mismatch"):
        EfficientCapsNet.from_pretrained(tmp_path, conv_channels=8)


@pytest.mark.parametrize("name", ["CNN", "DeepCaps", "EfficientCapsNet", "SegCaps"])
@pytest.mark.parametrize("option", ["num_classes", "in_channels", "image_size"])
def test_another_size_keeps_the_tensors_that_fit(name: str, option: str, tmp_path: Path) -> None:
    model = small(name, num_classes=4)
    model.class_names = list("abcd")
    model.save_pretrained(tmp_path)
    options = {"num_classes": 4, **SMALL[name], option: {"num_classes": 3, "in_channels": 2, "image_size": 12}[option]}
    drawn, before = type(model)(**options).state_dict(), model.state_dict()
    anew = [each for each in drawn if each not in before or drawn[each].shape != before[each].shape]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loaded: Any = type(model).from_pretrained(tmp_path, **{option: options[option]})
    after = loaded.state_dict()
    assert all(torch.equal(after[each], before[each]) for each in after if each not in anew)
    assert loaded.class_names == (None if option == "num_classes" else list("abcd"))
    text = f"{model._op}.from_pretrained: {len(drawn) - len(anew)} of {len(drawn)} tensors are from {tmp_path}; "
    assert [str(each.message).partition("; not used: ")[0] for each in said] == (
        [f"{text}drawn anew: {', '.join(anew)}"] if anew else []
    )
    assert bool(anew) == ((name, option) != ("SegCaps", "image_size"))  # convolutions alone fit any image


class Own(EfficientCapsNet):
    """A user's network with another constructor."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(1, 8, 3, conv_channels=width, reconstruction=False)


def test_a_network_of_ones_own(tmp_path: Path) -> None:
    Own(6).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"width": 6}
    assert Own.from_pretrained(tmp_path).convs[0].out_channels == 6
    small("CNN").save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"no parameter of the network has the name and the shape of one in"):
        CNN.from_pretrained(tmp_path, num_classes=3, channels=(5, 6), hidden=(7,))


def test_the_hubs_mixin_reads_and_writes_the_same(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    mixed: Any = type("Mixed", (hub.PyTorchModelHubMixin, EfficientCapsNet), {})
    model = small()
    model.save_pretrained(tmp_path / "ours")
    theirs = mixed.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    assert same(theirs, model) and same(EfficientCapsNet.from_pretrained(tmp_path / "theirs"), model)


@pytest.mark.parametrize("has_a_card", [False, True])
def test_uploads_and_downloads(has_a_card: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    said: list[Any] = []

    class Api:
        def __init__(self, token: str | None) -> None:
            said.append(token)

        def create_repo(self, repo: str, private: bool | None, exist_ok: bool) -> Any:
            said.append((repo, private, exist_ok))
            return hub.RepoUrl(f"https://huggingface.co/{repo}")

        def file_exists(self, repo: str, name: str, revision: str | None) -> bool:
            return has_a_card

        def upload_folder(self, repo_id: str, folder_path: str, revision: str | None) -> str:
            shutil.copytree(folder_path, tmp_path, dirs_exist_ok=True)
            return f"{repo_id} {revision}"

    def download(name: str, **options: Any) -> str:
        assert (name, options["revision"], options["token"]) == ("me/net", "b", "secret")
        return str(tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise hub.errors.LocalEntryNotFoundError("no network\nand more")

    monkeypatch.setattr(hub, "HfApi", Api)
    model, card = small(), tmp_path / "README.md"
    assert model.push_to_hub("me/net", private=True, token="secret", revision="b") == "me/net b"
    assert said == ["secret", ("me/net", True, True)] and card.exists() != has_a_card
    assert has_a_card or 'capsfast.models.EfficientCapsNet.from_pretrained("me/net")' in card.read_text()
    monkeypatch.setattr(hub, "snapshot_download", download)
    assert same(EfficientCapsNet.from_pretrained("me/net", revision="b", token="secret"), model)
    monkeypatch.setattr(hub, "snapshot_download", refuse)
    nothing = "CapsNet.from_pretrained: me/net is not a folder, and the Hugging Face Hub does not have it: no network$"
    with pytest.raises(FileNotFoundError, match=nothing):
        CapsNet.from_pretrained("me/net")


def test_other_names(tmp_path: Path) -> None:
    """Also a repository whose name the Hub refuses, and options that can't be saved."""
    rest = "a folder, or a repository of the Hugging Face Hub such as 'owner/name', got"
    for network, name, shipped in (
        (CapsNet, "mnsit", "'mnist', "),
        (EfficientCapsNet, "cifar10", "'fashion-mnist', 'mnist', 'multi-mnist', "),
        (DeepCaps, f"{tmp_path}/none", ""),
    ):
        message = f"capsfast.models.{network.__name__}.from_pretrained: name must be {shipped}{rest} {name!r}"
        with pytest.raises(ValueError, match=re.escape(message)):
            network.from_pretrained(name)
    with pytest.raises(ValueError, match=r"has no config\.json and no model\.safetensors; save_pretrained writes both"):
        CapsNet.from_pretrained(tmp_path)
    pytest.importorskip("huggingface_hub")
    with pytest.raises(FileNotFoundError, match=r"Hub does not have it: Repo id must use alphanumeric"):
        CapsNet.from_pretrained("my folder/net")
    message = "CapsNet.save_pretrained: routing must be a number, text, or a sequence of them, got EMRouting; save the "
    with pytest.raises(ValueError, match=message):
        CapsNet(1, 8, 3, conv_channels=2, routing=EMRouting).save_pretrained(tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("missing", "calls"),
    [("safetensors", ("from_pretrained", "save_pretrained")), ("huggingface_hub", ("from_pretrained", "push_to_hub"))],
)
def test_what_to_install(missing: str, calls: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (missing, f"{missing}.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in calls:
        wanted = f"capsfast.models.EfficientCapsNet.{name} needs {missing}; {in_the_checkout('hub')}"
        with pytest.raises(ModuleNotFoundError, match=re.escape(wanted)):
            getattr(small(), name)("me/net")


@pytest.mark.parametrize("model", ["capsnet", "efficientcapsnet"])
def test_the_command_predict(model: str, tmp_path: Path) -> None:
    for needed in ("typer", "lightning", "matplotlib", "PIL", "torchvision"):
        pytest.importorskip(needed)
    from PIL import Image

    from .support.commands import done, failed, is_png

    images, labels = digits()
    files = [tmp_path / f"{n}.png" for n in range(10)]
    for file, image in zip(files, images[:10, 0], strict=True):
        Image.fromarray((255 * image).round().byte().numpy()).save(file)
    out = ["--out", tmp_path / "out"]
    lines = done("predict", *files, "--model", model, "--pretrained", "mnist", *out).splitlines()
    right = sum(line.startswith(f"{file}: {n} ") for line, file, n in zip(lines, files, labels.tolist(), strict=False))
    assert right >= {"capsnet": 9, "efficientcapsnet": 10}[model] and is_png(tmp_path / "out" / "predictions.png")
    rule = "capsfast predict: --checkpoint FILE or --model NAME --pretrained NAME is needed, got"
    for words, got in (("", "none of them"), ("--pretrained mnist", "--pretrained")):
        assert failed("predict", files[0], *words.split()) == f"{rule} {got}"
    both = failed("predict", files[0], "--model", model, "--pretrained", "mnist", "--checkpoint", "last.ckpt")
    assert both == f"{rule} --checkpoint, --model, --pretrained"
    message = failed("predict", files[0], "--model", "deepcaps", "--pretrained", "mnist", *out)
    assert message.startswith("capsfast.models.DeepCaps.from_pretrained: name must be a folder, or a repository")
    message = failed("predict", files[0], "--model", "torch.nn.Linear", "--pretrained", "a", *out)
    assert "open_pretrained: model must be one of capsfast.models, or derive from one of them, got torch.nn" in message


def test_the_command_says_the_names_of_classes(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from capsfast import train

    learner = train.open_pretrained("efficientcapsnet", "fashion-mnist")
    assert learner.class_names[9] == "Ankle boot" and learner.sizes["image_size"] == 28 and learner.has_decoder
    learner.model.save_pretrained(tmp_path)
    assert EfficientCapsNet.from_pretrained(tmp_path).class_names == learner.class_names
    small("CapsNet").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"open_pretrained: the images of {tmp_path} must be square, got 8 x 9"):
        train.open_pretrained("capsnet", str(tmp_path))


def test_training_begins_with_pretrained_weights(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from capsfast import train

    weights = EfficientCapsNet.from_pretrained("mnist").state_dict()
    learner = train.Learner("efficientcapsnet", pretrained="mnist", options={"backend": "reference"})
    assert same(learner.model, EfficientCapsNet.from_pretrained("mnist")) and learner.model.training
    assert learner.hparams["options"]["decoder_hidden"] == [128, 256] and "pretrained" not in learner.hparams
    assert learner.hparams["options"]["backend"] == learner.model.routing.routing.backend == "reference"
    with pytest.warns(UserWarning, match=r"^capsfast.train.Learner: 35 of 38 .* mnist; drawn anew: model.routing.W, "):
        learner = train.Learner("efficientcapsnet", 1, 28, 3, pretrained="mnist", seed=5)
    torch.manual_seed(5)
    drawn = EfficientCapsNet(num_classes=3, decoder_hidden=(128, 256))
    assert torch.equal(learner.model.routing.W, drawn.routing.W)  # drawn from the seed
    assert torch.equal(learner.model.convs[0].weight, weights["convs.0.weight"])
    with pytest.warns(UserWarning, match=r"32 of 32 tensors .*; not used: model.decoder.layers.0.weight, "):
        train.Learner("efficientcapsnet", pretrained="mnist", options={"reconstruction": False})
    with pytest.raises(ValueError, match=r"Learner: the options in mnist and of this call can't be used: .* no option"):
        train.Learner("efficientcapsnet", pretrained="mnist", options={"colour": "red"})
    with pytest.raises(FileNotFoundError, match=r"No such file .*no\.ckpt"):
        train.Learner(pretrained=f"{tmp_path}/no.ckpt")
    for content in ({}, {"state_dict": {}, "hyper_parameters": {"model": "capsnet"}}, [1]):
        torch.save(content, tmp_path / "other.ckpt")
        with pytest.raises(ValueError, match=r"Learner: .*other\.ckpt can't be read as a checkpoint; name one that "):
            train.Learner(pretrained=f"{tmp_path}/other.ckpt")
