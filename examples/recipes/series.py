"""Time series: capsules along one axis tell six kinds of waveform apart (after Zhao et al. 2018, who do so for text).

The series are synthetic, 128 long: sine, square, sawtooth, chirp, and a slow and a fast burst in either order. The
frequency, phase and place are random, and noise is added. Numbers: accuracy on 1200 test series, of capsules and of a
plain network of convolutions with about as many parameters.
"""

import torch
from recipe import Labelled, Numbers, command, fit
from torch import Tensor, nn
from torch.nn import functional as F

from capsfast import squash
from capsfast.nn import ClassCaps1d, ConvCaps1d, MarginLoss

KINDS, LENGTH, NOISE = 6, 128, 0.7


def waves(count: int) -> Labelled:
    """``count`` series ``[1, 128]`` and the number of the kind of each."""
    time, labels = torch.arange(LENGTH) / LENGTH, torch.randint(KINDS, (count,))
    phase, place = torch.rand(2, count, 1)
    turns = phase + (2 + 6 * torch.rand(count, 1)) * time  # 2 to 8 periods
    sine, saw = (2 * torch.pi * turns).sin(), 2 * turns.frac() - 1
    chirp = (2 * torch.pi * (phase + (turns - phase) * (0.5 + time))).sin()
    first, second = ((-(((time - 0.2 - 0.3 * place - gap) / 0.08) ** 2)).exp() for gap in (0.0, 0.3))
    slow, fast = ((2 * torch.pi * (phase + periods * time)).sin() for periods in (8, 20))
    bursts = [2 * (first * slow + second * fast), 2 * (first * fast + second * slow)]
    kinds = torch.stack([sine, sine.sign(), saw, chirp, *bursts], 1)
    series = kinds[torch.arange(count), labels] + NOISE * torch.randn(count, LENGTH)
    return Labelled(series[:, None], labels)


class Capsules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 32, 17, stride=4)
        self.parts = ConvCaps1d(4, 8, in_dim=8, out_dim=8, kernel_size=7, stride=2, squash="exp")
        self.classes = ClassCaps1d(8, KINDS, in_dim=8, out_dim=16, size=11, coordinates=False)

    def forward(self, series: Tensor) -> Tensor:
        poses = squash(self.conv(series).relu().unflatten(1, (4, 8)), dim=2)  # [B, types, size, places]
        return self.classes(self.parts(poses)).activations


def main(steps: int = 1000) -> Numbers:
    train, test, margin = waves(4000), waves(1200), MarginLoss()
    layers = [nn.Conv1d(1, 32, 17, stride=4), nn.ReLU(), nn.Conv1d(32, 64, 7, stride=2), nn.ReLU()]
    plain = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 11, KINDS))
    caps = Capsules()
    fit(caps, lambda series, labels: margin(caps(series), labels), train.batches(), steps, 0.01)
    fit(plain, lambda series, labels: F.cross_entropy(plain(series), labels), train.batches(), steps, 0.01, "plain")
    return {"capsules": test.accuracy(caps), "plain": test.accuracy(plain)}


if __name__ == "__main__":
    command(main)
