"""Masked pretraining: a capsule encoder fills in hidden patches of digits, without labels (after He et al. 2022).

Patches of 2 x 2 pixels are hidden with probability one half. One linear layer and a sigmoid reconstruct the image from
the vectors of the encoder; the loss is the squared error of the hidden pixels. The encoders, capsules and plain with
about as many parameters, and the logistic regression on five labelled images of each digit are those of `contrastive`.
Numbers: accuracy on the test digits, means of 20 draws of the labelled images, also before pretraining and on the
pixels; guesses give 0.1.
"""

import torch
from contrastive import Capsules, plain, probe
from recipe import Numbers, command, digits, fit
from torch import Tensor, nn
from torch.nn import functional as F

from capsfast.nn import Decoder

PATCH, FILL, SHARE = 2, -1.0, 0.5


class Masked(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, Decoder(16, 8, (1, 8, 8), hidden=(), masked=False)

    def forward(self, images: Tensor) -> Tensor:
        """The mean squared error of hidden pixels of ``images [B, 1, 8, 8]``."""
        patches = torch.rand(len(images), 1, 8 // PATCH, 8 // PATCH) < SHARE
        hidden = patches.repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)
        vectors = self.encoder(images.masked_fill(hidden, FILL))
        return F.mse_loss(self.decoder(vectors.unflatten(1, (16, 8)))[hidden], images[hidden])


def main(steps: int = 1000) -> Numbers:
    train, numbers = digits()[0], {"pixels": probe(nn.Flatten())}
    for name, encoder in (("capsules", Capsules()), ("plain", plain())):
        numbers[f"{name} before pretraining"] = probe(encoder)
        net = Masked(encoder)
        fit(net, lambda images, _, net=net: net(images), train.batches(128), steps, 0.01, name)
        numbers[name] = probe(encoder)
    return numbers


if __name__ == "__main__":
    command(main)
