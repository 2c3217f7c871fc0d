"""What the recipes share: handwritten digits, one way to train, and a command line.

A recipe is a function ``main(steps)`` that returns its numbers by name, and may draw a picture. ``python
examples/recipes/NAME.py`` calls it, and prints the numbers.
"""

import inspect
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.utils import save_image

from capsfast import data
from capsfast.cli.endings import one_line
from capsfast.storage.files import check_writable

Numbers = dict[str, float]
pictures: list[Path] = []  # the folder for pictures, if they are wanted


class Labelled(NamedTuple):
    """Samples of any kind, a row each, and their classes ``[N]``."""

    inputs: Tensor
    labels: Tensor

    def of(self, *classes: int) -> "Labelled":
        chosen = torch.isin(self.labels, torch.tensor(classes))
        return Labelled(self.inputs[chosen], self.labels[chosen])

    def batches(self, size: int = 64) -> Iterator[tuple[Tensor, Tensor]]:
        """Random batches without an end; every sample once before any comes again."""
        while True:
            for rows in torch.randperm(len(self.labels)).split(size):
                yield self.inputs[rows], self.labels[rows]

    @torch.no_grad()
    def accuracy(self, scores: Callable[[Tensor], Tensor]) -> float:
        """The share of samples whose class has the largest of the ``scores(inputs) [N, classes]``."""
        return (scores(self.inputs).argmax(1) == self.labels).double().mean().item()


def digits() -> tuple[Labelled, Labelled]:
    """1437 images ``[1, 8, 8]`` in [0, 1] for training and 360 for tests: scikit-learn's handwritten digits."""
    sets = data.open_sets("digits", shift=0)
    train, test = (images.batch(torch.arange(len(images))) for images in (sets.train, sets.test))
    return Labelled(train.images, train.labels), Labelled(test.images, test.labels)


def fit(
    net: nn.Module,
    loss: Callable[..., Tensor],
    batches: Iterator[tuple[Tensor, ...]],
    steps: int,
    lr: float = 0.003,
    name: str = "",
) -> nn.Module:
    """Minimises ``loss(*batch)`` by Adam with one cycle of learning rates. Returns the network, in evaluation mode."""
    optimizer = torch.optim.Adam(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps)
    net.train()
    start = time.perf_counter()
    for batch in itertools.islice(batches, steps):
        optimizer.zero_grad()
        loss(*batch).backward()
        optimizer.step()
        schedule.step()
    size = sum(parameter.numel() for parameter in net.parameters())
    print(f"{name or type(net).__name__}: {size} parameters, {time.perf_counter() - start:.1f} s of training")
    return net.eval()


def draw(name: str, *rows: Tensor) -> None:
    """Draws rows of as many images ``[n, 1, H, W]`` in [0, 1] each, fourfold, into ``name.png``, if that is wanted."""
    for folder in pictures:
        images = F.interpolate(torch.cat(rows), scale_factor=4)
        save_image(images, folder / f"{name}.png", nrow=len(rows[0]), padding=4, pad_value=1)


def run(main: Callable[..., Numbers], seed: int = 0, steps: int | None = None) -> Numbers:
    """The numbers of a recipe, after ``steps`` steps or as many as the recipe takes."""
    torch.manual_seed(seed)
    return main(**({} if steps is None else {"steps": steps}))


def command(main: Callable[..., Numbers]) -> None:
    """The command line of a recipe."""

    def start(
        steps: Annotated[int | None, typer.Option(min=1, help="Steps of each training.")] = None,
        seed: int = 0,
        out: Annotated[Path | None, typer.Option(help="Folder for a picture, if the recipe draws one.")] = None,
    ) -> None:
        with one_line(Path(inspect.getfile(main)).stem):
            if out is not None:
                check_writable(out)
                pictures.append(out)
            for what, number in run(main, seed, steps).items():
                print(f"{what}: {number:.4g}")

    start.__doc__ = inspect.getmodule(main).__doc__
    typer.run(start)
