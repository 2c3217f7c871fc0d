"""Contrastive pretraining: a capsule encoder learns from pairs of views of digits, without labels (Chen et al. 2020).

The views are the digit under random affine maps, with noise; NT-Xent, the loss of SimCLR, draws the two views of an
image together. Both encoders make vectors of 128 numbers, the capsules as 16 capsules of 8, and have about as many
parameters; there is no projection head. Then a logistic regression learns from five labelled images of each digit, on
the frozen vectors, standardised. Numbers: accuracy on the test digits, means of 20 draws of the labelled images, also
before pretraining and on the pixels; guesses give 0.1.
"""

import statistics

import torch
from recipe import Numbers, command, digits, fit
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional as F

from capsfast.models import CapsNet

TEMPERATURE, SHOTS, DRAWS = 0.2, 5, 20


class Capsules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = CapsNet(1, 8, 16, digit_dim=8, conv_channels=32, primary_groups=8, reconstruction=False)

    def forward(self, images: Tensor) -> Tensor:
        """Vectors ``[B, 128]``: 16 capsules of 8 numbers."""
        return self.net(images).capsules.flatten(1)


def plain() -> nn.Module:
    convs = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*convs, nn.Linear(256, 85), nn.ReLU(), nn.Linear(85, 128))


def view(images: Tensor) -> Tensor:
    """Each image ``[1, 8, 8]`` shifted by up to a pixel, slightly turned, scaled and sheared, and with noise."""
    turned = torch.eye(2) + 0.15 * torch.randn(len(images), 2, 2)
    shifted = 0.25 * (2 * torch.rand(len(images), 2, 1) - 1)
    grid = F.affine_grid(torch.cat([turned, shifted], 2), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False) + 0.1 * torch.randn_like(images)


def nt_xent(encoder: nn.Module, images: Tensor) -> Tensor:
    """The loss of SimCLR: of all other views in the batch, each view finds the one of the same image."""
    vectors = F.normalize(encoder(torch.cat([view(images), view(images)])), dim=1)
    similar = (vectors @ vectors.T / TEMPERATURE).fill_diagonal_(-torch.inf)
    return F.cross_entropy(similar, torch.arange(len(vectors)).roll(len(images)))


@torch.no_grad()
def probe(encoder: nn.Module) -> float:
    """The mean accuracy of logistic regressions that learn from a few labelled images each."""
    accuracies: list[float] = []
    train, test = digits()
    scaler = StandardScaler().fit(encoder(train.inputs))
    known, asked = (scaler.transform(encoder(images.inputs)) for images in (train, test))
    for draw in range(DRAWS):  # the same images for every encoder
        order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(draw))
        few = torch.cat([order[train.labels[order] == label][:SHOTS] for label in range(10)])
        linear = LogisticRegression(max_iter=1000).fit(known[few], train.labels[few])
        accuracies.append(linear.score(asked, test.labels))
    return statistics.mean(accuracies)


def main(steps: int = 1000) -> Numbers:
    train, numbers = digits()[0], {"pixels": probe(nn.Flatten())}
    for name, encoder in (("capsules", Capsules()), ("plain", plain())):
        numbers[f"{name} before pretraining"] = probe(encoder)
        fit(encoder, lambda images, _, encoder=encoder: nt_xent(encoder, images), train.batches(128), steps, 0.01, name)
        numbers[name] = probe(encoder)
    return numbers


if __name__ == "__main__":
    command(main)
