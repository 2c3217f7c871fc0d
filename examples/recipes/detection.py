"""Detection: class capsules say which two digits an image holds, and their poses where (after Sabour et al. 2017).

Images of 20 x 20 pixels hold two digits of different classes at random places where they do not overlap, made of the
training or the test digits. The length of a class capsule is the score of its class, and one linear layer for all
classes reads the box of the ink from its pose. The plain network, with about as many parameters, makes a score and a
vector of each class by two linear layers in place of the routing, and reads boxes from the vectors in the same way.
Numbers: the share of 1000 test images whose two digits have the largest scores, 1 in 45 for guesses; the mean
intersection over union (IoU) of the boxes of the classes that are there; and the share of images whose digits are both
found with an IoU above 0.5.
"""

from functools import partial

import torch
from recipe import Labelled, Numbers, command, digits, fit
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import MLP, box_iou, masks_to_boxes

from capsfast.nn import DigitCaps, MarginLoss, PrimaryCaps

SIZE, CLASSES = 20, 10


def scenes(samples: Labelled, count: int) -> Labelled:
    """Images ``[N, 1, 20, 20]``, and for each class 0 or 1 and a box, as shares of the side: ``[N, 10, 5]``."""
    drawn, corners = torch.randint(len(samples.labels), (2, 5 * count)), torch.randint(SIZE - 7, (2, 5 * count, 2))
    apart = (corners[0] - corners[1]).abs().amax(1) >= 8
    fitting = (apart & (samples.labels[drawn[0]] != samples.labels[drawn[1]])).nonzero()[:count, 0]
    drawn, corners = drawn[:, fitting], corners[:, fitting]
    rows, columns = torch.eye(SIZE)[corners[..., None] + torch.arange(8)].unbind(2)  # one-hot, [2, N, 8, 20]
    alone = rows.mT @ samples.inputs[drawn, 0] @ columns  # [2, N, 20, 20], an image for each digit
    boxes = (masks_to_boxes(alone.flatten(0, 1) > 0) + torch.tensor([0, 0, 1, 1])) / SIZE
    targets = torch.zeros(count, CLASSES, 5)
    targets[torch.arange(count), samples.labels[drawn]] = F.pad(boxes, (1, 0), value=1.0).view(2, count, 5)
    return Labelled(alone.sum(0)[:, None], targets)


class Detector(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.vectors, self.box = nn.Sequential(*layers), nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        vectors = self.vectors(images)  # poses [B, 10, 16], without routing behind a score: [B, 10, 17]
        scores = vectors[..., :-16] if vectors.shape[2] > 16 else vectors.norm(dim=2, keepdim=True)
        return torch.cat([scores, self.box(vectors[..., -16:])], 2)


def loss(net: nn.Module, of_classes: nn.Module, weight: float, images: Tensor, targets: Tensor) -> Tensor:
    """The loss of the classes, a sum over them for capsules and a mean for the plain network, and of their boxes."""
    found, there = net(images), targets[..., 0] > 0
    boxes = F.l1_loss(found[there][:, 1:], targets[there][:, 1:])
    return weight * boxes + torch.as_tensor(of_classes(found[..., 0], targets[..., 0]))


def main(steps: int = 1000) -> Numbers:
    train, test = (scenes(samples, count) for samples, count in zip(digits(), (6000, 1000), strict=True))
    caps = Detector(nn.Conv2d(1, 32, 5), nn.ReLU(), PrimaryCaps(32, 4, 8, 5, stride=2), DigitCaps(144, CLASSES, 8, 16))
    convs = [nn.Conv2d(1, 32, 5), nn.ReLU(), nn.Conv2d(32, 48, 5, stride=2), nn.ReLU(), nn.Flatten()]
    plain = Detector(*convs, MLP(48 * 6 * 6, [90, CLASSES * 17]), nn.Unflatten(1, (CLASSES, 17)))
    there, numbers = test.labels[..., 0] > 0, Numbers()
    for name, net, of, weight in (("capsules", caps, MarginLoss(), 5.0), ("plain", plain, nn.BCEWithLogitsLoss(), 0.5)):
        fit(net, partial(loss, net, of, weight), train.batches(), steps, 0.01, name)
        found = net(test.inputs).detach()
        overlap = box_iou(found[there][:, None, 1:], test.labels[there][:, None, 1:]).view(-1, 2)
        both = there.gather(1, found[..., 0].topk(2).indices).all(1)
        measured = {"": both, ", IoU": overlap, ", with IoU > 0.5": both & (overlap > 0.5).all(1)}
        numbers |= {name + what: values.double().mean().item() for what, values in measured.items()}
    return numbers


if __name__ == "__main__":
    command(main)
