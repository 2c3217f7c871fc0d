"""Every network of the trainer: its start, resumed, compiled, in bfloat16, on two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("lightning")

import capsfast
from capsfast import train
from capsfast.data import Batch
from capsfast.train import NETWORKS, ImageData, Learner
from capsfast.train.checkpoint import read_checkpoint

from ..support.ranks import WORLD, on_two_ranks
from ..support.training import tensors

# Options that make each network small, for images of 10 x 10.
SMALL: dict[str, dict[str, Any]] = {
    "capsnet": {"conv_channels": 6, "primary_groups": 2, "primary_dim": 4, "digit_dim": 5},
    "deepcaps": {"conv_channels": 6, "types": 2, "dims": [2, 3, 3], "digit_dim": 5},
    "autoencoder": {"conv_channels": 6, "primary_groups": 2, "num_caps": 3, "caps_dim": 4},
    "cnn": {"channels": [4, 4], "kernel_size": 3, "hidden": [8]},
    "segcaps": {},
    "efficientcapsnet": {"conv_channels": 4, "primary_groups": 3, "primary_dim": 4, "digit_dim": 5},
    "invertedattention": {
        "conv_channels": 4,
        "primary_groups": 2,
        "primary_dim": 4,
        "digit_dim": 4,
        "types": 2,
        "num_caps": 3,
    },
    "matrixcapsnet": {"conv_channels": 4, "primary_types": 2, "conv_types": [2, 3], "pose_rows": 2},
    "stacked": {"num_parts": 3, "num_objects": 4, "conv_channels": 4, "template_size": 5, "dim": 4, "hidden": 8},
}
each_network = pytest.mark.parametrize("name", SMALL)


def learner_of(name: str, **more: Any) -> Learner:
    return Learner(name, 1, 10, 4, **{"options": SMALL[name], "lr": 0.01, **more})


def batch_of(images: int) -> Batch:
    torch.manual_seed(7)
    return Batch(torch.rand(images, 1, 10, 10), torch.arange(images) % 4)


class Loss(nn.Module):
    """The loss of a learner, as in its training step."""

    def __init__(self, learner: Learner) -> None:
        super().__init__()
        self.learner = learner

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = self.learner.measured(Batch(images, labels))[0]["loss"]
        return found


def gradients(module: nn.Module) -> list[Tensor]:
    return [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in module.parameters()
    ]


def test_every_network_is_tried() -> None:
    assert set(SMALL) == set(NETWORKS)


@each_network
def test_resumed_training_is_that_of_an_uninterrupted_run(name: str, folder: Path, tmp_path: Path) -> None:
    options = {"epochs": 1, "accelerator": "cpu", "devices": 1, "progress": False, "limit_val_batches": 1}
    options["logger"] = False
    for out, more, resume in (
        ("whole", {}, None),
        ("stopped", {"max_steps": 3, "checkpoint_every": 3}, None),
        ("resumed", {}, tmp_path / "stopped" / "step.ckpt"),
    ):
        trainer = train.make_trainer(tmp_path / out, **options, **more)  # type: ignore[arg-type]
        train.fit(trainer, learner_of(name), ImageData(str(folder), batch_size=8, seed=3), resume)
    one, other = (read_checkpoint(tmp_path / out / "last.ckpt") for out in ("whole", "resumed"))
    assert one["global_step"] == other["global_step"] == 8
    for part in ("state_dict", "optimizer_states"):
        pairs = list(zip(tensors(one[part]), tensors(other[part]), strict=True))
        assert pairs and all(torch.equal(*pair) for pair in pairs)


@each_network
def test_compiled_and_in_bfloat16(name: str) -> None:
    torch._dynamo.reset()
    learner = learner_of(name).eval()
    images, labels, _ = batch_of(6)
    wanted = learner.measured(Batch(images, labels))[0]["loss"]
    learner.model = torch.compile(learner.model, fullgraph=True, backend="eager")
    found = learner.measured(Batch(images, labels))[0]["loss"]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    learner.model = learner.model._orig_mod
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = learner.measured(Batch(images, labels))[0]["loss"]
    assert low.isfinite() and (low - wanted).abs() < 0.05 * wanted.abs() + 0.05
    low.backward()
    assert all(gradient.isfinite().all() for gradient in gradients(learner))


def _on_a_rank(rank: int) -> None:
    """The mean of the ranks' gradients equals the gradient of the mean loss of both halves."""
    images, labels, _ = batch_of(4 * WORLD)
    halves = list(zip(images.chunk(WORLD), labels.chunk(WORLD), strict=True))
    for name in SMALL:
        loss = Loss(learner_of(name).eval())
        for half in halves:
            (loss(*half) / WORLD).backward()
        wanted = [gradient.clone() for gradient in gradients(loss)]
        loss.zero_grad()
        parallel = DistributedDataParallel(loss)
        parallel(*halves[rank]).backward()
        torch.testing.assert_close(gradients(loss), wanted, rtol=1e-4, atol=1e-5, msg=name)


