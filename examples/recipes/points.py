"""Point clouds: each latent capsule of an autoencoder draws a patch (Zhao et al. 2019, 3D point capsule networks).

The clouds are synthetic: 128 noisy points on a cube, sphere, octahedron, tube, cone or torus, stretched and turned at
random. Autoencoders learn without labels by the Chamfer distance, the mean distance of a point to the nearest point of
the other cloud, in both directions. The plain one differs in the latent layer alone: a fully connected layer, with
about as many parameters, makes the vectors from which the same decoder draws patches. Numbers: accuracy on 1200 test
clouds of a logistic regression, which learns from the codes of the 3000 training clouds, also before the autoencoder is
trained, 1/6 for guesses; and the Chamfer distance, where less is better.
"""

from collections.abc import Callable

import torch
from recipe import Labelled, Numbers, command, fit
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import MLP

from capsfast import squash
from capsfast.nn import DigitCaps

KINDS, POINTS, NOISE = 6, 128, 0.05


def clouds(count: int) -> Labelled:
    """``count`` clouds ``[128, 3]`` and the number of the kind of each."""
    solids = [F.normalize(torch.randn(count, POINTS, 3), p, dim=2) for p in (1, 2, torch.inf)]
    around, along = 2 * torch.pi * torch.rand(2, count, POINTS)
    height = along / torch.pi - 1
    profiles = [(torch.ones_like(height), height), ((1 - height) / 2, height), (1 + along.cos() / 3, along.sin() / 3)]
    round_ones = [torch.stack([radius * around.cos(), radius * around.sin(), z], 2) for radius, z in profiles]
    labels, stretch = torch.randint(KINDS, (count,)), 0.5 + torch.rand(count, 1, 3)
    points = torch.stack(solids + round_ones, 1)[torch.arange(count), labels] * stretch
    turns, _ = torch.linalg.qr(torch.randn(count, 3, 3))
    return Labelled(points @ turns + NOISE * torch.randn(count, POINTS, 3), labels)


def chamfer(drawn: Tensor, points: Tensor) -> Tensor:
    distances = torch.cdist(drawn, points)
    return distances.amin(1).mean() + distances.amin(2).mean()


class AutoEncoder(nn.Module):
    def __init__(self, capsules: bool) -> None:
        super().__init__()
        self.points, self.patch = MLP(3, [64, 128, 256]), MLP(16 + 2, [64, 64, 3])
        self.latent = DigitCaps(32, 8, 8, 16) if capsules else nn.Sequential(nn.Flatten(), nn.Linear(256, 8 * 16))

    def encode(self, points: Tensor) -> Tensor:
        """Codes ``[B, 8 * 16]`` of clouds ``[B, 128, 3]``."""
        pooled = squash(self.points(points).amax(1).unflatten(1, (32, 8)))
        return torch.flatten(self.latent(pooled), 1)

    def forward(self, points: Tensor) -> Tensor:
        """Every latent vector draws 16 points, each from a random place of a square."""
        vectors = self.encode(points).view(-1, 8, 1, 16).expand(-1, -1, 16, -1)
        return torch.flatten(self.patch(torch.cat([vectors, torch.rand_like(vectors[..., :2])], 3)), 1, 2)


@torch.no_grad()
def accuracy(encode: Callable[[Tensor], Tensor], train: Labelled, test: Labelled) -> float:
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return float(probe.fit(encode(train.inputs), train.labels).score(encode(test.inputs), test.labels))


def main(steps: int = 350) -> Numbers:
    train, test, numbers = clouds(3000), clouds(1200), {}
    for name in ("capsules", "plain"):
        net = AutoEncoder(name == "capsules")
        numbers[f"{name} before training"] = accuracy(net.encode, train, test)
        fit(net, lambda points, _, net=net: chamfer(net(points), points), train.batches(32), steps, name=name)
        numbers[name] = accuracy(net.encode, train, test)
        numbers[f"{name}, Chamfer distance"] = chamfer(net(test.inputs), test.inputs).item()
    return numbers


if __name__ == "__main__":
    command(main)
