"""Several interests of a user against one mean: retrieval from synthetic click sequences.

Run ``python examples/interests.py``. Items lie in groups, and every user likes a few of the groups. There are more
groups than an embedding has numbers. So the mean of a user's clicks lies near groups that the user does not like. Both
networks are two towers with the same embeddings and one matrix of the same size, and both learn by sampled softmax. One
takes the mean of the clicked items. The other routes the items to interest capsules, and attends to the capsules with
the target item (MIND, Li et al. 2019). The program prints the hit rate: how often the next click is among the first k
items of the whole catalogue.
"""

import math
import time
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from capsfast.nn import InterestCapsules, LabelAwareAttention, interest_scores

BATCH = 128
NEGATIVES = 256
TOP = (10, 50)
# Interests are shorter than 1, so without a factor the softmax over items is flat.
SCALE = 2.0


class Clicks(NamedTuple):
    """histories ``[users, length]`` of items, lengths ``[users]``, next_clicks ``[users]``."""

    histories: Tensor
    lengths: Tensor
    next_clicks: Tensor

    def rows(self, chosen: Tensor) -> "Clicks":
        return Clicks(*(each[chosen] for each in self))


class World(NamedTuple):
    """Sizes of the synthetic world. A user clicks items of 2 to ``most_interests`` groups."""

    groups: int = 60
    group_size: int = 10
    most_interests: int = 4
    length: int = 24

    @property
    def items(self) -> int:
        return self.groups * self.group_size

    def clicks(self, users: int, generator: torch.Generator) -> Clicks:
        """Each click takes one of the user's groups, and in this group an item by popularity."""
        liked = torch.rand(users, self.groups, generator=generator).topk(self.most_interests, 1).indices
        count = torch.randint(2, self.most_interests + 1, (users, 1), generator=generator)
        which = (torch.rand(users, self.length + 1, generator=generator) * count).long()
        popularity = 1 / torch.arange(1, self.group_size + 1)
        item = torch.multinomial(popularity, users * (self.length + 1), replacement=True, generator=generator)
        clicked = liked.gather(1, which) * self.group_size + item.view(users, -1)
        lengths = torch.randint(self.length // 2, self.length + 1, (users,), generator=generator)
        return Clicks(clicked[:, 1:], lengths, clicked[:, 0])


class MeanTower(nn.Module):
    """The mean of the clicked items, and a matrix: one vector for a user."""

    def __init__(self, items: int, dim: int) -> None:
        super().__init__()
        self.items = nn.Embedding(items, dim)
        self.linear = nn.Linear(dim, dim, bias=False)

    def interests(self, clicks: Clicks) -> tuple[Tensor, Tensor | None]:
        there = torch.arange(clicks.histories.shape[1]) < clicks.lengths[:, None]
        clicked = self.items(clicks.histories) * there[..., None]
        return self.linear(clicked.sum(1) / clicks.lengths[:, None])[:, None], None

    def forward(self, clicks: Clicks) -> Tensor:
        return self.interests(clicks)[0][:, 0]


class InterestTower(nn.Module):
    """Interest capsules: up to ``num_interests`` vectors for a user. In training attention makes one vector of them."""

    def __init__(self, items: int, dim: int, num_interests: int, length: int) -> None:
        super().__init__()
        self.items = nn.Embedding(items, dim)
        self.capsules = InterestCapsules(num_interests, dim, dim, max_length=length, count="floor", gradient="last")
        self.attention = LabelAwareAttention(math.inf)

    def interests(self, clicks: Clicks) -> tuple[Tensor, Tensor | None]:
        vectors, mask = self.capsules(self.items(clicks.histories), clicks.lengths)
        return SCALE * vectors, mask

    def forward(self, clicks: Clicks) -> Tensor:
        vectors, mask = self.interests(clicks)
        return self.attention(vectors, self.items(clicks.next_clicks), mask)


Tower = MeanTower | InterestTower


def sampled_softmax(tower: Tower, clicks: Clicks, generator: torch.Generator) -> Tensor:
    """Cross-entropy of the next click against negatives, which are drawn uniformly for the whole batch."""
    user, target = tower(clicks), tower.items(clicks.next_clicks)
    drawn = torch.randint(tower.items.num_embeddings, (NEGATIVES,), generator=generator)
    scores = user @ tower.items(drawn).T
    scores = scores.masked_fill(drawn == clicks.next_clicks[:, None], -math.inf)
    right = (user * target).sum(1, keepdim=True)
    return F.cross_entropy(torch.cat([right, scores], 1), torch.zeros(len(user), dtype=torch.long))


@torch.no_grad()
def hit_rates(tower: Tower, clicks: Clicks) -> list[float]:
    """For each k of TOP: the share of users whose next click is among the k items with the largest scores."""
    found = torch.zeros(len(TOP))
    for rows in torch.arange(len(clicks.lengths)).split(1024):
        part = clicks.rows(rows)
        vectors, mask = tower.interests(part)
        best = interest_scores(vectors, tower.items.weight, mask).topk(max(TOP), 1).indices
        hits = best == part.next_clicks[:, None]
        found += torch.stack([hits[:, :k].any(1).sum() for k in TOP])
    return (found / len(clicks.lengths)).tolist()


def train(tower: Tower, clicks: Clicks, epochs: int, seed: int) -> float:
    """Trains the tower. Returns the seconds."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(tower.parameters(), lr=0.02)
    start = time.perf_counter()
    for _ in range(epochs):
        for rows in torch.randperm(len(clicks.lengths), generator=generator).split(BATCH):
            loss = sampled_softmax(tower, clicks.rows(rows), generator)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return time.perf_counter() - start


def compare(users: int, epochs: int, dim: int, seed: int) -> dict[str, list[float]]:
    """Hit rates of both towers on new users."""
    world = World()
    generator = torch.Generator().manual_seed(seed)
    clicks, others = world.clicks(users, generator), world.clicks(4096, generator)
    found = {}
    for name in ("mean pooling", "interest capsules"):
        torch.manual_seed(seed)
        tower: Tower = MeanTower(world.items, dim)
        if name == "interest capsules":
            tower = InterestTower(world.items, dim, world.most_interests, world.length)
        seconds = train(tower, clicks, epochs, seed)
        found[name] = hit_rates(tower, others)
        rates = ", ".join(f"hit rate@{k} {rate:.1%}" for k, rate in zip(TOP, found[name], strict=True))
        parameters = sum(each.numel() for each in tower.parameters())
        print(f"{name}: {rates}; {parameters} parameters, {seconds:.1f} s of training")
    return found


def main(
    users: Annotated[int, typer.Option(min=1)] = 8000,
    epochs: Annotated[int, typer.Option(min=1)] = 15,
    dim: Annotated[int, typer.Option(min=1, help="Numbers of an embedding.")] = 8,
    seed: int = 0,
) -> None:
    """Train mean pooling and interest capsules on synthetic clicks, and compare their hit rates."""
    found = compare(users, epochs, dim, seed)
    for n, k in enumerate(TOP):
        print(f"hit rate@{k}: {found['interest capsules'][n] / found['mean pooling'][n]:.2f} times mean pooling")


if __name__ == "__main__":
    typer.run(main)
