"""GAN: the discriminator has class capsules, and a long one is "a real digit of my class" (after Jaiswal et al. 2018).

A generator makes digits of a given class from noise. The discriminator learns that the capsule of the class is long for
real digits, and that all capsules are short for generated ones; the generator learns to make its class capsule long.
Both use the margin loss with margins of 1 and 0 and a squash that is steep at 0: with those of Sabour et al. (2017)
short capsules leave the generator nearly no gradient. The plain discriminator, with about as many parameters, has a
logit for each class and binary cross-entropy. Numbers: accuracy on the test digits of a logistic regression that learns
from 2000 generated digits alone, 0.1 for guesses, and of one that learns from the real training digits.
"""

from collections.abc import Callable
from itertools import islice

import torch
from recipe import Labelled, Numbers, command, digits, draw
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F

from capsfast.nn import DigitCaps, Length, MarginLoss, PrimaryCaps

CLASSES, NOISE, WIDTH, LR = 10, 16, 128, 0.0005


class Generator(nn.Sequential):
    def __init__(self) -> None:
        hidden = [nn.Linear(NOISE + CLASSES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        super().__init__(*hidden, nn.Linear(WIDTH, 64), nn.Sigmoid(), nn.Unflatten(1, (1, 8, 8)))

    def of(self, labels: Tensor) -> Tensor:
        return torch.as_tensor(self(torch.cat([torch.randn(len(labels), NOISE), F.one_hot(labels, CLASSES)], 1)))


def compete(generator: Generator, judge: nn.Module, loss: Callable[..., Tensor], real: Labelled, steps: int) -> None:
    makes, judges = (torch.optim.Adam(net.parameters(), LR, (0.5, 0.999)) for net in (generator, judge))
    for images, labels in islice(real.batches(), steps):
        there, fake = F.one_hot(labels, CLASSES).float(), generator.of(labels)
        judges.zero_grad()
        (loss(judge(images), there) + loss(judge(fake.detach()), torch.zeros_like(there))).backward()
        judges.step()
        makes.zero_grad()
        loss(judge(fake), there).backward()
        makes.step()


def score(learned: Labelled, asked: Labelled) -> float:
    linear = LogisticRegression(max_iter=1000).fit(learned.inputs.flatten(1), learned.labels)
    return float(linear.score(asked.inputs.flatten(1), asked.labels))


def main(steps: int = 1500) -> Numbers:
    (train, test), labels = digits(), torch.arange(CLASSES).repeat(200)
    primary, classes = PrimaryCaps(32, 8, 8, 3, stride=2), DigitCaps(8 * 4, CLASSES, 8, 16, squash="exp")
    capsules = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), primary, classes, Length())
    convs = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(), nn.Flatten()]
    plain = nn.Sequential(*convs, nn.Linear(256, 153), nn.ReLU(), nn.Linear(153, CLASSES))
    numbers, rows = {"real digits": score(train, test)}, []
    for name, judge, loss in (
        ("capsules", capsules, MarginLoss(1.0, 0.0, 1.0)),
        ("plain", plain, F.binary_cross_entropy_with_logits),
    ):
        generator = Generator()
        compete(generator, judge, loss, train, steps)
        made = Labelled(generator.of(labels).detach(), labels)
        numbers[name] = score(made, test)
        rows.append(made.inputs[:10])
    draw("discriminator", *rows)
    return numbers


if __name__ == "__main__":
    command(main)
