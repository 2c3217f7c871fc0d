"""Pruning: types of primary capsules that are like others are left out (after OrthCaps, Geng et al. 2024).

A CapsNet and a plain network of convolutions with about as many parameters learn the digits. The score of a capsule
type is its largest cosine similarity to a type of longer capsules, in the mean over places and training images. Half or
three quarters of the 16 types are masked: those with the largest scores, or random ones. The plain network loses the
same share of its 128 channels, those with the smallest weights. Numbers: accuracy on the test digits, also after a
tenth of the training steps with what is left ("tuned").
"""

import copy

import torch
from recipe import Numbers, command, digits, fit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from capsfast.models import CapsNet
from capsfast.nn import MarginLoss

TYPES, PLACES, CHANNELS = 16, 2 * 2, 128


class Masked(nn.Module):
    def __init__(self, net: CapsNet, kept: Tensor) -> None:
        super().__init__()
        self.net = copy.deepcopy(net)
        self.mask = torch.isin(torch.arange(TYPES), kept).repeat_interleave(PLACES)

    def forward(self, images: Tensor) -> Tensor:
        u = self.net.encode(images)
        return self.net.routing.capsules(u, mask=self.mask.expand(len(u), -1)).activations


def unlike_first(u: Tensor) -> Tensor:
    """The types of primary capsules ``[N, TYPES * PLACES, dim]``, those most alike to a longer type last."""
    types = u.unflatten(1, (TYPES, PLACES)).transpose(1, 2).flatten(0, 1)  # [N * PLACES, TYPES, dim]
    by_length: Tensor = types.norm(dim=2).mean(0).argsort(descending=True)
    directions = F.normalize(types[:, by_length], dim=2)
    alike = (directions @ directions.mT).mean(0)
    longer = torch.ones(TYPES, TYPES, dtype=torch.bool).tril(-1)
    return by_length[alike.masked_fill(~longer, -torch.inf).amax(1).argsort()]


def main(steps: int = 600) -> Numbers:
    (train, test), margin, tenth = digits(), MarginLoss(), max(1, steps // 10)
    caps = CapsNet(1, 8, conv_channels=64, primary_groups=TYPES, reconstruction=False)
    layers = [nn.Conv2d(1, 64, 3), nn.ReLU(), nn.Conv2d(64, CHANNELS, 3, stride=2, bias=False), nn.ReLU()]
    plain = nn.Sequential(*layers, nn.Flatten(), nn.Linear(CHANNELS * PLACES, 157), nn.ReLU(), nn.Linear(157, 10))
    fit(caps, lambda images, labels: margin(caps(images).lengths, labels), train.batches(), steps)
    fit(plain, lambda images, labels: F.cross_entropy(plain(images), labels), train.batches(), steps, name="plain")
    with torch.no_grad():
        order, shuffled = unlike_first(caps.encode(train.inputs)), torch.randperm(TYPES)
    numbers = {"capsules": test.accuracy(Masked(caps, order)), "plain": test.accuracy(plain)}
    for share in (0.5, 0.75):
        kept, thinned = int(TYPES * (1 - share)), copy.deepcopy(plain)
        prune.ln_structured(thinned[2], "weight", amount=share, n=2, dim=0)
        masked = {"capsules": Masked(caps, order[:kept]), "random capsules": Masked(caps, shuffled[:kept])}
        for name, net in {**masked, "plain": thinned}.items():
            loss, less = F.cross_entropy if net is thinned else margin, f"{name} without {share:.0%}"
            numbers[less] = test.accuracy(net)
            fit(net, lambda x, labels, net=net, loss=loss: loss(net(x), labels), train.batches(), tenth, 0.001, less)
            numbers[f"{less}, tuned"] = test.accuracy(net)
    return numbers


if __name__ == "__main__":
    command(main)
