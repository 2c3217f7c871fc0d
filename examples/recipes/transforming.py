"""Transforming autoencoder: capsules learn where their parts are from known shifts (Hinton, Krizhevsky, Wang 2011).

A digit lies at a random place of 12 x 12 pixels. The network sees it and a shift, and draws the shifted digit. In each
capsule recognition units give a probability and a position; the shift is added to the position; generation units draw
the capsule's part, which the probability gates. The plain autoencoder, with a code as large and about as many
parameters, gets the shift as two more inputs of its decoder. Numbers, on test digits: R^2 of the pixels that are drawn,
and R^2 of the shift that the capsules tell when the shifted digit is seen too: the mean change of their positions,
weighted by their probabilities.
"""

from collections.abc import Iterator
from itertools import islice

import torch
from recipe import Labelled, Numbers, command, digits, fit
from sklearn.metrics import r2_score
from torch import Tensor, nn

from capsfast.nn import ReconstructionLoss

SIZE, CAPSULES, RECOGNITION, GENERATION, HIDDEN = 12, 24, 24 * 10, 24 * 16, 211  # units of all capsules


def placed(images: Tensor, corners: Tensor) -> Tensor:
    """Images ``[N, 1, 8, 8]``, each with its upper left pixel at a corner ``[N, 2]``: pixels ``[N, 144]``."""
    rows, columns = torch.eye(SIZE)[corners[..., None] + torch.arange(8)].unbind(1)  # one-hot, [N, 8, 12]
    return (rows.mT @ images[:, 0] @ columns).flatten(1)


def pairs(samples: Labelled, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Digits, shifts ``[N, 2]`` in pixels, and the shifted digits."""
    for images, _ in samples.batches(count):
        here, there = torch.randint(SIZE - 7, (2, len(images), 2))
        yield placed(images, here), (there - here).float(), placed(images, there)


class Capsules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.drawn = nn.Linear(SIZE**2, RECOGNITION), nn.Linear(GENERATION, SIZE**2)
        self.recognise = nn.Conv1d(RECOGNITION, CAPSULES * 3, 1, groups=CAPSULES)  # a group is a capsule
        self.generate = nn.Conv1d(CAPSULES * 2, GENERATION, 1, groups=CAPSULES)

    def encode(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities ``[B, 24, 1]`` and positions ``[B, 24, 2]``."""
        found = self.recognise(self.seen(pixels).relu()[..., None]).view(-1, CAPSULES, 3)
        return found[..., :1].sigmoid(), found[..., 1:]

    def forward(self, pixels: Tensor, shift: Tensor) -> Tensor:
        probability, position = self.encode(pixels)
        parts = self.generate((position + shift[:, None]).view(-1, CAPSULES * 2, 1)).relu()
        return torch.as_tensor(self.drawn((parts.view(len(pixels), CAPSULES, -1) * probability).flatten(1)))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SIZE**2, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CAPSULES * 3))
        self.decoder = nn.Sequential(nn.Linear(CAPSULES * 3 + 2, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, SIZE**2))

    def forward(self, pixels: Tensor, shift: Tensor) -> Tensor:
        return torch.as_tensor(self.decoder(torch.cat([self.encoder(pixels), shift], 1)))


def main(steps: int = 3000) -> Numbers:
    (train, test), error, numbers = digits(), ReconstructionLoss(), Numbers()
    capsules, plain = Capsules(), Plain()
    seen, shift, shifted = (torch.cat(parts) for parts in zip(*islice(pairs(test, 360), 5), strict=True))
    for name, net in (("capsules", capsules), ("plain", plain)):
        fit(net, lambda x, s, y, net=net: error(net(x, s), y), pairs(train, 64), steps, 0.01, name)
        numbers[name] = r2_score(shifted, net(seen, shift).detach(), multioutput="variance_weighted")
    (probability, before), (_, after) = capsules.encode(seen), capsules.encode(shifted)
    told = ((after - before) * probability).sum(1) / probability.sum(1)
    return numbers | {"capsules, shift": r2_score(shift, told.detach())}


if __name__ == "__main__":
    command(main)
