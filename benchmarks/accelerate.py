"""The CapsNet of Sabour, Frosst, Hinton (2017) written the popular way, before and after capsfast.accelerate.

    python -m benchmarks.accelerate --out docs/records/accelerate-capsnet.json

One model and an accelerated copy of it take turns, so that a drift of the machine meets both. Their outputs and
gradients are compared first.
"""

import argparse
import copy
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import capsfast
from capsfast.bench.checkout import why_not_this_one
from capsfast.bench.record import environment
from capsfast.bench.timing import interleave
from capsfast.files import write_text
from tests.support.published_layers import CapsuleLayer, LayerRouting

CPU = torch.device("cpu")
# Of the routing weight: with these the coupling moves, so that iterations count in the differences. Over the 1152 input
# capsules it is 1/1152 at first, and votes have to be longer for that.
WEIGHT_STD = {"in": 10.0, "out": 1.0}
LEAST_ROUNDS = 9
KINDS = ("routing forward", "routing forward+backward", "network forward+backward")


class CapsNet(nn.Module):
    """Images ``[B, 1, 28, 28]`` to lengths ``[B, 10]`` and reconstructions ``[B, 784]``.

    softmax: ``"in"`` is the widely copied layer whose softmax runs over the input capsules, with ``[J, I, K, D]``;
    ``"out"`` is the paper's, with the ``[1, I, J, D, K]`` that is repeated for every sample.
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

    def capsules(self, images: Tensor) -> Tensor:
        return self.primary_capsules(F.relu(self.conv1(images)))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        v = self.digit_capsules(self.capsules(images))
        if self.softmax == "in":  # [J, B, 1, 1, D]
            v = v.squeeze(3).squeeze(2).transpose(0, 1)
        lengths = v.norm(dim=-1)
        chosen = F.one_hot(lengths.argmax(1), 10)[:, :, None]
        return lengths, self.decoder((v * chosen).flatten(1))


def loss_of(model: CapsNet, images: Tensor, labels: Tensor) -> Tensor:
    """Sabour et al. 2017, eq. 4, and the reconstruction."""
    lengths, made = model(images)
    present = F.one_hot(labels, 10)
    margin = present * F.relu(0.9 - lengths) ** 2 + 0.5 * (1 - present) * F.relu(lengths - 0.1) ** 2
    return margin.sum(1).mean() + 0.0005 * (made - images.flatten(1)).square().sum(1).mean()


def differences(own: CapsNet, fast: CapsNet, images: Tensor, labels: Tensor) -> dict[str, float]:
    """The largest ones, absolute and over the largest number of the tensor: of the outputs and of all gradients."""
    outputs, gradients = [], []
    for model in (own, fast):
        with torch.no_grad():
            outputs.append(list(model(images)))
        gradients.append(torch.autograd.grad(loss_of(model, images, labels), list(model.parameters())))
    found = {}
    for name, (one, other) in {"outputs": outputs, "gradients": gradients}.items():
        off = [(a - b).abs().max().item() for a, b in zip(one, other, strict=True)]
        sizes = [a.abs().max().item() for a in one]
        found[f"{name}_absolute"] = max(off)
        found[f"{name}_relative"] = max(each / size for each, size in zip(off, sizes, strict=True))
    return found


def moved(own: CapsNet, u: Tensor) -> float:
    """How far the iterations after the first move the output, over its largest number."""
    once = copy.deepcopy(own.digit_capsules)
    once.num_iterations = 1
    with torch.no_grad():
        v = own.digit_capsules(u)
        return ((v - once(u)).abs().max() / v.abs().max()).item()


def measure(softmax: str, batch: int, std: float, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    own = CapsNet(softmax)
    weight = next(own.digit_capsules.parameters())
    with torch.no_grad():
        weight.copy_(std * torch.randn_like(weight))
    images, labels = torch.rand(batch, 1, 28, 28), torch.randint(10, (batch,))
    fast = copy.deepcopy(own)
    report = capsfast.accelerate(fast, images, seconds=0)
    if report.fused != ("digit_capsules",):
        raise SystemExit(f"accelerate: {report}")
    print(report, flush=True)
    found: dict[str, Any] = {"softmax": softmax, "batch": batch, "weight_std": std}
    found["differences"] = differences(own, fast, images, labels)
    with torch.no_grad():
        u = own.capsules(images)
    found["moved_by_iterations"] = moved(own, u)
    u.requires_grad_()

    def forward(model: CapsNet) -> None:
        with torch.no_grad():
            model.digit_capsules(u)

    def both(model: CapsNet) -> None:
        torch.autograd.grad(model.digit_capsules(u).sum(), [u, *model.digit_capsules.parameters()])

    def step(model: CapsNet) -> None:
        torch.autograd.grad(loss_of(model, images, labels), list(model.parameters()))

    runs: tuple[Callable[[CapsNet], None], ...] = (forward, both, step)
    for name, run in zip(KINDS, runs, strict=True):
        steps = {"own": lambda _, run=run: run(own), "fused": lambda _, run=run: run(fast)}
        timings = interleave(steps, CPU, seconds, LEAST_ROUNDS)
        ratio = timings["own"].median / timings["fused"].median
        found[name] = {**{which: asdict(timing) for which, timing in timings.items()}, "speed_up": ratio}
        print(f"softmax {softmax}, {name}: {ratio:.1f}x", flush=True)
    return found


def rows(measured: list[dict[str, Any]]) -> list[str]:
    """Those of the table in docs/adoption.md."""
    return [
        f"| `{found['softmax']}` | {name} | {1e3 * found[name]['own']['median']:.0f} | "
        f"{1e3 * found[name]['fused']['median']:.0f} | {found[name]['speed_up']:.1f}x |"
        for found in measured
        for name in KINDS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each measurement")
    parser.add_argument("--std", type=float, help=f"standard deviation of the routing weight, not {WEIGHT_STD}")
    given = parser.parse_args()
    hides = why_not_this_one("benchmarks.accelerate")
    if hides:
        parser.error(hides)
    torch.set_num_threads(given.threads)
    record = {
        "command": f"python -m benchmarks.accelerate {' '.join(sys.argv[1:])}".strip(),
        "environment": environment(CPU),
        "measured": [
            measure(softmax, given.batch, std if given.std is None else given.std, given.seconds)
            for softmax, std in WEIGHT_STD.items()
        ],
    }
    for found in record["measured"]:
        print(f"softmax {found['softmax']}: iterations move the output by {found['moved_by_iterations']:.2f}")
    print("\n".join(rows(record["measured"])))
    if given.out is not None:
        write_text(given.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
