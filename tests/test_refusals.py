"""Calls of layers, routings, losses and networks that are refused, and what the error says.

The ranges of single arguments are in test_nn_arguments.py, the arguments of functions in test_checks.py.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, arange, ones, tensor, uint8, zeros

from capsfast import (
    DynamicRouting,
    diagnose,
    dynamic_routing,
    export,
    models,
    nn,
    route_votes,
    routing_pass,
    squash,
    votes_pass,
)
from capsfast.nn import stacked


class Mean(nn.Routing):
    """A user's routing: the mean vote, weighted by the activations."""

    uses_activation = True

    def route(self, votes: Any, activation: Tensor | None) -> tuple[Tensor, Tensor]:
        moments = votes.moments(activation=activation)
        return moments.first, moments.mass


class Empty(Mean):
    def __init__(self, *sizes: int) -> None:
        """Forgets super().__init__()."""


def grouped(*arguments: Any, **more: Any) -> Any:
    return DynamicRouting(12, 6, 3, 4, weight=nn.Groups(3))(*arguments, **more)


def unread() -> Any:
    return nn.RoutedCaps(2, 2, 2, 4, routing="inverted-attention", learned_readout=False)


def program() -> Any:
    return export.program(nn.Length().eval(), clicks)


HUGE = zeros(1).expand(2**24, 4, 1), zeros(1).expand(4, 2**12, 2**10, 1)
votes, clicks = torch.randn(2, 5, 3, 4, 3, 2), zeros(5, 24, 6)
interests = nn.InterestCapsules(3, 6, 4, max_length=24)
# By the type of the error: a call, and a part of the message. The message names what was called, or the part names it.
REFUSED: dict[type[Exception], list[tuple[Callable[[], Any], str]]] = {
    ValueError: [
        # Functions, beside the table of test_checks.py
        (lambda: routing_pass(zeros(2, 3, 6), zeros(1, 1, 5, 6)), "another argument must say how many there are"),
        (lambda: votes_pass(zeros(2, 3, 1, 5), query=zeros(2, 4, 5), prior=zeros(2, 5)), "prior must be [B, J] ="),
        (lambda: route_votes(zeros(2, 3, 4, 5, device="meta"), eps=-1), "eps must be positive"),
        (lambda: routing_pass(zeros(2, 3, 4, 5), zeros(3, 6, 7, 5)), "weight must be [I, J, Q, R] with Q=5"),
        (lambda: routing_pass(zeros(2, 3, 4, 5), zeros(3, 6, 5, 7), query=zeros(2, 6, 7)), "query must be [B, J, D]"),
        (lambda: dynamic_routing(zeros(2, 3, 0, 5), zeros(3, 6, 5, 7)), "must not be empty, got u [2, 3, 0, 5]"),
        (lambda: route_votes(zeros(2, 3, 4, 5, 6, 7), mask=ones(2, 3, 42).bool()), "mask must have shape [B, I, 6, 7]"),
        (lambda: votes_pass(zeros(2, 3, 4, 5, 6, 7), query=zeros(2, 4, 5, 7, 6)), "positions [6, 7]"),
        (lambda: dynamic_routing(zeros(2, 3, 4), zeros(3, 5, 6, 4), 2**31), "num_iterations must be at most"),
        (lambda: route_votes(zeros(2, 3, 4, 5), 10**5000), "num_iterations must be at most 2147483647, got an int"),
        (lambda: dynamic_routing(zeros(2, 3, 4), zeros(3, 5, 6, 4), eps=10**400), "eps must fit in a float, got an"),
        # Weights
        (lambda: nn.ConvCaps2d(4, 6, 3, 5, weight=nn.Groups(4)), "groups must divide out_types, got groups=4"),
        (lambda: DynamicRouting(12, 6, 3, 4, weight=nn.Groups(4)), "groups must divide out_caps, got groups=4"),
        (lambda: nn.RoutedCaps(3, 2, 4, 6, pose_rows=4), "pose_rows must divide out_dim=6, got 4"),
        (lambda: nn.LowRank(0), "rank must be at least 1, got 0"),
        (lambda: nn.LowRank(2, "VU"), "factors must be one of 'WA', 'UV', got 'VU'"),
        (lambda: DynamicRouting(12, 6, 3, 4, weight=nn.Groups(5)), "groups must divide in_caps, got groups=5"),
        (lambda: DynamicRouting(12, 6, 3, 4, positions=5), "positions must divide in_caps, got positions=5"),
        (lambda: DynamicRouting(12, 6, 3, 4, weight=nn.Groups(3, nn.FullWeight(6))), "positions must divide in_caps"),
        (lambda: DynamicRouting(12, 6, 3, 4, positions=4, shared_weight=True), "shared_weight=True shares among all"),
        (lambda: DynamicRouting(12, 6, 3, 4, positions=4, weight=nn.LowRank(2)), "says which capsules share"),
        (lambda: nn.RoutedCaps(4, 2, 4, 4, weight=nn.LowRank(1), pose_rows=2), "pose_rows needs a weight with whole"),
        (lambda: nn.RoutedCaps(5, 3, 4, 6, routing="em", identity=True), "identity needs square matrices in W"),
        # Fully connected layers
        (lambda: grouped(zeros(5, 12, 3), mask=ones(5, 6).bool()), "DynamicRouting: mask must be [B, I] = [5, 12]"),
        (lambda: grouped(zeros(5, 12, 3), out_mask=ones(5, 12).bool()), "DynamicRouting: out_mask must be [B, J]"),
        (lambda: grouped(zeros(5, 12, 3), logits=ones(12, 3)), "dynamic_routing: logits must be [I, J] = [4, 2]"),
        (
            lambda: DynamicRouting(2, 3, 4, 5, learned_logits=True)(clicks[:1, :2, :4], logits=ones(2)),
            "AgreementRouting: logits must end",
        ),
        (lambda: DynamicRouting(3, 4, 6, 5)(zeros(2, 4, 6)), "u must be [B, in_caps=3, in_dim=6], got [2, 4, 6]"),
        (lambda: nn.DigitCaps(12, 6, 3, 4)(zeros(5, 11, 3)), "u must be [B, in_caps=12, in_dim=3], got [5, 11, 3]"),
        (lambda: nn.RoutingByAgreement(2)(zeros(5, 12, 6, 4), 4), "batch_size must be B=5, got 4"),
        (lambda: nn.RoutingByAgreement(2)(zeros(12, 6, 4)), "votes must have shape [B, I, J, D]"),
        (lambda: nn.MatrixRouting(13, 1, 4, 4, 2), "out_caps must be at least 2, got 1"),
        (lambda: nn.MatrixRouting(13, 4, 6, 10, 2)(zeros(3, 12, 6), zeros(3, 12)), "u must be [B, I=13, K=6]"),
        (lambda: nn.MatrixRouting(None, 4, 6, 10, 2)(zeros(3, 13, 6), zeros(3, 12)), "scores must be [B=3, I=13]"),
        (lambda: nn.VectorRouting(13, 4, 5, 6)(zeros(3, 14, 5)), "u must be [B, I=13, K=5], got [3, 14, 5]"),
        (lambda: nn.VectorRouting(None, 4, 5, 6)(zeros(3, 0, 5)), "u must hold at least one input vector"),
        (lambda: nn.MatrixRouting(None, 4, 6, 8, 2)(zeros(3, 7, 6), zeros(3, 7), ones(3, 6) > 0), "mask must be [B"),
        # Routings
        (lambda: nn.RoutedCaps(3, 2, 4, 4, routing="magic"), "routing must be one of 'dynamic', 'attention'"),
        (lambda: nn.RoutedCaps(3, 2, 4, 6)(zeros(1, 4, 4)), "u must be [B, in_caps=3, in_dim=4], got [1, 4, 4]"),
        (lambda: nn.RoutedCaps(3, 2, 4, 6).routing(zeros(1, 4, 2, 6)), "AgreementRouting: votes must have"),
        (lambda: nn.SelfRouting(3, 2, 4, 6)(zeros(1, 3, 2, 6)), "the logits are made from the input capsules"),
        (lambda: nn.SelfRouting(2, 2, 3, 2)((zeros(1, 2, 4), zeros(2, 2, 2, 4))), "u must have capsules of in_dim=3"),
        (lambda: nn.InvertedAttentionRouting(2, 2, 2, 1), "out_dim must be at least 2, got 1"),
        (lambda: nn.VariationalRouting(2, 2, 2, 4, nu=3), "nu must be more than out_dim - 1 = 3, got 3"),
        (lambda: nn.VariationalRouting(2, 2, 2, 2, batch_norm="poses"), "batch_norm must be False, True or 'both'"),
        (lambda: nn.VariationalRouting(2, 2, 2, 2)(zeros(1, 2, 2, 2)), "batch_norm needs more than one sample"),
        (lambda: nn.RoutedCaps(11, 4, 6, 6, routing="cosine", exact=True), "routing must take (u, weight)"),
        (lambda: nn.CosineRouting(5, 4, 6, 6, exact=True)((zeros(2, 5, 6), zeros(5, 4, 6, 6))), "Votes: cosines need"),
        (lambda: nn.EMRouting(9, 3, 4, 5, inverse_temperature=[1, 2]), "inverse_temperature must hold"),
        (lambda: nn.EMRouting(9, 3, 4, 5, inverse_temperature=[1, 2, -1]), "inverse_temperature must be positive"),
        (lambda: nn.EMRouting(9, 3, 4, 5, momentum=1), "momentum must be below 1, got 1"),
        (lambda: nn.EMRouting(9, 3, 4, 5, cost_scale="max"), "cost_scale must be one of 'sum', 'inputs', 'mean'"),
        (lambda: nn.EMRouting(9, 3, 4, 5, initial_beta_u=math.nan), "initial_beta_u must be finite, got nan"),
        (lambda: nn.EMRouting(5, 3, 4, 4)(votes, zeros(2, 5, 2, 3)), "activation must"),
        (lambda: nn.CosineRouting(5, 3, 4, 4)(votes[..., 0, 0], zeros(9, 9)), "activation must be [B, I] = [2, 5]"),
        # Convolutional layers
        (lambda: nn.ConvCaps2d(4, 6, 3, 5, weight=nn.Groups(3)), "groups must divide in_types, got groups=3"),
        (lambda: nn.ConvCaps2d(4, 6, 3, 5, pose_rows=2), "pose_rows must divide in_dim=3, got 2"),
        (lambda: nn.ConvCaps2d(2, 2, 4, 4, start="window"), "start='window' needs competition='child'"),
        (lambda: nn.ConvCaps2d(4, 6, 3, 5)(zeros(2, 3, 4, 5, 6)), "poses must be [B, in_types=4, in_dim=3, H, W]"),
        (lambda: nn.ConvCaps2d(4, 6, 3, 5)(zeros(2, 4, 3, 2, 6)), "a window of 3 x 3 (dilation 1 x 1) must fit"),
        (lambda: nn.ConvCaps1d(4, 6, 3, 5)(zeros(2, 4, 3, 5, 6)), "ConvCaps1d: poses must have shape [B, in_types, in"),
        (lambda: nn.ConvCaps1d(4, 6, 3, 5)(zeros(2, 4, 3, 2)), "a window of 3 (dilation 1) must fit"),
        (
            lambda: nn.ConvCaps3d(4, 6, 3, 5)(zeros(2, 4, 3, 5, 6)),
            "poses must have shape [B, in_types, in_dim, Z, H, W]",
        ),
        (lambda: nn.ConvCaps3d(2, 2, 4, 4)(zeros(1, 3, 4, 3, 3, 3)), "must be [B, in_types=2, in_dim=4, Z, H, W]"),
        (lambda: nn.ConvCaps2d(2, 2, 4, 4)(zeros(1, 2, 4, 5, 5), zeros(1, 2, 5, 5)), "dynamic routing takes"),
        (lambda: nn.ConvCaps2d(2, 2, 4, 4, routing=Mean)(zeros(1, 2, 4, 5, 5), zeros(1, 2, 5, 4)), "activation must"),
        (lambda: nn.SlimConvCaps2d(3, 4, 3, 5, 3, 0), "stride must be at least 1, got 0"),
        (lambda: nn.SlimConvTransposeCaps3d(3, 4, 3, 5, routing="self"), "got self, which needs the input"),
        (lambda: nn.SlimConvCaps2d(3, 4, 3, 5, softmax="no"), "softmax must be one of 'out', 'in', 'everywhere'"),
        (lambda: nn.SlimConvCaps3d(3, 4, 3, 5)(zeros(2, 3, 3, 4, 4)), "poses must have shape"),
        (lambda: nn.SlimConvCaps3d(3, 4, 3, 5)(zeros(2, 3, 3, 4, 2, 4)), "a window of 3 x 3 x 3 (dilation 1 x 1 x 1)"),
        (lambda: nn.SlimConvTransposeCaps2d(3, 4, 3, 5, 2, padding=1)(zeros(2, 3, 3, 1, 4)), "the output must have"),
        (lambda: nn.SlimConvTransposeCaps2d(3, 4, 3, 5)(zeros(2, 3, 3, 4, 4), size=(8, 10)), "size must be at least"),
        (lambda: nn.SlimConvCaps2d(3, 4, 3, 5, routing=Mean)(zeros(2, 3, 3, 4, 4), zeros(2, 3, 4)), "activation must"),
        (lambda: nn.ClassCaps2d(2, 3, 4, 1, 2), "out_dim must be at least 2 for two coordinates, got 1"),
        (
            lambda: nn.ClassCaps3d(2, 3, 4, 4, 2, pose_rows=2),
            "pose_rows must be at least 3 for three coordinates, got 2",
        ),
        (
            lambda: nn.ClassCaps1d(2, 3, 4, 4, 3)(zeros(1, 2, 4, 2)),
            "u must be [B, in_types=2, in_dim=4, 3] or the list",
        ),
        (
            lambda: nn.ClassCaps3d(2, 3, 4, 4, 2)(zeros(1, 2, 4, 2, 2, 2), zeros(1, 2, 2, 2, 3)),
            "[B, in_types, Z, H, W]",
        ),
        (lambda: nn.ClassCaps2d(2, 3, 4, 4, 2, coordinates=(1, math.inf)), "scale of coordinates must be finite"),
        (lambda: nn.ClassCaps2d(2, 3, 4, 4, 2)(zeros(1, 2, 4, 2, 3)), "u must be [B, in_types=2, in_dim=4, 2, 2]"),
        (lambda: nn.ClassCaps2d(2, 3, 4, 4, 2)(zeros(1, 2, 4, 2, 2), zeros(1, 2, 2, 3)), "activation must"),
        # Primary capsules
        (lambda: nn.PrimaryCaps(3, 4, 5, order="view", flatten=False), "flatten=False needs capsules with a place"),
        (lambda: nn.PrimaryCaps(3, 4, 5)(zeros(2, 4, 9, 9)), "features must be [B, in_channels=3, H, W]"),
        (lambda: nn.PrimaryCaps(3, 4, 5)(zeros(2, 3, 9, 7)), "must fit into the input with its padding, got 9 x 7"),
        (lambda: nn.PrimaryCaps(3, 4, 5).from_list({}, "capsule"), "each must be one of 'type', 'component'"),
        (lambda: nn.FlattenCaps()(zeros(2, 3, 4)), "poses must have shape [B, C, K, H, W], got [2, 3, 4]"),
        (lambda: nn.PrimaryMatrixCaps(3, 2, 4)(zeros(1, 2, 5, 5)), "features must be [B, in_channels=3, H, W]"),
        (lambda: nn.DepthwisePrimaryCaps(2, 3, 1)(zeros(1, 5, 2, 2)), "features must be [B, in_channels=6, H, W]"),
        # Interests
        (lambda: nn.InterestCapsules(3, 6, 4), "initial_logits='fixed' needs max_length"),
        (lambda: nn.InterestCapsules(3, 6, 4, weight="position", initial_logits="zero"), "weight='position' needs"),
        (lambda: interests(clicks, tensor([24, 1, 7, 25, 16])), "InterestCapsules: lengths must be from 0 to I=24"),
        (lambda: interests(clicks, tensor([24, 1, 7, 0, 16]), mask=ones(5, 24).bool()), "InterestCapsules: at most"),
        (lambda: interests(clicks[0, :9], offsets=tensor([0, 4, 3, 9], dtype=uint8)), "InterestCapsules: offsets"),
        (lambda: interests(clicks[0, :9], offsets=zeros(0).long()), "InterestCapsules: offsets must"),
        (lambda: interests(zeros(25, 6), offsets=tensor([0, 25])), "InterestCapsules: histories must be at most"),
        (lambda: interests(zeros(2, 30, 6)), "InterestCapsules: behaviours must be at most max_length=24"),
        (lambda: interests(clicks[..., :5]), "InterestCapsules: behaviours must end in in_dim=6"),
        (lambda: interests(clicks, offsets=tensor([0, 4])), "InterestCapsules: behaviours must have shape [N, K]"),
        (lambda: interests(clicks, interests=tensor([0, 1, 2, 3, 3])), "InterestCapsules: interests must be from 1"),
        (lambda: interests(clicks, logits=zeros(3, 3)), "InterestCapsules: logits must be [I, J]"),
        (lambda: nn.LabelAwareAttention(0.5, signed=True), "power must be 0, from 1 on or math.inf, got 0.5"),
        (lambda: nn.LabelAwareAttention(1.5), "power must be an integer unless signed"),
        (lambda: nn.LabelAwareAttention()(clicks, clicks[:3, 0]), "items must be [B, D] or [B, N, D]"),
        (lambda: nn.interest_scores(clicks, zeros(3, 5)), "items must end in D=6"),
        (lambda: nn.interest_scores(clicks, clicks[0], ones(3, 24).bool()), "mask must be [B, J] = [5, 24]"),
        # Readouts, decoders and losses
        (lambda: nn.Mask()(zeros(4, 6)), "capsules must have shape [B, J, D], got [4, 6]"),
        (lambda: nn.Mask()(zeros(5, 4, 6), zeros(3).long()), "labels must be [B] = [5], got [3]"),
        (lambda: nn.Mask()(zeros(5, 4, 6), arange(5)), "labels must be in [0, 3], got 4"),
        (lambda: nn.Mask()(zeros(5, 4, 6), arange(5) - 1), "labels must be in [0, 3], got -1"),
        (lambda: nn.Mask()(zeros(5, 4, 6), arange(5, device="meta")), "labels must be on cpu, got meta"),
        (lambda: nn.Decoder(4, 6, (28, 28)), "image_shape must be (channels, height, width), got (28, 28)"),
        (lambda: nn.Decoder(4, 6, masked=False, class_independent=True), "class_independent needs masked=True"),
        (lambda: nn.Decoder(4, 6)(zeros(5, 6, 4)), "capsules must be [B, num_caps=4, dim=6], got [5, 6, 4]"),
        (lambda: nn.ConvDecoder(4, 6, masked=False)(zeros(5, 4, 6), arange(5)), "labels need masked=True, which"),
        (lambda: nn.MarginLoss()(zeros(5, 4), ones(5, 3)), "targets must be [B] or [B, J] = [5, 4], got [5, 3]"),
        (lambda: nn.MarginLoss()(zeros(5), arange(5)), "lengths must have shape [B, J], got [5]"),
        (lambda: nn.MarginLoss()(zeros(5, 4, 16, 1), arange(5)), "got [5, 4, 16, 1]; give lengths.squeeze(3)"),
        (lambda: nn.SpreadLoss()(zeros(5, 1, 4, 16, 1), arange(5), 0), "got [5, 1, 4, 16, 1]; give"),
        (lambda: nn.ReconstructionLoss()(zeros(5, 1, 4, 4), zeros(5, 4, 4)), "reconstruction and images must have"),
        (lambda: nn.SpreadLoss()(zeros(5, 4), ones(5, 4), 0), "targets must have shape [B], got [5, 4]"),
        (lambda: nn.CouplingEntropy()(zeros(5, 4)), "coupling must have shape [B, I, J], got [5, 4]"),
        # Networks
        (lambda: models.CapsNet(1, 8, kernel_size=9), "got 8 x 8 with padding 0 x 0"),
        (lambda: models.DeepCaps(dims=(4, 8)), "the last two of dims must be alike, got (4, 8)"),
        (lambda: models.EfficientCapsNet(1, (8, 2)), "image_size must be at least 3, got 8 x 2"),
        (lambda: models.EfficientCapsNet(strides=(1, 2)), "strides must hold four of them, got (1, 2)"),
        (lambda: models.EfficientCapsNet(1, 8, strides=(2, 2, 2, 2)), "image_size must be larger for these"),
        (lambda: models.EfficientCapsNet(1, 8, kernel_size=4), "got 3 x 3 with padding 0 x 0"),
        (lambda: models.InvertedAttentionCapsNet(primary_dim=1), "primary_dim must be at least 2, got 1"),
        (lambda: models.MatrixCapsNet(form="variational", activation_std=3.0), "activation_std needs form='em':"),
        (lambda: models.MatrixCapsNet(windows=[(3, 1)] * 2), "windows must be three pairs (kernel size, stride)"),
        (lambda: models.MatrixCapsNet(1, 4, windows=[(3, 1)] * 3), "got 2 x 2 with padding 0 x 0"),
        (lambda: models.SegCaps(1, 9, 3, kernel_size=4), "kernel_size must be odd, so that a window has a middle"),
        (lambda: models.SegCaps(1, 9, 3, types=(2, 4)), "types must be an int or one for each of dims=(8, 16, 16)"),
        (lambda: models.SegCaps(1, 8, 3, form="r3", types=2), "form='r3' has its own conv_channels, types, dims"),
        (lambda: models.SegCaps(1, 12, 3, form="r3"), "with form='r3' image_size must be divisible by 8"),
        (lambda: models.SegCaps(1, 9, 3)(zeros(1, 1, 9, 9), zeros(1, 3, 9, 8).bool()), "classes must be [B, J, H, W]"),
        (lambda: stacked.SetTransformer(3, 8, 2, num_heads=3), "num_heads must divide dim=16, got 3"),
        # Samples
        (lambda: nn.InterestCapsules(3, 6, 4, max_length=24)(clicks, tensor([4])), "lengths must be [5], one for"),
        # Programs
        (lambda: export.program(nn.Length(), clicks), "model must be in evaluation mode, got one in training mode"),
        (lambda: export.program(nn.Length().eval(), clicks[:1]), "batch of 2 or more for dynamic_batch=True"),
        (lambda: export.to_package(nn.Length().eval(), clicks, "model.so"), "file must end in .pt2, got 'model.so'"),
        (lambda: export.to_onnx(nn.Length().eval(), clicks, "absent/model.onnx"), "file must be in a folder that"),
        (lambda: export.to_package(program(), clicks, "model.pt2"), "example must be None for an exported program"),
        # Diagnosis
        (lambda: diagnose(DynamicRouting(30, 4, 5, 6), zeros(0, 30, 5)), "u must hold at least one sample"),
        (lambda: diagnose(nn.ConvCaps2d(3, 4, 5, 6, padding=1), zeros(2, 30, 5)), "poses must have shape"),
        (lambda: diagnose(unread(), zeros(2, 2, 2)), "must depend on u, got constants"),
    ],
    TypeError: [
        # Functions, beside the table of test_checks.py
        (lambda: route_votes(zeros(2, 3, 6), zeros(3, 4, 5, 6)), "for u and a weight use capsfast.dynamic_routing"),
        # Weights
        (lambda: nn.ClassCaps2d(2, 3, 4, 4, 2, shared_weight=True), "shared_weight is not an option; all places"),
        (lambda: nn.Groups(2, nn.Groups(3)), "weight must be a FullWeight, SharedWeight or LowRank"),
        (lambda: DynamicRouting(12, 6, 3, 4, weight=4), "weight must be one of capsfast.nn's FullWeight"),
        # Fully connected layers
        (lambda: DynamicRouting(12, 6, 3, 4, weight=nn.LowRank(2))(zeros(5, 12, 3).double()), "u and A must have one"),
        (lambda: DynamicRouting(12, 6, 3, 4)([1.0]), "dynamic_routing: u must be a torch.Tensor [B, I, K], got list"),
        (lambda: nn.MatrixRouting(13, 4, 6, 10, 2)(zeros(3, 13, 6), zeros(3, 13).double()), "scores must have"),
        (lambda: nn.MatrixRouting(5, 2, 4, 4, 2)(zeros(1, 5, 4).double(), zeros(1, 5).double()), "must have one dtype"),
        (lambda: nn.VectorRouting(None, 4, 5, 6)(zeros(3, 13, 5), ones(3, 13)), "mask must be bool (True = use)"),
        (lambda: nn.VectorRouting(13, 4, 5, 6)(zeros(3, 13, 5).double()), "u and W_A must have one dtype"),
        # Calls meant for another layer
        (lambda: DynamicRouting(3), "takes"),
        (lambda: DynamicRouting(3), "'out_caps'; capsfast.compat.DynamicRouting can be called so, and for votes"),
        (lambda: DynamicRouting(in_capsules=7, out_capsules=4, in_dim=6, out_dim=5), "(did you mean in_caps?)"),
        (lambda: DynamicRouting(7, 4, 6, 5, 3, share_weights=True), "(did you mean shared_weight?)"),
        (lambda: DynamicRouting(num_capsules=4, num_route_nodes=7, in_channels=6, out_channels=5), "CapsuleLayer can"),
        (lambda: DynamicRouting(7, 6, 4, 5, routings=3), "(did you mean num_iterations?)"),
        (lambda: DynamicRouting(7, 4, 6, 5, sofmax="in"), "got an unexpected keyword argument 'sofmax'"),
        (lambda: nn.DigitCaps(num_lower=7, num_higher=4, lower_dim=6, higher_dim=5), "takes"),
        (lambda: nn.RoutingByAgreement(7, 4, 3), "takes (num_iterations=3)"),
        (lambda: DynamicRouting(7, 4, 6, 5)(zeros(2, 7, 4, 5), 2), "got [2, 7, 4, 5] and 1 more; for votes"),
        (lambda: DynamicRouting(7, 4, 6, 5)(zeros(2, 7, 4, 5)), "capsfast.nn.RoutingByAgreement"),
        # Routings
        (lambda: nn.RoutedCaps(3, 2, 4, 4, routing=lambda *_, **__: nn.Length()), "routing must make"),
        (lambda: nn.RoutedCaps(3, 2, 4, 4, routing=nn.Length), "routing must be a name or a Routing class"),
        (lambda: nn.RoutedCaps(3, 2, 4, 4, routing=Mean(3, 2, 4, 4)), "got Mean; give its class, and its options"),
        (lambda: nn.RoutedCaps(3, 2, 4, 4, routing=Empty), "routing must be made by Routing.__init__, got Empty"),
        (lambda: nn.RoutedCaps(3, 2, 4, 4, routing="dynamic", sharpness=2), "routing dynamic has no option"),
        (lambda: nn.RoutedCaps(2, 2, 2, 2, routing="self", num_iterations=3), "routing self has no option"),
        (lambda: nn.RoutedCaps(3, 2, 4, 6).routing(7), "AgreementRouting: votes must be a torch.Tensor, a pair"),
        (lambda: nn.EMRouting(9, 3, 4, 5, inverse_temperature="hot"), "inverse_temperature must be None, a number"),
        (lambda: nn.EMRouting(5, 3, 4, 4)(votes, [0.5]), "activation must be a torch.Tensor, got list"),
        (lambda: nn.couplings(nn.Length(), zeros(1)), "layer must be a routing layer, got Length"),
        # Convolutional layers
        (lambda: nn.ConvCaps2d(4, 6, 3, 5, pose_rows="2"), "pose_rows must be an int, got '2'"),
        (lambda: nn.ConvCaps1d(4, 6, 3, 5, (3, 3)), "kernel_size must be an int or a sequence of one int, got (3, 3)"),
        (lambda: nn.ConvCaps3d(4, 6, 3, 5, 3, (1, 2)), "stride must be an int or three of them, got (1, 2)"),
        (lambda: nn.ClassCaps3d(2, 3, 4, 4, (2, 2)), "size must be an int or three of them, got (2, 2)"),
        (lambda: nn.SlimConvCaps3d(3, 4, 3, 5, (3, 3)), "kernel_size must be an int or three of them, got (3, 3)"),
        (lambda: nn.ClassCaps2d(2, 3, 4, 4, 2)(zeros(1, 2, 4, 2, 2), [1.0]), "activation must be a torch.Tensor"),
        # Interests
        (lambda: interests(clicks, tensor([24.0, 1, 7, 0, 16])), "InterestCapsules: lengths must hold integers"),
        (lambda: interests(clicks.double()), "InterestCapsules: behaviours and W must have one dtype"),
        (lambda: interests(clicks, mask=ones(5, 24)), "InterestCapsules: mask must be bool"),
        (lambda: nn.interest_scores(clicks, None), "items must be a torch.Tensor, got NoneType"),
        # Readouts, decoders and losses
        (lambda: nn.Length()(zeros(5).long()), "capsules must be float32"),
        (lambda: nn.Length()(3), "capsules must be a torch.Tensor, got int"),
        (lambda: nn.Mask()(zeros(5, 4, 6), zeros(5).int()), "labels must be int64, got int32; convert"),
        (lambda: nn.ConvDecoder(4, 6, (1, 2.5, 3)), "image_shape must be an int, got 2.5"),
        (lambda: nn.MarginLoss()(zeros(5, 4), zeros(5)), "targets must be int64, got float32; convert"),
        (lambda: nn.MarginLoss()(ones(5, 4).long(), arange(5)), "lengths must be float32"),
        (lambda: nn.ReconstructionLoss()(zeros(5, 4), zeros(5, 4, dtype=uint8)), "got uint8; convert"),
        # Networks
        (lambda: models.CapsNet(1, (28, 28, 1)), "image_size must be an int or two of them, got (28, 28, 1)"),
        (lambda: models.MatrixCapsNet(windows=(5, 3, 3)), "windows must be three pairs (kernel size, stride)"),
        (lambda: models.SegCaps(1, 9, 3, sharpness=1), "SlimConvCaps2d: routing dynamic has no option sharpness"),
        (lambda: models.SegCaps(1, 9, 3)(zeros(1, 1, 9, 9), zeros(1, 3, 9, 9)), "classes must be bool, got float32"),
        # Samples
        (lambda: nn.InterestCapsules(3, 6, 4, max_length=24)([1.0], None), "behaviours must be a torch.Tensor"),
        # Programs
        (lambda: export.program(nn.Length().eval(), 3), "example must be a tensor or a sequence of arguments, got int"),
        (lambda: export.program(nn.Length.forward, clicks), "model must be a torch.nn.Module or an exported program"),
        # Diagnosis
        (lambda: diagnose(models.CapsNet(1, 8), zeros(2, 30, 5)), "got CapsNet; of a model, take its part .routing"),
        (lambda: diagnose(DynamicRouting(30, 4, 5, 6), [1.0]), "u must be a torch.Tensor, got list"),
    ],
    RuntimeError: [
        # Functions, beside the table of test_checks.py
        (lambda: votes_pass(zeros(2, 3, 4, 5), backend="cuda"), "backend 'cuda' cannot serve this call"),
        # Routings
        (lambda: unread().routing.logit(zeros(1, 2, 4)), "InvertedAttentionRouting: there is no classifier; build"),
        # Networks
        (lambda: models.MatrixCapsNet().reconstruct(zeros(2, 4, 4)), "there is no decoder"),
    ],
    MemoryError: [
        # Functions, beside the table of test_checks.py
        (lambda: dynamic_routing(*HUGE), "a tensor of 281474976710656 bytes (2.62e+05 GiB); take a smaller batch"),
        (lambda: routing_pass(*HUGE), "a tensor"),
        (lambda: votes_pass(zeros(1).expand(2**24, 4, 2**12, 2**10)), "a tensor"),
        (lambda: routing_pass(*HUGE, backend="reference"), "a tensor of 1125899906842624 bytes"),
        (lambda: squash(zeros(1).expand(2**44, 8)), "a tensor of 562949953421312 bytes (5.24e+05 GiB); take"),
        # Routings
        (lambda: nn.RoutedCaps(2**20, 2**12, 64, 64), "a tensor of 70368744177664 bytes (6.55e+04 GiB); take smaller"),
        (lambda: nn.RoutedCaps(2**31 - 1, 2**31 - 1, 2**31 - 1, 4), "a tensor of more bytes than 64 bits count; take"),
        (lambda: nn.MarginLoss()(zeros(1).expand(2**24, 2**24), zeros(1).long().expand(2**24)), "a tensor"),
    ],
    NotImplementedError: [
        # Weights
        (lambda: nn.Weight().shapes("a layer", 3, 2, (4, 5)), "Weight must override shapes"),
        (lambda: nn.Weight().product(zeros(2, 3, 4)), "Weight must override product"),
        # Routings
        (lambda: nn.RoutedCaps(3, 2, 4, 4, routing=nn.Routing)(zeros(1, 3, 4)), "a routing overrides route"),
    ],
}
ROWS = [(error, *row) for error, table in REFUSED.items() for row in table]


@pytest.mark.rows(len(ROWS))
@pytest.mark.parametrize(("error", "call", "said"), ROWS, ids=[said for *_, said in ROWS])
def test_refused(error: type[Exception], call: Callable[[], Any], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)) as caught:
        call()
    text = str(caught.value)
    named = re.match(r"capsfast\.(?:\w+\.)*(\w+): ", text)
    assert type(caught.value) is error and named
    assert named[1] in {*call.__code__.co_names, *said.split(": ")}
    assert not re.search(r"\{|  ", text), "a message that was not filled in"
