"""``capsfast.train``: losses, exact resume, checkpoints, evaluation, the content of pictures."""

from math import cos, pi
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

pytest.importorskip("lightning")
pytest.importorskip("matplotlib")

from capsfast import train
from capsfast.data import open_sets
from capsfast.plot import predictions_figure, read_metrics
from capsfast.train import Evaluation, ImageData, Learner
from capsfast.train.checkpoint import read_checkpoint
from capsfast.train.learner import decay, found_classes, right_predictions
from capsfast.train.objective import multi_hot

from ..support.commands import failed
from ..support.idx_files import write_set
from ..support.training import TINY, fitted, learner_for, margin, trained

SIZE = 10


def test_seed_decides(folder: Path) -> None:
    images = ImageData(str(folder))
    one, again, other = (learner_for(images, **seed).model.routing.W for seed in ({}, {}, {"seed": 1}))
    assert torch.equal(one, again) and not torch.equal(one, other)


@pytest.mark.parametrize(
    ("rate", "factors"),
    [
        (0.5, {0: 0.2, 3: 0.8 * 0.5**0.3, 4: 0.5**0.4, 20: 0.25}),
        (None, {0: 0.2, 2: 0.6 * 0.5 * (1 + cos(0.2 * pi)), 5: 0.5, 10: 0, 99: 0}),
    ],
)
def test_decay(rate: float | None, factors: dict[int, float]) -> None:
    assert [decay(step, 4, 10, rate) for step in factors] == pytest.approx([*factors.values()])


def test_learning_rate_follows_the_schedule(whole: Path) -> None:
    (state,) = read_checkpoint(whole)["optimizer_states"]
    assert state["param_groups"][0]["lr"] == pytest.approx(0.01 * decay(16, 4, 3, 0.96))


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_gradients_are_clipped(folder: Path, tmp_path: Path, clip: float | None) -> None:
    images = ImageData(str(folder), batch_size=8)
    learner = learner_for(images, clip=clip)
    norms: list[float] = []
    clipped = learner.configure_gradient_clipping

    def watched(*arguments: Any, **more: Any) -> None:
        clipped(*arguments, **more)
        norms.append(float(nn.utils.get_total_norm([parameter.grad for parameter in learner.parameters()])))

    learner.configure_gradient_clipping = watched  # type: ignore[method-assign]
    fitted(tmp_path, learner, images)
    assert len(norms) == 8 and (min(norms) > 2e-3 if clip is None else max(norms) < 1.001 * clip)


def test_bfloat16_training(folder: Path, tmp_path: Path) -> None:
    images = ImageData(str(folder), batch_size=8)
    learner = learner_for(images)
    before = [parameter.clone() for parameter in learner.parameters()]
    found = fitted(tmp_path, learner, images, precision="bf16-mixed")
    assert all(p.dtype == torch.float32 for p in learner.parameters())
    assert all(not torch.equal(p, q) for p, q in zip(before, learner.parameters(), strict=True))
    assert torch.tensor(found["last"]["test_reconstruction"]).isfinite()


def assert_parts(found: dict[str, Tensor], loss: Tensor, margin: Tensor, reconstruction: Tensor) -> None:
    parts = (found[name] for name in ("loss", "margin", "reconstruction"))
    torch.testing.assert_close(tuple(parts), (loss, margin, reconstruction))


def test_losses_of_one_label(folder: Path) -> None:
    images = ImageData(str(folder))
    learner = learner_for(images, reconstruction_weight=0.01)
    batch = images.sets.train.batch(torch.arange(7))
    found, measured = learner.measured(batch)
    output = learner.model(batch.images, batch.labels)
    error = (output.reconstruction - batch.images).square().sum((1, 2, 3)).mean()
    hinge = margin(output.capsules.norm(dim=2), torch.eye(4)[batch.labels]).mean()
    assert_parts(found, hinge + 0.01 * error, hinge, error)
    torch.testing.assert_close(measured.lengths, output.lengths)