def test_on_two_ranks(tmp_path: Path) -> None:
    on_two_ranks(_on_a_rank, tmp_path)


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "efficientcapsnet": [{"shared_weight": True, "squash": "paper"}, {"routing": "dynamic", "gradient": "last"}],
    "invertedattention": [{"num_iterations": 3, "concurrent": False}],
    "matrixcapsnet": [{"routing": "dynamic", "squash": "exp"}],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_reach_the_network_and_unknown_ones_are_named(name: str) -> None:
    for options in OPTIONS[name]:
        model = learner_of(name, options={**SMALL[name], **options}).model
        for option, value in options.items():
            of_routing = getattr(getattr(model, "routing", None), "routing", None)
            if option not in ("routing", "shared_weight"):
                assert getattr(model, option, getattr(of_routing, option, None)) == value
    with pytest.raises(TypeError, match=rf"{name}'s own options are "):
        learner_of(name, options={"top_k": 3})


def test_statistics_of_a_network_with_its_own_activations() -> None:
    """Statistics include the class capsules. Even dynamic routing takes the options of layers by passes."""
    images = ImageData("digits", batch_size=8)
    for options in ({}, {"routing": "dynamic", "squash": "exp"}):
        learner = Learner("matrixcapsnet", **images.sets.sizes, options={**SMALL["matrixcapsnet"], **options})
        found = train.routing_statistics(learner, images.sets.test, limit=8, batch_size=8)
        batch = next(iter(images.val_dataloader()))
        lengths = learner.model(batch.images).lengths[batch.labels == 3].mean(0)
        torch.testing.assert_close(found.lengths[3], lengths.detach(), rtol=1e-4, atol=1e-5)


# Every network with classes in its forms, by the names of the trainer.
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("capsnet", {}),
    ("deepcaps", {}),
    ("efficientcapsnet", {}),
    ("efficientcapsnet", {"strides": (1, 1, 2, 2), "kernel_size": 5, "primary_stride": 2}),
    ("efficientcapsnet", {"kernel_sizes": (7, 3, 3, 3), "strides": (2, 1, 1, 2), "norm": "instance"}),
    ("invertedattention", {}),
    ("matrixcapsnet", {}),
    ("matrixcapsnet", {"form": "variational"}),
    ("segcaps", {}),
    ("segcaps", {"form": "r3"}),
    ("cnn", {}),
]
REFUSED = {
    ("efficientcapsnet", "strides", "kernel_size", "primary_stride"): (8, 28),
    ("efficientcapsnet", "kernel_sizes", "strides", "norm"): (8,),
    ("segcaps", "form"): (28,),
}


@pytest.mark.parametrize("size", [8, 28, 48, 96])
@pytest.mark.parametrize(("name", "options"), FORMS, ids=str)
def test_capsules_start_neither_saturated_nor_faded(name: str, options: dict[str, Any], size: int) -> None:
    torch.manual_seed(0)
    for classes in (2, 3, 10, 100) if size < 96 else (3,):
        small = {} if name in ("cnn", "matrixcapsnet") else {"reconstruction": False}
        if size in REFUSED.get((name, *options), ()):  # the authors' forms for other images
            with pytest.raises(ValueError, match=r"image_size must be (larger|divisible)|must fit into the input"):
                NETWORKS[name](3, size, classes, **small, **options)
            continue
        network: Any = NETWORKS[name](3, size, classes, **small, **options)
        images = torch.rand(4, 3, size, size)
        with torch.no_grad():
            activations = network.classify(images).activations
        assert activations.mean() < 0.9 and activations.amax() > 1e-3, (classes, activations)
        if not hasattr(network, "encode"):
            continue
        with torch.no_grad():
            encoded = network.encode(images)
        u, given = (
            (encoded, {}) if isinstance(encoded, Tensor) else (encoded.poses, {"activation": encoded.activations})
        )
        assert name != "capsnet" or u.shape[1] < 10_000
        findings = [finding.name for finding in capsfast.diagnose(network.routing, u, **given).findings]
        assert not findings, (classes, findings)
        if name == "capsnet":
            # The first steps make the primary capsules long. Then the squash must not be flat either.
            long = capsfast.squash(1e3 * u)
            assert network.routing(long).norm(dim=2).mean() < 0.9
