"""Speed of capsfast.accelerate on published layers, and on the CapsNet of Sabour, Frosst, Hinton (2017) with two
layers.

A layer or network and its accelerated copy take turns, so that a drift of the machine affects both.
"""

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import capsfast
from benchmarks.common import CPU, keep, options
from capsfast.bench.timing import interleave
from tests.support.backends import Shape
from tests.support.published import PUBLISHED, Published
from tests.support.published_layers import CapsuleLayer, LayerRouting

SIZES = Shape(B=32, I=1152, J=10, D=16, K=8)
# The batch of the networks.
BATCH = 128


class CapsNet(nn.Module):
    """Images ``[B, 1, 28, 28]`` to lengths ``[B, 10]`` and reconstructions ``[B, 784]``.

    softmax: ``"in"`` is the widely copied layer with a softmax over the input capsules and a weight ``[J, I, K, D]``;
    ``"out"`` is the paper's layer, with a weight ``[1, I, J, D, K]`` that is repeated for every sample.
    """

    def __init__(self, softmax: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 256, 9)
        self.primary_capsules = CapsuleLayer(8, -1, 256, 32, kernel_size=9, stride=2)
        self.digit_capsules = CapsuleLayer(10, 1152, 8, 16) if softmax == "in" else LayerRouting(1152, 10, 8, 16)
        self.decoder = nn.Sequential(
            *(nn.Linear(160, 512), nn.ReLU(), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 784), nn.Sigmoid())
        )
        self.softmax = softmax

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        v = self.digit_capsules(self.primary_capsules(F.relu(self.conv1(images))))
        if self.softmax == "in":  # [J, B, 1, 1, D]
            v = v.squeeze(3).squeeze(2).transpose(0, 1)
        lengths = v.norm(dim=-1)
        chosen = F.one_hot(lengths.argmax(1), 10)[:, :, None]
        return lengths, self.decoder((v * chosen).flatten(1))


def of_layer(row: Published, seconds: float) -> dict[str, Any]:
    """The layer at the sizes of the paper's last layer: what accelerate reports, with times forward and backward."""
    torch.manual_seed(0)
    layer, inputs = row.make(SIZES), row.example(SIZES)
    if row.lazy:
        layer(*inputs)
    report = capsfast.accelerate(layer, inputs, only_faster=False, seconds=seconds)
    (found,) = report.layers
    told: dict[str, Any] = {"layer": row.name, "fused": bool(report.fused), "reason": found.reason}
    if found.speed is None or found.identification is None:
        return told
    float64 = max(found.identification.forward_difference, found.identification.gradient_difference)
    times = {"own_seconds": found.speed.own, "fused_seconds": found.speed.fused, "samples": found.speed.samples}
    return {**told, "float64": float64, **times, "ratio": found.speed.ratio}


def of_network(softmax: str, dtype: torch.dtype | None, seconds: float) -> dict[str, Any]:
    """A training step of the network, under autocast if a dtype is given."""
    torch.manual_seed(0)
    own = CapsNet(softmax)
    images, labels = torch.rand(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    present = F.one_hot(labels, 10)
    fast = copy.deepcopy(own)
    # accelerate() runs without autocast: it need not know the autocast of later calls.
    report = capsfast.accelerate(fast, images)

    def step(model: nn.Module) -> None:
        with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
            lengths, reconstructed = model(images)
        margin = present * F.relu(0.9 - lengths) ** 2 + 0.5 * (1 - present) * F.relu(lengths - 0.1) ** 2
        loss = margin.sum(1).mean() + 0.0005 * (reconstructed.float() - images.flatten(1)).square().sum(1).mean()
        torch.autograd.grad(loss, list(model.parameters()))

    timings = interleave({"own": lambda: step(own), "fused": lambda: step(fast)}, CPU, seconds)
    row = {f"{name}_seconds": timing.median for name, timing in timings.items()}
    row["ratio"] = row["own_seconds"] / row["fused_seconds"]
    calls = report.calls()["digit_capsules"]
    assert calls.fused and not calls.own, calls
    kind = "float32" if dtype is None else f"autocast {dtype}".replace("torch.", "")
    return {"softmax": softmax, "batch": BATCH, "dtype": kind, **row}


def main() -> None:
    arguments = options("accelerate", __doc__, 2.0)
    record: dict[str, list[dict[str, Any]]] = {"layers": [], "networks": []}
    for row in PUBLISHED:
        record["layers"].append(of_layer(row, arguments.seconds))
        print(record["layers"][-1], flush=True)
    for softmax in ("in", "out"):
        for dtype in (None, torch.bfloat16):
            record["networks"].append(of_network(softmax, dtype, arguments.seconds))
            print(record["networks"][-1], flush=True)
    keep(arguments, "accelerate", **record)


if __name__ == "__main__":
    main()
