"""Which way does it move? Convolutional capsules over time, height and width beside a plain 3-D network.

Run ``python examples/clips.py``. A clip is a few noisy frames of a blob that moves and a blob that stands still. The
class is the direction of the motion, one of eight, so no single frame tells the class. The capsule network is a small
relative of VideoCapsuleNet (Duarte et al. 2018). The plain network has about as many parameters and sees the same clips
in the same order. The program prints the accuracy on new clips, and draws some of them with the predicted directions.
"""

import math
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

import capsfast
from capsfast import plot
from capsfast.cli.endings import one_line
from capsfast.nn import ClassCaps3d, ConvCaps3d, MarginLoss
from capsfast.storage.files import check_writable

FRAMES, SIZE, BATCH, SHOWN = 8, 20, 16, 6
DIRECTIONS = ("E", "NE", "N", "NW", "W", "SW", "S", "SE")


def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Clips ``[count, 1, FRAMES, SIZE, SIZE]``, and the directions of the blobs that move, ``[count]``."""
    labels = torch.randint(len(DIRECTIONS), (count,), generator=generator)
    angle = (labels * (2 * math.pi / len(DIRECTIONS)))[:, None, None]
    gone = torch.tensor([1.0, 0.0])[:, None] * (torch.arange(FRAMES) - (FRAMES - 1) / 2)  # pixels, one a frame
    middle = SIZE / 2 + (torch.rand(2, count, 2, 1, generator=generator) - 0.5) * (SIZE - FRAMES)
    x, y = middle[0] + angle.cos() * gone, middle[1] - angle.sin() * gone  # [count, 2, FRAMES]
    across, down = (torch.exp(-((torch.arange(SIZE) - centre[..., None]) ** 2) / 3) for centre in (x, y))
    blobs = (down[..., None] * across[..., None, :]).amax(1)
    noise = 0.2 * torch.randn(blobs.shape, generator=generator)
    return (0.2 + 0.6 * blobs + noise).clamp(0, 1)[:, None], labels


def stage(before: int, after: int, *window: int | tuple[int, ...]) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(before, after, *window), nn.BatchNorm3d(after))


class CapsuleNet(nn.Module):
    """Clips to the lengths of the class capsules ``[B, 8]``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(stage(1, 16, 5, (1, 2, 2), 2), nn.ReLU())  # 8 x 10 x 10
        self.primary = stage(16, 4 * 8, 3, (1, 2, 2), 1)  # 8 x 5 x 5, 4 types of size 8
        self.middle = ConvCaps3d(4, 4, 8, 8, kernel_size=3, stride=2, padding=1, squash="exp")  # 4 x 3 x 3
        # A motion is the same everywhere. Sums of coordinates would also start too long for the squash to have a slope.
        self.classes = ClassCaps3d(4, len(DIRECTIONS), 8, 16, (4, 3, 3), coordinates=False)
        self.loss = MarginLoss()

    def forward(self, clips: Tensor) -> Tensor:
        poses = self.primary(self.conv(clips)).unflatten(1, (4, 8))
        return self.classes(self.middle(capsfast.squash(poses, 2))).poses.norm(dim=2)


class PlainNet(nn.Module):
    """Clips to scores ``[B, 8]``."""

    def __init__(self) -> None:
        super().__init__()
        conv, half = (stage(1, 16, 5, (1, 2, 2), 2), stage(16, 32, 3, (1, 2, 2), 1))
        layers = [conv, nn.ReLU(), half, nn.ReLU(), stage(32, 28, 3, 2, 1), nn.ReLU(), nn.Flatten()]
        self.layers = nn.Sequential(*layers, nn.Linear(28 * 4 * 3 * 3, len(DIRECTIONS)))
        self.loss = F.cross_entropy

    def forward(self, clips: Tensor) -> Tensor:
        return self.layers(clips)


def train(net: CapsuleNet | PlainNet, steps: int, seed: int) -> float:
    """Trains on new clips in every step. Returns the seconds."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, steps)
    start = time.perf_counter()
    for _ in range(steps):
        clips, labels = draw(BATCH, generator)
        loss = net.loss(net(clips), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return time.perf_counter() - start


def compare(steps: int, seed: int, out: Path) -> dict[str, float]:
    """The accuracy of both networks on new clips."""
    clips, labels = draw(512, torch.Generator().manual_seed(seed + 1000))
    accuracy = {}
    for name, kind in (("plain 3-D network", PlainNet), ("capsules", CapsuleNet)):
        torch.manual_seed(seed)
        net = kind()
        seconds = train(net, steps, seed)
        with torch.no_grad():
            predicted = net.eval()(clips).argmax(1)
        accuracy[name] = (predicted == labels).double().mean().item()
        parameters = sum(parameter.numel() for parameter in net.parameters())
        print(f"{name}: accuracy {accuracy[name]:.1%}; {parameters} parameters, {seconds:.1f} s of training")
    titles = [f"{n + 1}: {DIRECTIONS[labels[n]]}, predicted {DIRECTIONS[predicted[n]]}" for n in range(SHOWN)]
    shown = {title: clip.transpose(0, 1) for title, clip in zip(titles, clips, strict=False)}
    figure = plot.images_figure(shown, [f"frame {frame + 1}" for frame in range(FRAMES)], "predictions of the capsules")
    print(f"wrote {plot.save(figure, out / 'clips.png')}")
    return accuracy


def main(
    steps: Annotated[int, typer.Option(min=1)] = 800,
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("out"),
    seed: int = 0,
) -> None:
    """Train a capsule network and a plain network to tell the direction of a motion, and compare them."""
    with one_line("clips"):
        check_writable(out)
        compare(steps, seed, out)


if __name__ == "__main__":
    typer.run(main)
