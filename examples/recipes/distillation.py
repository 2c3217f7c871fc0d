"""Knowledge distillation: a plain network learns from the class capsules of a CapsNet (Hinton et al. 2015).

The student is a hundred times smaller than the teacher. It learns once from the labels, and once from the teacher's
softened lengths too. Numbers: accuracy on the test digits.
"""

import torch
from recipe import Numbers, command, digits, fit
from torch import Tensor, nn
from torch.nn import functional as F

from capsfast.models import CapsNet
from capsfast.nn import MarginLoss

TEMPERATURE = 0.2  # lengths lie in [0, 1], so a softmax of them is soft already


def student() -> nn.Module:
    pooled = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(pooled, nn.Linear(8 * 9, 10))


def main(steps: int = 600) -> Numbers:
    train, test = digits()
    net = CapsNet(1, 8, conv_channels=64, primary_groups=8, reconstruction=False)
    margin = MarginLoss()
    teacher = fit(net, lambda images, labels: margin(net(images).lengths, labels), train.batches(), steps)

    def distilled(images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            soft = (teacher(images).lengths / TEMPERATURE).softmax(1)
        scores = taught(images)
        return F.cross_entropy(scores, labels) + F.cross_entropy(scores, soft)

    alone, taught = student(), student()
    fit(alone, lambda images, labels: F.cross_entropy(alone(images), labels), train.batches(), steps, 0.01, "student")
    fit(taught, distilled, train.batches(), steps, 0.01, "student of the teacher")
    found = {"teacher": lambda images: teacher(images).lengths, "student": alone, "student of the teacher": taught}
    return {name: test.accuracy(scores) for name, scores in found.items()}


if __name__ == "__main__":
    command(main)
