"""Graphs: node capsules are routed to one capsule for each kind of graph (after CapsGNN: Xinyi, Chen 2019).

The graphs are synthetic and have 10 to 20 nodes: a cycle with chords, a tree with extra edges, two communities with a
bridge, and two stars with extra edges. Two rounds of messages make node capsules; a mask takes absent nodes out of the
routing. Numbers: accuracy on 1000 test graphs, of capsules and of a mean over the nodes followed by an MLP, after the
same messages, with about as many parameters.
"""

import torch
from recipe import Labelled, Numbers, command, fit
from torch import Tensor, nn
from torch.nn import functional as F

from capsfast import squash
from capsfast.nn import DigitCaps, MarginLoss

KINDS, NODES, DEGREES = 4, 20, 10


def graph(kind: int) -> Tensor:
    """The adjacency ``[20, 20]`` of a graph of 10 to 20 nodes, all of which have edges; 0 for absent nodes."""
    nodes = torch.arange(int(torch.randint(10, NODES + 1, ())))
    count, half, edges = len(nodes), len(nodes) // 2, torch.zeros(NODES, NODES)
    parents = [(nodes - 1) % count, (torch.rand(count) * nodes).long(), (nodes - 1).clamp(0), (nodes >= half) * half]
    edges[nodes, parents[kind].clamp(0, count - 1)] = 1
    if kind == 2:  # a community is a half of the nodes
        edges[:count, :count] += ((nodes < half) == (nodes < half)[:, None]) * (torch.rand(count, count) < 0.15)
    edges[tuple(torch.randint(count, (2, [4, 2, 0, 4][kind])))] = 1
    return ((edges + edges.T) > 0).float().fill_diagonal_(0)


def graphs(count: int) -> Labelled:
    labels = torch.randint(KINDS, (count,))
    return Labelled(torch.stack([graph(int(kind)) for kind in labels]), labels)


class Network(nn.Module):
    def __init__(self, routed: bool) -> None:
        super().__init__()
        self.routed, self.rounds = routed, nn.ModuleList([nn.Linear(2 * DEGREES, 32), nn.Linear(64, 32)])
        mlp = nn.Sequential(nn.Linear(32, 14), nn.ReLU(), nn.Linear(14, KINDS))
        self.classes = DigitCaps(4 * NODES, KINDS, 8, 16, shared_weight=True) if routed else mlp

    def forward(self, edges: Tensor) -> Tensor:
        degree, present = edges.sum(2, keepdim=True), edges.any(2)
        nodes = F.one_hot(degree[..., 0].long().clamp(max=DEGREES - 1), DEGREES).float()
        for layer in self.rounds:  # of each node beside the mean of its neighbours
            nodes = layer(torch.cat([nodes, edges @ nodes / degree.clamp(min=1)], 2)).relu()
        scores: Tensor
        if self.routed:
            capsules = squash(nodes.unflatten(2, (4, 8))).flatten(1, 2)  # four for each node
            scores = self.classes(capsules, mask=present.repeat_interleave(4, 1)).norm(dim=2)
        else:
            scores = self.classes((nodes * present[..., None]).sum(1) / present.sum(1, keepdim=True))
        return scores


def main(steps: int = 1000) -> Numbers:
    train, test, margin, caps, plain = graphs(4000), graphs(1000), MarginLoss(), Network(True), Network(False)
    fit(caps, lambda edges, labels: margin(caps(edges), labels), train.batches(), steps, 0.01, "capsules")
    fit(plain, lambda edges, labels: F.cross_entropy(plain(edges), labels), train.batches(), steps, 0.01, "plain")
    return {"capsules": test.accuracy(caps), "plain": test.accuracy(plain)}


if __name__ == "__main__":
    command(main)
