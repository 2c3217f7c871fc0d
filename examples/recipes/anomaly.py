"""Anomaly detection: a capsule autoencoder knows some digits, and reconstructs others badly (Sabour et al. 2017).

Autoencoders learn to reconstruct the digits 0 to 4, without labels. The score of a test digit is its reconstruction
error; the digits 5 to 9 are the anomalies. The plain autoencoder is fully connected, with about as many parameters.
Numbers: the area under the ROC curve, 0.5 for guesses and 1 for scores that tell all anomalies.
"""

import torch
from recipe import Numbers, command, digits, draw, fit
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from capsfast.models import CapsAutoEncoder
from capsfast.nn import ReconstructionLoss

CODE = 16  # numbers that an image is decoded from: in both networks


class Capsules(CapsAutoEncoder):
    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(images).reconstruction


def plain(hidden: int) -> nn.Module:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
    decoder = nn.Sequential(nn.Linear(CODE, hidden), nn.ReLU(), nn.Linear(hidden, 64), nn.Sigmoid())
    return nn.Sequential(encoder, nn.Linear(hidden, CODE), decoder, nn.Unflatten(1, (1, 8, 8)))


def main(steps: int = 600) -> Numbers:
    train, test = digits()
    known, error = train.of(0, 1, 2, 3, 4), ReconstructionLoss()
    nets = {"capsules": Capsules(1, 8, CODE // 8, 8, conv_channels=32, primary_groups=4), "plain": plain(704)}
    areas = {}
    for name, net in nets.items():
        fit(net, lambda images, labels, net=net: error(net(images), images), known.batches(), steps, name=name)
        with torch.no_grad():
            errors = (net(test.inputs) - test.inputs).square().sum((1, 2, 3))
        areas[name] = float(roc_auc_score(test.labels > 4, errors))
    shown = torch.stack([test.of(digit).inputs[0] for digit in range(10)])
    draw("anomaly", shown, *(net(shown).detach() for net in nets.values()))
    return areas


if __name__ == "__main__":
    command(main)
