"""PUBLISHED: kinds of published routing layers, and the properties of each.

published_layers and published_variants have the layers, written without capsfast. Probe them with float64 as torch's
default dtype (:func:`float64`): most make their logits with a bare torch.zeros.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import published_layers as layers
from . import published_variants as variants
from .backends import Shape

# All different, so that a shape tells its axes.
SIZES = Shape(B=3, I=7, J=4, D=5, K=6)
NO_EPS = 1e-20


class Published(NamedTuple):
    """One kind of layer.

    name: of the row. build: makes the layer from sizes and a namespace with the classes: published_layers or, if
    ``compat``, capsfast.compat. inputs: makes the arguments of a call. weight: the name of the parameter, None for
    votes.
    order: the axes of the weight as letters, ``1`` an axis of length 1, two letters in brackets one merged axis. The
    weight is shared along axes of ``IJDK`` that are absent. out: the axes of the result, likewise. softmax, gradient,
    squash, eps, num_iterations, leaky, squash_last: options for capsfast.dynamic_routing. averaged: the layer averages
    the
        logits over the batch, as capsfast.compat.averaged_routing does.
    logits, bias: names of the parameters or buffers with this role; logits_order: the axes of logits. mask: whether the
    last input is the mask. transposed: the input is ``[B, K, I]``. lazy: parameters exist after one forward.
    compat: capsfast.compat has the layer. reproducible: whether options give the same result.
    """

    name: str
    build: Callable[[Any, Shape], nn.Module]
    order: str | None
    weight: str | None = "W"
    inputs: Callable[[Shape], tuple[Any, ...]] = lambda s: (torch.randn(s.B, s.I, s.K),)
    out: str = "BJD"
    softmax: str = "out"
    gradient: str = "full"
    squash: str = "paper"
    eps: float = 1e-8
    num_iterations: int = 3
    averaged: bool = False
    leaky: bool = False
    squash_last: bool = True
    logits: str | None = None
    logits_order: str = "IJ"
    bias: str | None = None
    mask: bool = False
    transposed: bool = False
    lazy: bool = False
    compat: bool = False
    reproducible: bool = True

    def make(self, sizes: Shape = SIZES) -> nn.Module:
        """The published layer."""
        return self.build(layers, sizes)

    def example(self, sizes: Shape = SIZES) -> tuple[Any, ...]:
        """Inputs of a call: first the tensor of capsules or votes."""
        return self.inputs(sizes)


def votes(s: Shape) -> tuple[Tensor]:
    return (torch.randn(s.B, s.I, s.J, s.D),)


def with_mask(s: Shape) -> tuple[Tensor, Tensor]:
    """Each sample masks other inputs; the first masks none."""
    present = torch.arange(s.I) < torch.tensor([s.I - b % (s.I - 1) for b in range(s.B)])[:, None]
    return torch.randn(s.B, s.I, s.K), present.to(torch.get_default_dtype())


def transposed(s: Shape) -> tuple[Tensor]:
    return (torch.randn(s.B, s.K, s.I),)


def capsules(**options: Any) -> Callable[[Any, Shape], nn.Module]:
    return lambda _, s: variants.Capsules(s.I, s.K, s.J, s.D, **options)


PUBLISHED = [
    Published("DynamicRouting", lambda k, s: k.DynamicRouting(s.I, s.J, s.K, s.D, 3), "1IJDK", compat=True),
    Published(
        "DynamicRouting of votes",
        lambda k, s: k.DynamicRouting(2),
        None,
        None,
        lambda s: (*votes(s), s.B),
        num_iterations=2,
        compat=True,
    ),
    Published(
        "DynamicRouting, num_input_capsules",
        lambda k, s: k.DynamicRouting(
            num_input_capsules=s.I, num_output_capsules=s.J, input_capsule_dim=s.K, output_capsule_dim=s.D
        ),
        "IJKD",
        weight="weight",
        compat=True,
    ),
    Published(
        "DynamicRoutingLayer",
        lambda k, s: k.DynamicRoutingLayer(s.I, s.J, s.K, s.D),
        "IJDK",
        gradient="last",
        compat=True,
    ),
    Published(
        "DynamicRoutingLayer, shared",
        lambda k, s: k.DynamicRoutingLayer(s.I, s.J, s.K, s.D, 2, share_weights=True),
        "1JDK",
        gradient="last",
        num_iterations=2,
        compat=True,
    ),
    Published(
        "DigitCaps",
        lambda k, s: k.DigitCaps(num_lower=s.I, num_higher=s.J, lower_dim=s.K, higher_dim=s.D, num_routing=4),
        "IJDK",
        num_iterations=4,
        compat=True,
    ),
    Published(
        "DigitCaps, in_dim",
        lambda k, s: k.DigitCaps(in_dim=s.K, in_caps=s.I, num_caps=s.J, dim_caps=s.D, num_routing=3),
        "1JIDK",
        gradient="last",
        squash="eps_outside",
        compat=True,
    ),
    Published(
        "DigitCaps, in_capsules",
        lambda k, s: k.DigitCaps(in_capsules=s.I, in_dim=s.K, num_capsules=s.J, capsule_dim=s.D),
        "1IJDK",
        squash="eps_outside",
        num_iterations=2,
        compat=True,
    ),
    Published(
        "DigitCapsules",
        lambda k, s: k.DigitCapsules(s.I, s.K, s.J, s.D),
        "1IJDK",
        squash="eps_outside",
        compat=True,
    ),
    Published(
        "Router", lambda k, s: k.Router(s.I, s.J, s.K, s.D, 3), "IJKD", weight="weight", softmax="in", compat=True
    ),
    Published(
        "CapsuleLayer",
        lambda k, s: k.CapsuleLayer(s.J, s.I, s.K, s.D),
        "JIKD",
        weight="route_weights",
        out="JB11D",
        softmax="in",
        eps=NO_EPS,
        compat=True,
    ),
    Published(
        "DenseCapsule",
        lambda k, s: k.DenseCapsule(s.I, s.K, s.J, s.D),
        "JIDK",
        weight="weight",
        gradient="last",
        squash="eps_outside",
        compat=True,
    ),
    Published(
        "AgreementRouting",
        lambda k, s: k.AgreementRouting(s.I, s.J, 2),
        None,
        None,
        votes,
        eps=NO_EPS,
        logits="b",
        compat=True,
    ),
    Published(
        "CapsLayer",
        lambda k, s: k.CapsLayer(s.I, s.K, s.J, s.D, k.AgreementRouting(s.I, s.J, 3)),
        "IK(JD)",
        weight="weights",
        eps=NO_EPS,
        num_iterations=4,
        logits="routing_module.b",
        compat=True,
    ),
    Published(
        "CapsuleLinear",
        lambda k, s: k.CapsuleLinear(s.J, s.K, s.D, routing_type="dynamic", bias=False, squash=False),
        "JDK",
        weight="weight",
        eps=NO_EPS,
        squash_last=False,
        compat=True,
    ),
    Published(
        "CapsuleLinear, own weights",
        lambda k, s: k.CapsuleLinear(s.J, s.K, s.D, s.I, False, "dynamic", bias=True, squash=False),
        "JIDK",
        weight="weight",
        eps=NO_EPS,
        squash_last=False,
        bias="bias",
        compat=True,
    ),
    Published(
        "batch mean, transposed",
        lambda _, s: variants.BatchMeanTransposed(s.K, s.I, s.J, s.D, 3),
        "1IJDK",
        weight="weight",
        inputs=transposed,
        out="BJD1",
        eps=NO_EPS,
        averaged=True,
        transposed=True,
    ),
    Published(
        "batch mean, softmax over inputs",
        lambda _, s: variants.BatchMeanOverInputs(s.J, s.I, s.K, s.D),
        "1IJDK",
        out="BJD1",
        softmax="in",
        averaged=True,
    ),
    Published(
        "merged rows",
        lambda _, s: variants.MergedRows(s.I, s.K, s.J, s.D),
        "I(JD)K",
        weight="weight",
        out="B(JD)",
        squash="eps_outside",
        eps=1e-7,
        num_iterations=2,
    ),
    Published("eps 1e-7", capsules(squash="1e-7"), "1IJDK", eps=1e-7),
    Published("eps 1e-9, softmax over inputs", capsules(squash="1e-9", axis=1), "1IJDK", eps=1e-9, softmax="in"),
    Published(
        "eps outside", capsules(squash="outside", num_iterations=5), "1IJDK", squash="eps_outside", num_iterations=5
    ),
    Published("no eps", capsules(squash="none", num_iterations=1), "1IJDK", eps=NO_EPS, num_iterations=1),
    Published("half", capsules(squash="half"), "1IJDK", squash="half", eps=NO_EPS),
    Published("exp", capsules(squash="exp"), "1IJDK", squash="exp", eps=NO_EPS),
    Published("learned logits and bias", capsules(learned=True), "1IJDK", logits="b", logits_order="1IJ1", bias="bias"),
    Published("leaky", capsules(leaky=True), "1IJDK", leaky=True),
    Published(
        "leaky, half", capsules(leaky=True, squash="half"), "1IJDK", leaky=True, squash="half", eps=NO_EPS
    ),  # NLP-Capsule (Zhao et al. 2019)
    Published(
        "latent capsules",
        lambda _, s: variants.LatentCaps(s.J, s.I, s.D, s.K),
        "JIDK",
        gradient="last",
        eps=NO_EPS,
    ),
    Published(
        "one matrix, drawn logits",
        lambda _, s: variants.Interests(s.K, s.D, s.I, s.J),
        "KD",
        weight="S_matrix",
        eps=1e-9,
        logits="B_matrix",
        logits_order="1JI",
    ),
    Published(
        "mask after the softmax", lambda _, s: variants.Masked(s.I, s.J, s.K, s.D), "IJKD", inputs=with_mask, mask=True
    ),
    Published(
        "mask before the softmax over inputs",
        lambda _, s: variants.Masked(s.I, s.J, s.K, s.D, before=True),
        "IJKD",
        inputs=with_mask,
        softmax="in",
        mask=True,
    ),
    Published("lazy", lambda _, s: variants.Lazy(s.J, s.D), "JIDK", eps=1e-7, lazy=True),
    Published(
        "element-wise squash",
        lambda _, s: variants.BatchMeanOverInputs(s.J, s.I, s.K, s.D, elementwise=True),
        "1IJDK",
        out="BJD1",
        reproducible=False,
    ),
    Published(
        "cosine agreement", lambda _, s: variants.CosineAgreement(s.I, s.J, s.K, s.D), "IJDK", reproducible=False
    ),
]


@contextmanager
def float64() -> Iterator[None]:
    """Sets torch's default dtype to float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
