"""Uncertainty by dropout: networks that also drop features at test time, 20 times (Gal, Ghahramani 2016).

A CapsNet drops primary capsules, and a plain CNN of about the same size drops features of its last hidden layer. Each
classifies noisy test digits once without dropout. Three scores should tell its errors: the deviation of the class's
activation over 20 passes, one minus its mean, and one minus the activation of the one pass.
Numbers: the area under the ROC curve, 0.5 for guesses and 1 if a score tells all errors; and the share of errors.
"""

import torch
from recipe import Numbers, command, digits, fit
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F

from capsfast.models import CNN, CapsNet
from capsfast.nn import MarginLoss

DROPPED, NOISE = 0.2, 0.3  # share of features dropped, deviation of a pixel


@torch.no_grad()
def scores(net: nn.Module, drops: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The predicted classes, and the uncertainties by name."""
    largest, classes = net(images).lengths.max(1)
    drops.train()  # the rest of the network stays in evaluation mode
    passes = torch.stack([net(images).lengths for _ in range(20)])
    drops.eval()
    of_class = {"deviation": passes.std(0), "mean": 1 - passes.mean(0)}
    found = {name: values.gather(1, classes[:, None])[:, 0] for name, values in of_class.items()}
    return classes, found | {"one pass": 1 - largest}


def main(steps: int = 600) -> Numbers:
    train, test = digits()
    images, labels = test.inputs.repeat(5, 1, 1, 1), test.labels.repeat(5)
    noisy = (images + NOISE * torch.randn_like(images)).clamp(0, 1)
    caps = CapsNet(1, 8, conv_channels=64, primary_groups=8, reconstruction=False)
    caps.primary.register_forward_hook(lambda layer, _, u: F.dropout1d(u, DROPPED, layer.training))
    plain, margin = CNN(1, 8, channels=(32, 32), hidden=(32,), kernel_size=3, dropout=DROPPED), MarginLoss()
    fit(caps, lambda images, labels: margin(caps(images).lengths, labels), train.batches(), steps)
    fit(plain, lambda images, labels: F.nll_loss(plain(images).capsules[..., 0], labels), train.batches(), steps)
    numbers: Numbers = {}
    for name, net, drops in (("capsules", caps, caps.primary), ("plain", plain, plain.dropout)):
        classes, found = scores(net, drops, noisy)
        wrong = classes != labels
        numbers |= {f"{name}, {score}": float(roc_auc_score(wrong, values)) for score, values in found.items()}
        numbers[f"{name}, errors"] = wrong.double().mean().item()
    return numbers


if __name__ == "__main__":
    command(main)
