"""Quantised weights: a trained CapsNet keeps its weights as 8-bit integers (Jacob et al. 2018, Krishnamoorthi 2018).

Every parameter becomes int8, with one scale for the tensor. A second network computes in float32 with these weights:
only the weights are rounded, not the activations or the routing. Numbers: accuracy on the test digits with both, the
largest difference of a class length on them, the mean difference, and the kilobytes of the parameters with their
scales. There is no plain network here.
"""

import copy

import torch
from recipe import Numbers, command, digits, fit
from torch import Tensor, nn

from capsfast.models import CapsNet
from capsfast.nn import MarginLoss

Int8 = dict[str, tuple[Tensor, Tensor]]  # the integers and the scale of each parameter


def quantised(net: nn.Module) -> Int8:
    found = {}
    for name, weight in net.named_parameters():
        scale = weight.detach().abs().amax().clamp(min=1e-12) / 127
        found[name] = ((weight.detach() / scale).round().to(torch.int8), scale)
    return found


def restored(net: nn.Module, stored: Int8) -> nn.Module:
    other = copy.deepcopy(net)
    other.load_state_dict({name: integers * scale for name, (integers, scale) in stored.items()}, strict=False)
    return other


def main(steps: int = 600) -> Numbers:
    train, test = digits()
    net, margin = CapsNet(1, 8, conv_channels=64, primary_groups=8, reconstruction=False), MarginLoss()
    fit(net, lambda images, labels: margin(net(images).lengths, labels), train.batches(), steps, name="CapsNet")
    stored = quantised(net)
    small = restored(net, stored)
    with torch.no_grad():
        errors = (small(test.inputs).lengths - net(test.inputs).lengths).abs()
    return {
        "accuracy float32": test.accuracy(lambda images: net(images).lengths),
        "accuracy int8": test.accuracy(lambda images: small(images).lengths),
        "largest error of a length": errors.max().item(),
        "mean error of a length": errors.mean().item(),
        "kilobytes float32": sum(weight.nbytes for weight in net.parameters()) / 1000,
        "kilobytes int8": sum(integers.nbytes + scale.nbytes for integers, scale in stored.values()) / 1000,
    }


if __name__ == "__main__":
    command(main)