@pytest.mark.parametrize("reconstruction", [True, False])
def test_losses_of_overlapping_images(folder: Path, reconstruction: bool) -> None:
    """Each capsule is decoded into the image of its own object."""
    images = ImageData(f"multi:{folder}")
    learner = learner_for(images, options=TINY | {"reconstruction": reconstruction}, reconstruction_weight=0.01)
    batch = images.sets.train.batch(torch.arange(7))
    assert batch.parts is not None
    found, _ = learner.measured(batch)
    capsules = learner.model(batch.images).capsules
    present = torch.eye(4)[batch.labels].sum(1)
    hinge = margin(capsules.norm(dim=2), present).mean()
    error = torch.zeros(())
    for n in range(2) if reconstruction else ():
        chosen = capsules * torch.eye(4)[batch.labels[:, n]][:, :, None]
        image = learner.model.decoder.layers(chosen.flatten(1)).view(7, *batch.images.shape[1:])
        error = error + (image - batch.parts[:, n]).square().sum((1, 2, 3)).mean()
    assert_parts(found, hinge + 0.01 * error, hinge, error)


def test_losses_of_an_autoencoder(folder: Path) -> None:
    images = ImageData(str(folder))
    learner = learner_for(images, "autoencoder")
    batch = images.sets.train.batch(torch.arange(7))
    found, _ = learner.measured(batch)
    error = (learner.model(batch.images).reconstruction - batch.images).square().sum((1, 2, 3)).mean()
    assert found.keys() == {"loss", "reconstruction"} and found["loss"] is found["reconstruction"]
    torch.testing.assert_close(found["loss"], error)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"lr": 0.0}, "lr must be positive"),
        ({"decay_steps": 0}, "decay_steps must be positive"),
        ({"clip": float("nan")}, "clip must be positive"),
        ({"weight_decay": -1.0}, "weight_decay must be 0 or positive"),
        ({"schedule": "linear"}, "schedule must be one of 'exponential', 'cosine', got 'linear'"),
        ({"loss": "hinge"}, "loss must be one of 'margin', 'mse', 'spread', 'cross-entropy', got 'hinge'"),
        ({"normalize": "each"}, "normalize must be one of 'image', 'set', got 'each'"),
        ({"loss": "mse", "model": "autoencoder", "options": {}}, "loss compares classes, and autoencoder has"),
        ({"loss": "margin", "model": "segcaps", "options": {}}, "loss compares classes, and segcaps has none"),
        ({"model": "capsule"}, "model must be one of 'capsnet', "),
        ({"model": "deepcaps", "options": {"primary_groups": 3}}, "deepcaps's own options are conv_channels, types, "),
    ],
)
def test_learner_rejects(wrong: dict[str, Any], rule: str) -> None:
    with pytest.raises((ValueError, TypeError), match=r"^capsfast\.train\.") as error:
        Learner(**{"image_size": 8, "options": TINY, **wrong})
    assert rule in str(error.value)


def test_right_predictions() -> None:
    lengths = torch.tensor([[0.1, 0.9, 0.5], [0.1, 0.9, 0.5], [0.7, 0.2, 0.3]])
    assert right_predictions(lengths, torch.tensor([1, 2, 0])).tolist() == [True, False, True]
    pairs = torch.tensor([[2, 1], [0, 1], [0, 2]])
    assert right_predictions(lengths, pairs).tolist() == [True, False, True]
    assert found_classes(lengths, pairs).tolist() == [[True, True], [False, True], [True, True]]
    assert multi_hot(pairs, 3).tolist() == [[0, 1, 1], [1, 1, 0], [1, 0, 1]]
    for none in (pairs[:0], pairs[:0, 0]):
        assert right_predictions(lengths[:0], none).shape == (0,) and multi_hot(none, 3).shape == (0, 3)


