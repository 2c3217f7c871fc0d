"""Segmentation of noisy shapes at 128 x 128 pixels within a gigabyte: slim capsules beside a plain U-Net.

Run ``python examples/shapes.py``. Disks, squares and triangles of similar area lie on a noisy background, a little
turned; a pixel has the classes of the shapes that cover the pixel. The capsule network is a small U-Net of slim
convolutional capsules after LaLonde and Bagci (2018). The plain U-Net has about as many parameters and sees the same
images, with the same loss. The program prints the mean intersection over union (IoU) on new images before and after
training, and the peak of the resident set of the process.
"""

import itertools
import math
import re
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from capsfast import plot
from capsfast.cli.endings import one_line
from capsfast.nn import MarginLoss, PrimaryCaps, SlimConvCaps2d, SlimConvTransposeCaps2d
from capsfast.storage.files import check_writable

SIZE, BATCH, SHAPES, SHOWN = 128, 4, 8, 6
SIDES = {"disk": 24, "square": 4, "triangle": 3}  # of regular polygons, so that one formula draws all
J = len(SIDES)
pixel_loss = MarginLoss(lam=0.25)  # a pixel often has no class at all


def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images ``[count, 1, SIZE, SIZE]``, and the classes of their pixels, bool ``[count, J, SIZE, SIZE]``."""

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, SHAPES, 1, 1, generator=generator)

    kinds = torch.randint(J, (count, SHAPES, 1, 1), generator=generator)
    sides, turn = torch.tensor(list(SIDES.values()))[kinds], uniform(-0.25, 0.25)
    apothem = (uniform(0.06, 0.15) / (sides * torch.tan(math.pi / sides))).sqrt()  # for an area of 0.06 to 0.15
    axis = torch.linspace(-1, 1, SIZE)
    x, y = axis - uniform(-0.9, 0.9), axis[:, None] - uniform(-0.9, 0.9)
    inside = torch.ones(count, SHAPES, SIZE, SIZE, dtype=torch.bool)
    for side in range(max(SIDES.values())):
        angle = turn + 2 * math.pi / sides * side
        inside &= angle.cos() * x + angle.sin() * y < apothem
    light = (uniform(0.3, 0.6) * inside).amax(1, keepdim=True)
    images = (0.25 + light + 0.1 * torch.randn(light.shape, generator=generator)).clamp(0, 1)
    return images, torch.stack([(inside & (kinds == kind)).any(1) for kind in range(J)], 1)


def stage(before: int, after: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU())


class CapsuleNet(nn.Module):
    """Images to the lengths of the class capsules of every pixel, ``[B, J, SIZE, SIZE]``."""

    def __init__(self) -> None:
        super().__init__()
        routed = {"padding": 2, "squash": "exp"}
        self.stem = nn.Sequential(stage(1, 16, 2), stage(16, 16))  # 64 x 64
        self.primary = PrimaryCaps(16, 4, 8, 3, 2, 1, squash="exp", flatten=False)  # 32 x 32, 4 types of size 8
        self.down = SlimConvCaps2d(4, 8, 8, 16, 5, 2, num_iterations=1, **routed)  # 16 x 16
        self.route = SlimConvCaps2d(8, 8, 16, 16, 5, **routed)
        self.up = SlimConvTransposeCaps2d(8, 4, 16, 8, 5, 2, num_iterations=1, **routed)  # 32 x 32
        self.join = SlimConvCaps2d(8, 4, 8, 8, 5, **routed)
        self.classes = SlimConvTransposeCaps2d(4, J, 8, 8, 4, 4, padding=0)  # 128 x 128

    def forward(self, images: Tensor) -> Tensor:
        poses = self.primary(self.stem(images))
        larger = self.up(self.route(self.down(poses)), size=poses.shape[3:])
        return self.classes(self.join(torch.cat([larger, poses], 1))).norm(dim=2)


class UNet(nn.Module):
    """Images to a probability of every class at every pixel."""

    def __init__(self, widths: tuple[int, ...] = (8, 16, 32, 62)) -> None:
        super().__init__()
        levels = list(itertools.pairwise(widths))
        self.start = stage(1, widths[0])
        self.down = nn.ModuleList(nn.Sequential(stage(a, b, 2), stage(b, b)) for a, b in levels)
        self.up = nn.ModuleList(stage(a + b, a) for a, b in levels[::-1])
        self.classes = nn.Conv2d(widths[0], J, 1)

    def forward(self, images: Tensor) -> Tensor:
        passed = [self.start(images)]
        for down in self.down:
            passed.append(down(passed[-1]))
        maps = passed.pop()
        for up in self.up:
            maps = up(torch.cat([F.interpolate(maps, scale_factor=2), passed.pop()], 1))
        return self.classes(maps).sigmoid()


def train(net: nn.Module, lr: float, steps: int, seed: int) -> float:
    """Trains on new images in every step. Returns the seconds."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps)
    net.train()
    start = time.perf_counter()
    for _ in range(steps):
        images, classes = draw(BATCH, generator)
        # For the U-Net too: with cross-entropy most of its pixels stay below 0.5 in so few steps.
        loss = pixel_loss(*(pixels.movedim(1, -1).flatten(0, -2) for pixels in (net(images), classes)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return time.perf_counter() - start


@torch.no_grad()
def segment(net: nn.Module, images: Tensor) -> Tensor:
    """The classes of the pixels, bool ``[B, J, SIZE, SIZE]``."""
    net.eval()
    return torch.cat([net(part) > 0.5 for part in images.split(BATCH)])


def iou(predicted: Tensor, classes: Tensor) -> float:
    """The mean over the classes. Without torchmetrics, whose import takes a quarter of a gigabyte."""
    both, either = (pixels.sum((0, 2, 3)) for pixels in (predicted & classes, predicted | classes))
    return (both / either).mean().item()


def peak() -> float:
    """Peak of the resident set of this process in MiB, on Linux. getrusage also counts the peak of the parent."""
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) / 1024


def main(
    steps: Annotated[int, typer.Option(min=1)] = 250,
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("out"),
    seed: int = 0,
) -> None:
    """Train a capsule network and a plain U-Net to segment shapes, and compare them."""
    with one_line("shapes"):
        check_writable(out)
        images, classes = draw(32, torch.Generator().manual_seed(seed + 1000))
        pictures = {"image": images[:SHOWN], "classes": plot.class_colours(classes[:SHOWN])}
        imported = peak()
        # Each with the better of the learning rates 0.01 and 0.03.
        for name, kind, lr in (("capsules", CapsuleNet, 0.01), ("plain U-Net", UNet, 0.03)):
            torch.manual_seed(seed)
            net = kind()
            before = iou(segment(net, images), classes)
            seconds = train(net, lr, steps, seed)
            predicted = segment(net, images)
            pictures[name] = plot.class_colours(predicted[:SHOWN])
            parameters = sum(parameter.numel() for parameter in net.parameters())
            print(
                f"{name}: mean IoU {before:.3f} before, {iou(predicted, classes):.3f} after {steps} steps; "
                f"{parameters} parameters, {seconds:.1f} s; peak memory {peak():.0f} MiB, {imported:.0f} of them before"
            )
        print(f"wrote {plot.save(plot.images_figure(pictures, [''] * SHOWN), out / 'shapes.png')}")


if __name__ == "__main__":
    typer.run(main)
