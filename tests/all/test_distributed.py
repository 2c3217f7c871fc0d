"""Two processes on the CPU (gloo) train like one process, with the fused routing."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from capsfast.models import CapsNet
from capsfast.nn import CapsNetLoss

from ..support.ranks import on_two_ranks

ROOT = Path(__file__).resolve().parents[2]
BATCH, STEPS = 8, 4

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")


def make_model() -> CapsNet:
    torch.manual_seed(1)
    return CapsNet(1, 10, 4, conv_channels=6, primary_groups=2, digit_dim=5, learned_logits=True, bias=True)


def descend(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Gradients of the first step, and the parameters after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = CapsNetLoss(0.01)
    found = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model(images[step], labels[step]), images[step], labels[step]).total.backward()
        if step == 0:
            found |= {f"d{name}": value.grad.clone() for name, value in model.named_parameters()}
        optimizer.step()
    return found | {name: value.detach() for name, value in model.named_parameters()}


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    return torch.rand(STEPS, BATCH, 1, 10, 10, generator=draw), torch.randint(0, 4, (STEPS, BATCH), generator=draw)


def one_of_two(folder: Path, rank: int) -> None:
    images, labels = (each.chunk(2, dim=1)[rank] for each in data())
    model = DistributedDataParallel(make_model())
    found = descend(model, images, labels)
    torch.save({name.replace("module.", ""): value for name, value in found.items()}, folder / f"{rank}.pt")


def test_distributed_data_parallel_equals_one_process(tmp_path: Path) -> None:
    on_two_ranks(partial(one_of_two, tmp_path), tmp_path)
    model = make_model()
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    one = descend(model, *data())
    two = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, value in one.items():
        assert torch.equal(two[0][name], two[1][name])
        torch.testing.assert_close(two[0][name], value, rtol=1e-5, atol=1e-6 * float(value.abs().max()))
    # Parameters moved by more than the tolerance.
    assert all((one[name] - start[name]).norm() > 1e-5 * start[name].norm() for name in start)
    assert {"routing.W", "routing.routing.logits", "routing.routing.bias"} <= start.keys()


def trained(out: Path, launcher: list[str], *arguments: str) -> dict[str, Any]:
    pytest.importorskip("lightning")
    pytest.importorskip("sklearn")
    options = "--conv-channels 8 --primary-groups 4 --digit-dim 4 --epochs 1 --limit-train-batches 6 --no-progress"
    command = [*launcher, "-m", "capsfast", "train", *options.split(), "--flip", "--clip", "1"]
    command += ["--accelerator", "cpu", "--out", str(out), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # Only the first process reports.
    assert done.stdout.count("6 steps in") == 1
    return json.loads((out / "record.json").read_text())  # type: ignore[no-any-return]


LAUNCHERS = {
    "lightning": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone")
    trained(out, [sys.executable], "--batch-size", "32")
    return out


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_training_in_two_processes_equals_one(alone: Path, tmp_path: Path, launcher: str) -> None:
    """The same images in the same steps, with the same shifts: weights, loss and test results agree."""
    one = json.loads((alone / "record.json").read_text())
    two = trained(tmp_path, LAUNCHERS[launcher], "--batch-size", "16", "--devices", "2", "--strategy", "ddp")
    assert one["processes"] == 1 and two["processes"] == 2 and one["steps"] == two["steps"] == 6
    assert two["results"] == pytest.approx(one["results"], rel=1e-4)
    weights = [torch.load(out / "last.ckpt")["state_dict"] for out in (alone, tmp_path)]
    flat = [torch.cat([value.flatten() for value in weight.values()]) for weight in weights]
    # Adam turns a gradient of pure rounding into a whole step. So few weights may differ, and the norm only a little.
    moved = 6 * 1e-3 * flat[0].numel() ** 0.5
    assert (flat[0] - flat[1]).norm() < 1e-4 * moved


@pytest.mark.slow
def test_two_processes_agree_on_the_best_checkpoint(tmp_path: Path) -> None:
    """Both processes must compare the test after the last step with the test before, or one waits for ever."""
    ddp, options = ["--devices", "2", "--strategy", "ddp"], ["--test-every", "4", "--best"]
    record = trained(tmp_path / "two", LAUNCHERS["lightning"], *ddp, *options, "--batch-size", "16")
    validated = record["curve"]["val_accuracy"]
    steps = [torch.load(tmp_path / "two" / f"{name}.ckpt")["global_step"] for name in ("best", "last")]
    assert len(validated) == 2 and steps == [6 if validated[1][1] > validated[0][1] else 4, 6]
    # Both hold out the images that one process holds out.
    one = trained(tmp_path / "one", [sys.executable], *options, "--batch-size", "32")
    assert record["parts"] == one["parts"] and record["parts"]["val"]["images"] == 142
    for name in ("last", "best"):
        assert record[name] == pytest.approx(one[name], rel=1e-4) and record[name]["step"] in steps


@pytest.mark.slow
def test_pixels_are_counted_over_both_processes(tmp_path: Path) -> None:
    """A checkpoint of a segmentation network, tested by one process, and by two with a share of the images each."""
    pytest.importorskip("lightning")
    pytest.importorskip("sklearn")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def said(*words: str) -> str:
        command = [sys.executable, "-m", "capsfast", *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=True).stdout

    size = "--conv-channels 4 --types 2 --digit-dim 4 --option dims=[4,4] --option kernel_size=3 --max-steps 2"
    said("train", "--model", "segcaps", "--data", "multi:digits", *size.split(), "--out", str(tmp_path))
    test = ["test", f"--ckpt_path={tmp_path / 'last.ckpt'}", "--trainer.accelerator=cpu"]
    one, two = said(*test), said(*test, "--trainer.devices=2", "--trainer.strategy=ddp")
    assert one.startswith("test margin ") and "test iou " in one and two.splitlines()[-1] == one.strip()