def test_evaluate_counts(folder: Path) -> None:
    images = ImageData(str(folder))
    learner, test = learner_for(images), images.sets.test
    batch = test.batch(torch.arange(20))
    predicted = learner.model(batch.images).lengths.argmax(1)
    found = train.evaluate(learner, test, batch_size=6)
    assert found.images == 20 and found.right == int((predicted == batch.labels).sum())
    counts = torch.zeros(4, 4).long()
    for label, guess in zip(batch.labels, predicted, strict=True):
        counts[label, guess] += 1
    assert found.confusion is not None and torch.equal(found.confusion, counts)
    assert train.evaluate(learner, test, limit=5).images == 5
    assert Evaluation(8, 2, None, 9).accuracy == 0.25
    assert str(Evaluation(8, 2, None, 8)) == "25.00% of 8 right, 50.00% of 16 objects found"
    assert str(found) == f"{found.accuracy:.2%} of 20 right" and found.numbers() == {"images": 20, "right": found.right}


def test_evaluate_counts_both_objects() -> None:
    images = ImageData("multi:digits")
    learner, test = learner_for(images), images.sets.test
    found = train.evaluate(learner, test, limit=60)
    batch = test.batch(torch.arange(60))
    pairs = [{*pair} for pair in learner.model(batch.images).lengths.topk(2, 1).indices.tolist()]
    hits = [len(pair & {*labels}) for pair, labels in zip(pairs, batch.labels.tolist(), strict=True)]
    assert found.numbers() == {"images": 60, "right": hits.count(2), "found": sum(hits)}
    assert hits.count(1) > 0 and found.confusion is None


def test_evaluate_needs_classes(folder: Path) -> None:
    images = ImageData(str(folder))
    learner, test = learner_for(images, "autoencoder"), images.sets.test
    for function in (train.evaluate, train.routing_statistics):
        with pytest.raises(ValueError, match=r"classes is needed.* autoencoder"):
            function(learner, test)
    for call in (
        lambda: train.perturbations(learner, test.batch(torch.arange(1)).images[0], 0),
        lambda: train.predictions(learner, test, 3),
    ):
        with pytest.raises(ValueError, match="this network, autoencoder, has no classes"):
            call()


def test_checkpoint_gives_network_and_data_back(folder: Path, tmp_path: Path) -> None:
    images = ImageData(str(folder), batch_size=8, seed=5)
    learner = learner_for(images)
    fitted(tmp_path, learner, images)
    again, data = train.open_checkpoint(tmp_path / "last.ckpt")
    assert data.options["data"] == str(folder) and data.options["seed"] == 5 and not again.training
    x = images.sets.test.batch(torch.arange(4)).images
    assert torch.equal(again.model(x).capsules, learner.eval().model(x).capsules)
    write_set(tmp_path / "other", size=11)
    with pytest.raises(ValueError, match=r"needs .*'image_size': 10.* has .*'image_size': 11"):
        train.open_checkpoint(tmp_path / "last.ckpt", data=str(tmp_path / "other"))


def test_checkpoint_of_data_sets_from_python(tmp_path: Path) -> None:
    """It opens with what the training took, and holds the same images out."""
    sets = [TensorDataset(torch.rand(count, 1, 10, 10), torch.arange(count) % 4) for count in (40, 12, 8)]
    images, path = ImageData(train=sets[0], test=sets[2], batch_size=128, seed=5, hold_out=0.2), tmp_path / "last.ckpt"
    results = fitted(tmp_path, learner_for(images), images)
    assert results["last"]["step"] == 1 and {"val_accuracy", "test_accuracy"} <= results["last"].keys()
    with pytest.raises(ValueError, match=rf"{path} holds no data, it was trained on data sets from Python; give them"):
        train.open_checkpoint(path)
    for command, remedy in (("test", "give other data with --data"), ("train", "capsfast.train.fit goes on")):
        message = f"capsfast {command}: {path} was trained on data sets from Python; {remedy}"
        assert failed(command, "--resume", path) == message
    assert train.open_checkpoint(path, data=images)[1] is images
    again = train.open_checkpoint(path, data=(sets[0], sets[2]))[1]
    assert again.sets.val is not None and images.sets.val is not None and len(again.sets.test) == 8
    assert torch.equal(again.sets.val.batch(torch.arange(8)).images, images.sets.val.batch(torch.arange(8)).images)
    for data, counts in ((tuple(sets), [40, 12, 8]), (sets[0], [24, 8, 8])):
        assert [len(part) for part in train.open_checkpoint(path, data=data)[1].sets[:3]] == counts  # type: ignore[arg-type]


