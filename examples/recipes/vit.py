"""Vision transformer: tokens are capsules, routed to fewer tokens and then to classes (routing of Tsai et al. 2020).

A digit has 16 patches of 2 x 2 pixels, a token each. Inverted dot-product attention routes the 16 tokens of the first
block to 8 tokens for the second block, and these to ten class capsules. One linear map of a class capsule is the score
of the class. The plain transformer has two blocks too, keeps all tokens, and ends in a linear layer; its tokens and
blocks are wider, for about as many parameters. Numbers: accuracy on the test digits, of the capsules with two passes
of routing and with one, whose coupling is equal, and of the plain transformer.
"""

import torch
from recipe import Numbers, command, digits, fit
from torch import Tensor, nn
from torch.nn import functional as F

from capsfast.nn import RoutedCaps

TOKENS, FEWER, DIM, WIDE = 16, 8, 32, 96


class Tokens(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, dim, 2, stride=2)
        self.places = nn.Parameter(0.02 * torch.randn(TOKENS, dim))

    def forward(self, images: Tensor) -> Tensor:
        patches: Tensor = self.patches(images)
        return patches.flatten(2).mT + self.places  # [B, TOKENS, dim]


def block(dim: int, hidden: int) -> nn.Module:
    return nn.TransformerEncoderLayer(dim, 4, hidden, dropout=0.0, batch_first=True)


def routed(tokens: int, fewer: int, passes: int) -> RoutedCaps:
    routing = "inverted-attention"
    return RoutedCaps(
        tokens, fewer, DIM, DIM, routing=routing, num_iterations=passes, scaled=True, learned_readout=False
    )


class Capsules(nn.Module):
    def __init__(self, passes: int) -> None:
        super().__init__()
        self.first, self.fewer = nn.Sequential(Tokens(DIM), block(DIM, 64)), routed(TOKENS, FEWER, passes)
        self.second, self.classes, self.score = block(DIM, 64), routed(FEWER, 10, passes), nn.Linear(DIM, 1)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.second(self.fewer(self.first(images)).poses)  # [B, FEWER, DIM]
        scores: Tensor = self.score(self.classes(tokens).poses)  # [B, 10, 1]
        return scores.squeeze(2)


def main(steps: int = 500) -> Numbers:
    train, test = digits()
    blocks = nn.Sequential(Tokens(WIDE), block(WIDE, 352), block(WIDE, 352))
    plain = nn.Sequential(blocks, nn.Flatten(), nn.Linear(TOKENS * WIDE, 10))
    numbers = {}
    for name, net in (("capsules", Capsules(2)), ("capsules, one pass", Capsules(1)), ("plain", plain)):
        fit(net, lambda x, labels, net=net: F.cross_entropy(net(x), labels), train.batches(), steps, name=name)
        numbers[name] = test.accuracy(net)
    return numbers


if __name__ == "__main__":
    command(main)
