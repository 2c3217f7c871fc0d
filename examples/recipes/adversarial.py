"""Adversarial training: networks learn from attacked digits as well as from clean ones (Goodfellow et al. 2015).

A CapsNet and a plain CNN of about the same size are trained twice: on clean digits, and on these and the same digits
attacked by FGSM, which changes every pixel by at most 0.1 to raise the lead of the best wrong class over the true one,
of the network in training. Test digits are attacked for the network under test by PGD, which takes ten steps within the
same bounds: a network that only hides its gradient from one step is found out. Numbers: accuracy on the test digits,
clean and attacked.
"""

from collections.abc import Callable
from functools import partial

import torch
from recipe import Labelled, Numbers, command, digits, draw, fit
from torch import Tensor, nn
from torch.nn import functional as F

from capsfast.models import CNN, CapsNet
from capsfast.nn import MarginLoss
from capsfast.train import fgsm, lead, pgd

EPS = 0.1  # largest change of a pixel

Scores = Callable[[Tensor], Tensor]  # of images: lengths, or logarithms of probabilities


def scored(net: nn.Module, what: str, images: Tensor) -> Tensor:
    found: Tensor = getattr(net(images), what)
    return found.reshape(len(images), -1)


def objective(scores: Scores, loss: Callable[..., Tensor], attacks: bool) -> Callable[..., Tensor]:
    def of_batch(images: Tensor, labels: Tensor) -> Tensor:
        if attacks:
            attacked = fgsm(lambda x: lead(scores(x), labels).sum(), images, EPS)
            images, labels = torch.cat([images, attacked]), labels.repeat(2)
        return loss(scores(images), labels)

    return of_batch


def main(steps: int = 400) -> Numbers:
    (train, test), numbers = digits(), {}
    shown = [test.inputs[:10]]
    for attacks, training in ((False, "clean"), (True, "adversarial")):
        caps = CapsNet(1, 8, conv_channels=64, primary_groups=8, reconstruction=False)
        plain = CNN(1, 8, channels=(32, 32), hidden=(32,), kernel_size=3, dropout=0.0)
        lengths, logs = partial(scored, caps, "lengths"), partial(scored, plain, "capsules")
        for name, net, scores, loss in (("capsules", caps, lengths, MarginLoss()), ("plain", plain, logs, F.nll_loss)):
            fit(net, objective(scores, loss, attacks), train.batches(), steps, 0.01, f"{name}, {training} training")
            attacked = pgd(lambda x, scores=scores: lead(scores(x), test.labels).sum(), test.inputs, EPS)
            shown.append(attacked[:10])
            numbers[f"{name}, {training} training"] = test.accuracy(scores)
            numbers[f"{name}, {training} training, attacked"] = Labelled(attacked, test.labels).accuracy(scores)
    draw("adversarial", *shown)
    return numbers


if __name__ == "__main__":
    command(main)