class Trap:
    """Code that a checkpoint must not be able to run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_code_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({"state_dict": Trap(tmp_path / "trapped")}, path)
    with pytest.raises(ValueError, match=rf"^capsfast\.train\.read_checkpoint: {path} can't be read as a checkpoint"):
        train.open_checkpoint(path)
    assert not (tmp_path / "trapped").exists()
    with pytest.raises(FileNotFoundError, match="is a folder; name a file in it"):
        train.open_checkpoint(tmp_path)


def test_options_that_are_gone(folder: Path, tmp_path: Path) -> None:
    trained(folder, tmp_path, max_steps=1)
    content = torch.load(tmp_path / "last.ckpt")
    for kind, key in ((Learner, "hyper_parameters"), (ImageData, "datamodule_hyper_parameters")):
        assert key == kind.CHECKPOINT_HYPER_PARAMS_KEY
        off = content[key] | {"rotation": 0.0, "cutout": None}
        torch.save(content | {key: off}, tmp_path / "x.ckpt")
        assert read_checkpoint(tmp_path / "x.ckpt")[key] == content[key]
        torch.save(content | {key: off | {"caps_dropout": 0.1, "adversarial": "fgsm"}}, tmp_path / "x.ckpt")
        with pytest.raises(ValueError, match=r"x\.ckpt has options that .* does not have: adversarial, caps_dropout"):
            read_checkpoint(tmp_path / "x.ckpt")


@pytest.mark.parametrize("kind", ["", "multi:"])
def test_predictions(folder: Path, kind: str) -> None:
    images = ImageData(f"{kind}{folder}")
    learner = learner_for(images)
    batch = images.sets.test.batch(torch.arange(20))
    lengths = learner.eval().classify(batch.images).activations
    n = batch.labels.view(20, -1).shape[1]
    best = lengths.topk(n).indices.tolist()
    right = [set(a) == set(b) for a, b in zip(best, batch.labels.view(20, -1).tolist(), strict=True)]
    found = train.predictions(learner, images.sets.test, 9)
    assert found.right.tolist() == right[:9]
    torch.testing.assert_close(found.activations, lengths[:9])  # in other batches: rounding differs
    assert torch.equal(found.images, batch.images[:9]) and torch.equal(found.labels, batch.labels[:9])
    wrong = train.predictions(learner, images.sets.test, 5, wrong=True)
    rows = [row for row in range(20) if not right[row]][:5]
    assert not wrong.right.any() and torch.equal(wrong.images, batch.images[rows])
    figure = predictions_figure(found.images, found.labels, found.activations)
    bars = [plot for plot in figure.axes if plot.patches]
    assert len(bars) == 9
    for plot, values in zip(bars, found.activations, strict=True):
        assert [bar.get_width() for bar in plot.patches] == pytest.approx(values.tolist())  # type: ignore[attr-defined]
    titles = [plot.get_title() for plot in bars]
    assert titles == [", ".join(map(str, each)) for each in best[:9]]


def test_predictions_need_mistakes(folder: Path) -> None:
    images = ImageData(str(folder))
    learner, test = learner_for(images), images.sets.test
    test.labels.copy_(learner.eval().classify(test.batch(torch.arange(len(test))).images).activations.argmax(1))
    with pytest.raises(ValueError, match="no image is misclassified"):
        train.predictions(learner, test, 3, wrong=True)


def test_perturbations_change_one_number(folder: Path) -> None:
    images = ImageData(str(folder))
    learner = learner_for(images)
    image = images.sets.test.batch(torch.arange(1)).images[0]
    found = train.perturbations(learner, image, 2)
    assert found.shape == (5, 11, 1, SIZE, SIZE)
    capsules = learner.model(image[None]).capsules.detach()
    for dimension, column, delta in ((0, 0, -0.25), (3, 5, 0.0), (4, 10, 0.25), (2, 7, 0.1)):
        changed = capsules.clone()
        changed[0, 2, dimension] += delta
        want = learner.model.reconstruct(changed, torch.tensor([2]))[0]
        torch.testing.assert_close(found[dimension, column], want)
    without = learner_for(images, options=TINY | {"reconstruction": False})
    with pytest.raises(ValueError, match="this network, capsnet, was trained without reconstruction"):
        train.perturbations(without, image, 2)


def test_reconstructions(folder: Path) -> None:
    images = ImageData(str(folder))
    learner = learner_for(images)
    rows = train.one_of_each_class(images.sets.test, 4)
    batch = images.sets.test.batch(rows)
    assert batch.labels.tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(train.reconstructions(learner, batch), learner.model(batch.images, batch.labels)[2])
    blind = learner_for(images, "autoencoder")
    torch.testing.assert_close(train.reconstructions(blind, batch), blind.model(batch.images).reconstruction)
    multi = open_sets(f"multi:{folder}").test.batch(rows)
    two = learner_for(ImageData(f"multi:{folder}"))
    found = train.reconstructions(two, multi)
    assert found.shape == (4, 2, 1, SIZE + 2, SIZE + 2)
    torch.testing.assert_close(found[:, 1], two.model(multi.images, multi.labels[:, 1]).reconstruction)


@pytest.mark.parametrize("kind", ["", "multi:"])
def test_routing_statistics(folder: Path, kind: str) -> None:
    images = ImageData(f"{kind}{folder}")
    learner = learner_for(images)
    found = train.routing_statistics(learner, images.sets.test, batch_size=7)
    batch = images.sets.test.batch(torch.arange(20))
    votes = torch.einsum("ijdk,bik->bijd", learner.model.routing.W, learner.model.encode(batch.images)).detach()
    logits = torch.zeros(votes.shape[:3])
    for t in range(3):
        coupling = logits.softmax(2)
        s = torch.einsum("bij,bijd->bjd", coupling, votes)
        v = s * (s.norm(dim=2) / (1 + s.norm(dim=2) ** 2))[:, :, None]
        logits = logits + torch.einsum("bijd,bjd->bij", votes, v)
        entropy = -(coupling * coupling.log()).sum(2).mean(1) / torch.tensor(4.0).log()
        for label in range(4):
            there = (batch.labels.view(20, -1) == label).any(1)
            torch.testing.assert_close(found.entropy[t, label], entropy[there].mean())
    for label in range(4):
        there = (batch.labels.view(20, -1) == label).any(1)
        torch.testing.assert_close(found.lengths[label], v.norm(dim=2)[there].mean(0))


def test_metrics_of_a_run_and_of_those_it_went_on_from(tmp_path: Path) -> None:
    logs = [
        "step,loss,test_accuracy\n9,5,\n19,4,\n29,3,\n99,9,\n",  # another run, longer
        "step,loss,test_accuracy\n9,1.0,\n12,,0.5\n19,0.9,\n29,0.8,\n",
        "step,loss,test_accuracy\n19,0.7,\n25,,0.6\n29,0.",  # a killed run may leave half a line
    ]
    for n, text in enumerate(logs):
        (tmp_path / f"version_{n}").mkdir()
        (tmp_path / f"version_{n}" / "metrics.csv").write_text(text)
    assert read_metrics(tmp_path / "version_2") == {"loss": [(19, 0.7)], "test_accuracy": [(25, 0.6)]}
    together = {"loss": [(9, 1.0), (19, 0.7)], "test_accuracy": [(12, 0.5), (25, 0.6)]}
    assert read_metrics(tmp_path / "version_2", True) == together
    assert read_metrics(tmp_path / "version_1", True)["loss"] == [(9, 1.0), (19, 0.9), (29, 0.8)]
    for half in ("29", "2", "29,1e-", ""):
        (tmp_path / "version_0" / "metrics.csv").write_text(f"step,loss\n9,0.75\n19,0.5\n{half}")
        assert read_metrics(tmp_path / "version_0") == {"loss": [(9, 0.75), (19, 0.5)]}
