"""``capsfast.train``: the options of a learner, against plain formulas; a resumed run does the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

pytest.importorskip("lightning")

from capsfast import train
from capsfast.data import Batch, channel_statistics
from capsfast.nn import CouplingEntropy, DynamicRouting, RoutedCaps, couplings, recorded
from capsfast.train import ImageData, Learner
from capsfast.train.checkpoint import read_checkpoint
from capsfast.train.normalize import Normalize
from capsfast.train.objective import ClassLoss

from ..support import plain
from ..support.training import TINY, assert_same_state, fitted, learner_for

EVERYTHING: dict[str, Any] = {
    "weight_decay": 0.1,
    "schedule": "cosine",
    "warmup_steps": 3,
    "decay_steps": 20,
    "loss": "spread",
    "spread_steps": 12,
    "normalize": "image",
}


def batch_of(folder: Path, count: int = 7, kind: str = "") -> Batch:
    images = ImageData(f"{kind}{folder}")
    return images.sets.train.batch(torch.arange(count))


def moved(folder: Path, out: Path, resume: Path | None = None, learning: Any = None, **more: Any) -> Learner:
    images = ImageData(str(folder), batch_size=8, seed=3, crop=9, crop_padding=1, flip=True, contrast=0.5)
    learner = learner_for(images, **(EVERYTHING if learning is None else learning))
    fitted(out, learner, images, resume, **{"epochs": 2, **more})
    return learner


def test_resume_with_everything_that_draws(folder: Path, tmp_path: Path) -> None:
    learning = EVERYTHING | {"normalize": "set"}
    moved(folder, tmp_path / "whole", learning=learning)
    moved(folder, tmp_path / "stopped", learning=learning, max_steps=5, checkpoint_every=5)
    torch.rand(7)  # the random state of the process must not matter
    moved(folder, tmp_path / "resumed", tmp_path / "stopped" / "step.ckpt", learning)
    assert_same_state(tmp_path / "whole" / "last.ckpt", tmp_path / "resumed" / "last.ckpt")
    learner, images = train.open_checkpoint(tmp_path / "resumed" / "last.ckpt")
    assert {name: learner.hparams[name] for name in learning} == learning
    assert images.options["crop"] == 9 and images.options["flip"] and images.sets.image_size == 9


def test_cosine_is_as_long_as_the_training_that_began(folder: Path, tmp_path: Path) -> None:
    learning, last = {"schedule": "cosine"}, tmp_path / "one" / "last.ckpt"
    first = moved(folder, tmp_path / "one", learning=learning, epochs=1)
    assert first.decay_steps == read_checkpoint(last)["hyper_parameters"]["decay_steps"] == 8
    longer = moved(folder, tmp_path / "two", last, learning, epochs=2)
    assert longer.decay_steps == train.open_checkpoint(tmp_path / "two" / "last.ckpt")[0].decay_steps == 8
    with pytest.raises(ValueError, match="a cosine over training without end needs decay_steps"):
        moved(folder, tmp_path / "endless", learning=learning, epochs=-1)


def test_weight_decay_shrinks_by_the_learning_rate(folder: Path, tmp_path: Path) -> None:
    """Separate from the step of Adam, which is the same with and without decay."""
    found = {}
    for rate in (0.0, 0.5):
        learner = moved(folder, tmp_path / str(rate), learning={"weight_decay": rate}, max_steps=1)
        found[rate] = [parameter.detach() for parameter in learner.parameters()]
    before = [
        parameter.detach() for parameter in learner_for(ImageData(str(folder), crop=9, crop_padding=1)).parameters()
    ]
    for start, without, with_decay in zip(before, found[0.0], found[0.5], strict=True):
        torch.testing.assert_close(with_decay, without - 0.01 * 0.5 * start)


@pytest.mark.parametrize(
    ("image_size", "num_classes", "options", "rate"),
    [
        (28, 10, {}, None),  # the authors' layer
        (32, 3, {}, 0.01 * 921.6 * 3 / (2048 * 8)),
        (32, 3, {"softmax": "in"}, None),
        (32, 3, {"routing": "em"}, None),
    ],
)
def test_many_input_capsules_for_each_class_take_small_steps(
    image_size: int, num_classes: int, options: dict[str, Any], rate: float | None
) -> None:
    small = {"conv_channels": 4, "decoder_hidden": (2,), **options}
    for given, wanted in ((None, rate), (0.002, 0.002 if options.get("routing") != "em" else None)):
        learner = Learner("capsnet", 1, image_size, num_classes, options=small, lr=0.01, routing_lr=given)
        groups = learner.configure_optimizers()["optimizer"].param_groups  # type: ignore[index,call-overload]
        rates = {parameter: group["lr"] for group in groups for parameter in group["params"]}
        assert rates.keys() == {*learner.parameters()}
        assert rates.pop(learner.model.routing.W) == pytest.approx(wanted or 0.01)
        assert {*rates.values()} == {0.01}


def test_a_small_data_set_has_some_steps_in_an_epoch() -> None:
    pair = [TensorDataset(torch.rand(n, 1, 4, 4), torch.arange(n) % 2) for n in (50, 2000)]
    for size, given, wanted in ((0, None, 8), (1, None, 128), (0, 3, 3)):
        images = ImageData(train=pair[size], test=pair[0], batch_size=given)
        assert images.train_dataloader().order.batch_size == wanted
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        ImageData(train=pair[0], test=pair[0], batch_size=0).train_dataloader()


@pytest.mark.parametrize("labels", [torch.tensor([0, 3, 1, 1]), torch.tensor([[0, 1], [3, 2], [1, 0], [2, 3]])])
def test_losses_by_name(labels: Tensor) -> None:
    a = torch.rand(4, 5, requires_grad=True)
    there = torch.zeros(4, 5).scatter_(1, labels.view(4, -1), 1)
    hinge = there * (0.9 - a).clamp(min=0) ** 2, 0.5 * (1 - there) * (a - 0.1).clamp(min=0) ** 2
    shares = a / a.sum(1, keepdim=True)
    wanted = {
        "margin": (hinge[0] + hinge[1]).sum(1),
        "mse": ((a - there) ** 2).sum(1),
        "cross-entropy": -(there * shares.log()).sum(1) / there.sum(1),
    }
    for name, value in wanted.items():
        torch.testing.assert_close(ClassLoss(name)(a, labels, 0), value)
    parts = ClassLoss("margin").parts(a, labels)
    torch.testing.assert_close(parts["margin_present"], hinge[0].sum(1))
    torch.testing.assert_close(parts["margin_absent"], hinge[1].sum(1))
    assert ClassLoss("mse").parts(a, labels) == {}
    spread = ClassLoss("spread", spread_steps=10)
    if labels.dim() == 2:
        with pytest.raises(ValueError, match="loss spread needs one class an image"):
            spread(a, labels, 0)
        return
    for step, m in ((0, 0.2), (5, 0.55), (30, 0.9)):
        gap = (m - (a.gather(1, labels[:, None]) - a)).clamp(min=0) ** 2
        torch.testing.assert_close(spread(a, labels, step), (gap * (1 - there)).sum(1))


def test_cross_entropy_has_a_gradient_where_a_share_is_tiny() -> None:
    a = torch.tensor([[1e-40, 1.0], [1e-30, 0.5], [0.0, 1.0], [0.0, 0.0]], requires_grad=True)
    loss = ClassLoss("cross-entropy")(a, torch.tensor([0, 0, 0, 1]), 0).sum()
    (gradient,) = torch.autograd.grad(loss, a)
    assert loss.isfinite() and gradient.isfinite().all()
    assert (gradient[:2, 0] < -1e3).all() and (gradient[:2, 1] > 0).all()


def test_a_cnn_learns_from_images_that_it_is_very_wrong_about() -> None:
    """A probability below the smallest float32. Computed from logits, the gradient is as good as for any image."""
    learner = Learner("cnn", 1, 8, 3, options={"channels": [2], "hidden": [4]}).eval()
    with torch.no_grad():
        learner.model.classes.weight.zero_()
        learner.model.classes.bias.copy_(torch.tensor([0.0, 300.0, 0.0]))
    found, output = learner.measured(Batch(torch.rand(2, 1, 8, 8), torch.tensor([0, 2])))
    assert output.lengths[0, 0] == 0 and found["cross_entropy"].item() == pytest.approx(300)
    found["loss"].backward()
    torch.testing.assert_close(learner.model.classes.bias.grad, torch.tensor([-0.5, 1.0, -0.5]))
    for raised in (learner.class_loss_of, learner.lead_of):
        assert raised(torch.tensor([0, 2]))(torch.rand(2, 1, 8, 8)).item() == pytest.approx(600)


@pytest.mark.parametrize("layer", [DynamicRouting, RoutedCaps])
def test_recorded_coupling_is_differentiable(layer: Any) -> None:
    module = layer(6, 3, 4, 5, init_std=1.0, dtype=torch.float64)
    u = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True)
    with recorded(module) as found:
        output = module(u)
        module(u.detach())
    poses = output if layer is DynamicRouting else output.poses
    assert len(found) == 2
    plain.assert_same(found[0], couplings(module, u.detach())[-1])
    v, c = plain.route(plain.votes(u, module.W))
    leaves = [u, module.W]
    got = torch.autograd.grad(CouplingEntropy()(found[0]) + poses.square().sum(), leaves)
    # The last coupling, which formed v.
    plain.assert_same(found[0], c)
    plain.assert_same(got, torch.autograd.grad(CouplingEntropy()(c) + v.square().sum(), leaves))
    assert not isinstance(module(u), list) and len(found) == 2
    with recorded(module, shares=True) as found:
        module(u)
    plain.assert_same(found[0].sum(2), torch.ones(2, 6, dtype=torch.float64))


def test_normalized_is_what_the_network_sees(folder: Path) -> None:
    images = ImageData(str(folder))
    mean, deviation = channel_statistics(images.sets.train)
    learner = learner_for(images, normalize="set")
    assert learner.normalize is not None
    learner.normalize.set(mean, deviation)
    batch = batch_of(folder)
    seen: list[Tensor] = []
    learner.model.conv.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    found, _ = learner.measured(batch)
    learner.classify(batch.images)
    learner.encode(batch.images)
    train.evaluate(learner, images.sets.test, limit=3)
    for each in seen[:3]:
        torch.testing.assert_close(each, (batch.images - mean[0]) / deviation[0])
    torch.testing.assert_close(seen[3], (images.sets.test.batch(torch.arange(3)).images - mean[0]) / deviation[0])
    # The decoder makes images, not normalised images.
    again = learner.output(batch.images, batch.labels).reconstruction
    torch.testing.assert_close(found["reconstruction"], (again - batch.images).square().sum((1, 2, 3)).mean())


def test_normalized_by_the_set(folder: Path, tmp_path: Path) -> None:
    """Mean and deviation come from the training images, and are in the checkpoint."""
    images = ImageData(str(folder), batch_size=8)
    fitted(tmp_path, learner_for(images, normalize="set"), images)
    mean, deviation = channel_statistics(images.sets.train)
    x = torch.rand(3, 1, 10, 10)
    found = train.open_checkpoint(tmp_path / "last.ckpt")[0].normalized(x)
    torch.testing.assert_close(found, (x - mean[0]) / deviation[0])


def test_normalized_images_one_by_one() -> None:
    learner = Learner("capsnet", 2, 8, 3, options=TINY, normalize="image")
    x = torch.rand(4, 2, 8, 8)
    x[3] = 0.5
    x.requires_grad_()
    found = learner.normalized(x)
    for each in range(3):
        want = (x[each] - x[each].mean()) / x[each].std(correction=0)
        torch.testing.assert_close(found[each], want, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(found.square().sum(), x)
    assert torch.equal(found[3], torch.zeros(2, 8, 8)) and gradient.isfinite().all()
    dark = Normalize("set", 2)
    dark.set([0.5, 0.0], [0.5, 0.0])
    assert torch.equal(dark(x)[:, 1], x[:, 1])


def test_cnn_learns_by_cross_entropy(folder: Path, tmp_path: Path) -> None:
    images = ImageData(str(folder), batch_size=8)
    options = {"channels": [4, 4], "hidden": [16], "dropout": 0.1}
    learner = learner_for(images, "cnn", options=options)
    assert learner.class_loss.name == "cross-entropy" and not learner.has_decoder
    batch = batch_of(folder)
    learner.eval()
    found, output = learner.measured(batch)
    nll = nn.functional.nll_loss(learner.model(batch.images).lengths.log(), batch.labels)
    assert found.keys() == {"loss", "cross_entropy", "reconstruction"} and found["reconstruction"] == 0
    torch.testing.assert_close((found["loss"], found["cross_entropy"]), (nll, nll))
    torch.testing.assert_close(output.lengths.sum(1), torch.ones(7))
    learner.train()
    fitted(tmp_path, learner, images)
    again, _ = train.open_checkpoint(tmp_path / "last.ckpt")
    assert torch.equal(again.classify(batch.images).activations, learner.eval().classify(batch.images).activations)
    assert train.evaluate(again, images.sets.test, attack=lambda loss, x: train.fgsm(loss, x, 0.1)).images == 20
    with pytest.raises(ValueError, match="encode\\(\\) and classes is needed, got cnn"):
        train.routing_statistics(again, images.sets.test)
