"""Masked pretraining: a capsule encoder fills in hidden patches of digits, without labels (after He et al. 2022).

Patches of 2 x 2 pixels are hidden with probability one half. One linear layer and a sigmoid reconstruct the image from
the vectors of the encoder; the loss is the squared error of the hidden pixels. The encoders, capsules and plain with
about as many parameters, and the logistic regression on five labelled images of each digit are those of `contrastive`.
Numbers: accuracy on the test digits, means of 20 draws of the labelled images, also before pretraining and on the
pixels; guesses give 0.1. And R^2 of the hidden pixels of the test digits.
"""

import torch
from contrastive import Capsules, plain, probe
from recipe import Numbers, command, digits, draw, fit
from sklearn.metrics import r2_score
from torch import Tensor, nn
from torch.nn import functional as F

from capsfast.nn import Decoder

PATCH, FILL, SHARE = 2, -1.0, 0.5


class Masked(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, Decoder(16, 8, (1, 8, 8), hidden=(), masked=False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the encoder sees of ``images [B, 1, 8, 8]``, the reconstructions, and which pixels are hidden."""
        patches = torch.rand(len(images), 1, 8 // PATCH, 8 // PATCH) < SHARE
        hidden = patches.repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)
        seen = images.masked_fill(hidden, FILL)
        return seen, self.decoder(self.encoder(seen).unflatten(1, (16, 8))), hidden


def main(steps: int = 1000) -> Numbers:
    (train, test), nets = digits(), {}
    numbers = {"pixels": probe(nn.Flatten())}
    for name, encoder in (("capsules", Capsules()), ("plain", plain())):
        numbers[f"{name} before pretraining"] = probe(encoder)
        net = nets[name] = Masked(encoder)

        def loss(images: Tensor, labels: Tensor, net: nn.Module = net) -> Tensor:
            _, found, hidden = net(images)
            return F.mse_loss(found[hidden], images[hidden])

        fit(net, loss, train.batches(128), steps, 0.01, name)
        numbers[name] = probe(encoder)
    for name, net in nets.items():
        _, found, hidden = net(test.inputs)
        numbers[f"{name}, hidden pixels"] = r2_score(test.inputs[hidden], found[hidden].detach())
    shown = test.inputs[:10]
    draw("masked", shown, *(row.detach() for net in nets.values() for row in net(shown)[:2]))
    return numbers


if __name__ == "__main__":
    command(main)
