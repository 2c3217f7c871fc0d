"""Hierarchical labels: capsules of digits are routed again to capsules of three groups of digits (Sabour et al. 2017).

The groups: digits with a loop (0, 6, 8, 9), with straight strokes only (1, 4, 7), and with open curves (2, 3, 5). The
margin loss trains both levels. The plain network has two heads on one hidden layer, about as many parameters, and two
cross-entropies. Numbers on the test images: accuracy of digits and of groups, and "consistent", the share of images
whose predicted group is the group of the predicted digit. Guesses find 0.1 of the digits, the largest group alone is
0.4 of the groups, and a network that says the same for every image is consistent too.
"""

from collections.abc import Callable

import torch
from recipe import Numbers, command, digits, fit
from torch import Tensor, nn
from torch.nn import functional as F

from capsfast.models import CapsNet
from capsfast.nn import DigitCaps, MarginLoss

GROUPS = torch.tensor([0, 1, 2, 2, 1, 2, 0, 1, 0, 0])  # of the digits 0 to 9


class Capsules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.digits = CapsNet(1, 8, conv_channels=32, primary_groups=8, reconstruction=False)
        self.groups = DigitCaps(10, 3, 16, 16)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        lengths, capsules, _ = self.digits(images)  # [B, 10], [B, 10, 16]
        return lengths, self.groups(capsules).norm(dim=2)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        convs = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(), nn.Flatten()]
        self.layers = nn.Sequential(*convs, nn.Linear(64 * 4, 180), nn.ReLU())
        self.digits, self.groups = nn.Linear(180, 10), nn.Linear(180, 3)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.layers(images)
        return self.digits(features), self.groups(features)


def main(steps: int = 1000) -> Numbers:
    train, test = digits()
    numbers: Numbers = {}
    for name, net, loss in (("capsules", Capsules(), MarginLoss()), ("plain", Plain(), F.cross_entropy)):

        def both(images: Tensor, labels: Tensor, net: nn.Module = net, loss: Callable[..., Tensor] = loss) -> Tensor:
            fine, coarse = net(images)
            return loss(fine, labels) + loss(coarse, GROUPS[labels])

        fit(net, both, train.batches(), steps, 0.01, name)
        with torch.no_grad():
            digit, group = (scores.argmax(1) for scores in net(test.inputs))
        right = {"digits": digit == test.labels, "groups": group == GROUPS[test.labels]}
        right["consistent"] = group == GROUPS[digit]
        numbers |= {f"{name}, {what}": share.double().mean().item() for what, share in right.items()}
    return numbers


if __name__ == "__main__":
    command(main)
