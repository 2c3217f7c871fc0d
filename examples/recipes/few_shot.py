"""Few-shot learning: capsule routing makes one vector of samples of a class (Geng et al. 2019, induction networks).

Networks learn on episodes of the digits 0 to 5, and are tested on episodes of the digits 6 to 9, which they never saw:
five samples each of three classes are given, five more of each are to be classified. In training, digits turned or
mirrored are classes of their own. The capsules route the samples of a class, through one matrix for all, to one class
vector. The plain network, a prototypical network (Snell et al. 2017), takes their mean. Both compare a query, through
the same matrix, by its distance to the class vectors; the relation network of Geng et al. is left out. Numbers:
accuracy on the test digits, also before training, since six digits teach little about the others.
"""

from collections.abc import Iterator

import torch
from recipe import Labelled, Numbers, command, digits, fit
from torch import Tensor, nn
from torch.nn import functional as F

import capsfast

WAYS, SHOTS, QUERIES, DIM = 3, 5, 5, 64
ANSWERS = torch.arange(WAYS).repeat_interleave(QUERIES)


class FewShot(nn.Module):
    def __init__(self, capsules: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, DIM))
        self.W, self.scale = nn.Parameter(torch.eye(DIM)[None, None]), nn.Parameter(torch.tensor(10.0))
        self.capsules = capsules

    def induce(self, samples: Tensor) -> Tensor:
        """Class vectors ``[..., DIM]`` of ``[..., shots, DIM]``."""
        if not self.capsules:
            return samples.mean(-2) @ self.W[0, 0].T
        v = capsfast.dynamic_routing(capsfast.squash(samples).flatten(0, -3), self.W, softmax="in")
        return v.view_as(samples[..., 0, :])

    def forward(self, episodes: Tensor) -> Tensor:
        """Scores ``[E, WAYS * QUERIES, WAYS]`` of images ``[E, WAYS, SHOTS + QUERIES, 1, 8, 8]``."""
        vectors = self.encoder(episodes.flatten(0, 2)).view(*episodes.shape[:3], DIM)
        queries = self.induce(vectors[:, :, SHOTS:].flatten(1, 2)[:, :, None])
        return -self.scale * torch.cdist(queries, self.induce(vectors[:, :, :SHOTS])).square()


def sampled(images: list[Tensor], episodes: int = 8) -> Iterator[tuple[Tensor]]:
    while True:
        chosen = [images[label] for _ in range(episodes) for label in torch.randperm(len(images))[:WAYS]]
        drawn = torch.stack([one[torch.randperm(len(one))[: SHOTS + QUERIES]] for one in chosen])
        yield (drawn.unflatten(0, (episodes, WAYS)),)


def main(steps: int = 400) -> Numbers:
    train, test = digits()
    seen = [way.rot90(n, (2, 3)) for c in range(6) for x in [train.of(c).inputs] for way in (x, x.mT) for n in range(4)]
    (unseen,) = next(sampled([test.of(label).inputs for label in range(6, 10)], 500))
    asked, numbers = Labelled(unseen, ANSWERS.expand(len(unseen), -1)), {}
    for name in ("capsules", "plain"):
        net = FewShot(name == "capsules")

        def scores(episodes: Tensor, net: nn.Module = net) -> Tensor:
            return net(episodes).mT

        numbers[f"{name} before training"] = asked.accuracy(scores)
        batches = ((e, ANSWERS.expand(len(e), -1)) for (e,) in sampled(seen))
        fit(net, lambda e, answers, scores=scores: F.cross_entropy(scores(e), answers), batches, steps, 0.001, name)
        numbers[name] = asked.accuracy(scores)
    return numbers


if __name__ == "__main__":
    command(main)
