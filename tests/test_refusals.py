"""Calls of layers, routings, losses and networks that are refused, and what the error says.

The ranges of single arguments are in test_nn_arguments.py, the arguments of functions in test_checks.py.
"""

import builtins
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import capsfast
import capsfast.export
from capsfast import models, nn
from capsfast.nn import stacked


class Mean(nn.Routing):
    """A user's routing: the mean vote, weighted by the activations."""

    uses_activation = True

    def route(self, votes: Any, activation: Tensor | None) -> tuple[Tensor, Tensor]:
        moments = votes.moments(activation=activation)
        return moments.first, moments.mass


# A call, and indented below it the type and the message of its error. In a message … stands for anything.
REFUSED = r"""
# Functions, beside the table of test_checks.py
routing_pass(zeros(2, 3, 6), zeros(1, 1, 5, 6))
    ValueError: capsfast.routing_pass: …another argument must say how many there are, got none of query…
votes_pass(zeros(2, 3, 1, 5))
    ValueError: capsfast.votes_pass: …another argument must say how many there are, got none of query…
votes_pass(zeros(2, 3, 1, 5), query=zeros(2, 4, 5), prior=zeros(2, 5))
    ValueError: capsfast.votes_pass: prior must be [B, J] = [2, 4], got [2, 5] (votes [2, 3, 1, 5])
route_votes(zeros(2, 3, 4, 5, device="meta"), eps=-1)
    ValueError: capsfast.route_votes: eps must be positive…
route_votes(zeros(2, 3, 6), zeros(3, 4, 5, 6))
    TypeError: capsfast.route_votes: …for u and a weight use capsfast.dynamic_routing
votes_pass(zeros(2, 3, 4, 5), backend="cuda")
    RuntimeError: capsfast.votes_pass: backend 'cuda' cannot serve this call…
routing_pass(zeros(2, 3, 4, 5), zeros(3, 6, 7, 5))
    ValueError: capsfast.routing_pass: weight must be [I, J, Q, R] with Q=5…got 7…
routing_pass(zeros(2, 3, 4, 5), zeros(3, 6, 5, 7), query=zeros(2, 6, 7))
    ValueError: capsfast.routing_pass: query must be [B, J, D] = [2, 6, 28], got [2, 6, 7] (u [2, 3, 20])
dynamic_routing(zeros(2, 3, 0, 5), zeros(3, 6, 5, 7))
    ValueError: capsfast.dynamic_routing: …must not be empty, got u [2, 3, 0, 5]…
route_votes(zeros(2, 3, 4, 5, 6, 7), mask=ones(2, 3, 42).bool())
    ValueError: capsfast.route_votes: mask must have shape [B, I, 6, 7]…got [2, 3, 42]
votes_pass(zeros(2, 3, 4, 5, 6, 7), query=zeros(2, 4, 5, 7, 6))
    ValueError: capsfast.votes_pass: query must be…positions [6, 7], got [2, 4, 5, 7, 6]…
dynamic_routing(zeros(2, 3, 4), zeros(3, 5, 6, 4), 2**31)
    ValueError: capsfast.dynamic_routing: num_iterations must be at most 2147483647, got 2147483648
route_votes(zeros(2, 3, 4, 5), 10**5000)
    ValueError: capsfast.route_votes: num_iterations must be at most 2147483647, got an int of 16610 bits
dynamic_routing(zeros(2, 3, 4), zeros(3, 5, 6, 4), eps=10**400)
    ValueError: capsfast.dynamic_routing: eps must fit in a float, got an int of 1329 bits
dynamic_routing(zeros(1).expand(2**24, 4, 1), zeros(1).expand(4, 2**12, 2**10, 1))
    MemoryError: capsfast.dynamic_routing: …a tensor of 281474976710656 bytes (2.62e+05 GiB); take a smaller batch…
routing_pass(zeros(1).expand(2**24, 4, 1), zeros(1).expand(4, 2**12, 2**10, 1))
    MemoryError: capsfast.routing_pass: …a tensor of … bytes…; take a smaller batch…
votes_pass(zeros(1).expand(2**24, 4, 2**12, 2**10))
    MemoryError: capsfast.votes_pass: …a tensor of … bytes…; take a smaller batch…
routing_pass(zeros(1).expand(2**24, 4, 1), zeros(1).expand(4, 2**12, 2**10, 1), backend="reference")
    MemoryError: capsfast.routing_pass: …a tensor of 1125899906842624 bytes…; take a smaller batch, or a backend that…
squash(zeros(1).expand(2**44, 8))
    MemoryError: capsfast.squash: …a tensor of 562949953421312 bytes (5.24e+05 GiB); take a smaller batch

# Weights
Weight().shapes("a layer", 3, 2, (4, 5))
    NotImplementedError: capsfast.nn.Weight: Weight must override shapes
Weight().start(1.0)
    NotImplementedError: capsfast.nn.Weight: Weight must override start
Weight().product(zeros(2, 3, 4))
    NotImplementedError: capsfast.nn.Weight: Weight must override product
ConvCaps2d(4, 6, 3, 5, weight=Groups(4))
    ValueError: capsfast.nn.ConvCaps2d: groups must divide out_types, got groups=4 and out_types=6
DynamicRouting(12, 6, 3, 4, weight=Groups(4))
    ValueError: capsfast.DynamicRouting: groups must divide out_caps, got groups=4 and out_caps=6
RoutedCaps(3, 2, 4, 6, pose_rows=4)
    ValueError: capsfast.nn.RoutedCaps: pose_rows must divide out_dim=6, got 4
ClassCaps2d(2, 3, 4, 4, 2, shared_weight=True)
    TypeError: capsfast.nn.ClassCaps2d: shared_weight is not an option; all places share the weight of a type
LowRank(0)
    ValueError: capsfast.nn.LowRank: rank must be at least 1, got 0
LowRank(2, "VU")
    ValueError: capsfast.nn.LowRank: factors must be one of 'WA', 'UV', got 'VU'
Groups(2, Groups(3))
    TypeError: capsfast.nn.Groups: weight must be a FullWeight, SharedWeight or LowRank, got Groups(groups=3, weight=…
DynamicRouting(12, 6, 3, 4, weight=Groups(5))
    ValueError: capsfast.DynamicRouting: groups must divide in_caps, got groups=5 and in_caps=12
DynamicRouting(12, 6, 3, 4, positions=5)
    ValueError: capsfast.DynamicRouting: positions must divide in_caps, got positions=5 and in_caps=12
DynamicRouting(12, 6, 3, 4, weight=Groups(3, FullWeight(6)))
    ValueError: capsfast.DynamicRouting: positions must divide in_caps, got positions=6 and in_caps=4
DynamicRouting(12, 6, 3, 4, positions=4, shared_weight=True)
    ValueError: capsfast.DynamicRouting: shared_weight=True shares among all types too; leave out positions=4
DynamicRouting(12, 6, 3, 4, positions=4, weight=LowRank(2))
    ValueError: capsfast.DynamicRouting: weight=LowRank(…) says which capsules share; leave out shared_weight and pos…
DynamicRouting(12, 6, 3, 4, weight=4)
    TypeError: capsfast.DynamicRouting: weight must be one of capsfast.nn's FullWeight, SharedWeight, LowRank, Groups, …
RoutedCaps(4, 2, 4, 4, weight=LowRank(1), pose_rows=2)
    ValueError: capsfast.nn.RoutedCaps: pose_rows needs a weight with whole matrices, got LowRank(…); leave one out
RoutedCaps(5, 3, 4, 6, routing="em", identity=True)
    ValueError: capsfast.nn.RoutedCaps: identity needs square matrices in W, got … of [6, 4]; leave it out

# Fully connected layers
DynamicRouting(12, 6, 3, 4, weight=Groups(3))(zeros(5, 12, 3), mask=ones(5, 6).bool())
    ValueError: capsfast.DynamicRouting: mask must be [B, I] = [5, 12], got [5, 6] (u [5, 12, 3])
DynamicRouting(12, 6, 3, 4, weight=Groups(3))(zeros(5, 12, 3), out_mask=ones(5, 12).bool())
    ValueError: capsfast.DynamicRouting: out_mask must be [B, J] = [5, 6], got [5, 12] (u [5, 12, 3])
DynamicRouting(12, 6, 3, 4, weight=Groups(3))(zeros(5, 12, 3), logits=ones(12, 3))
    ValueError: capsfast.dynamic_routing: logits must be [I, J] = [4, 2] or [B, I, J] = [5, 4, 2], got [4, 3]…
DynamicRouting(12, 6, 3, 4, weight=LowRank(2))(zeros(5, 12, 3).double())
    TypeError: capsfast.nn.LowRank: u and A must have one dtype, got float64 and float32; …
DynamicRouting(12, 6, 3, 4, learned_logits=True)(zeros(5, 12, 3), logits=ones(12, 1))
    ValueError: capsfast.AgreementRouting: logits must end in [12, 6], got [12, 1]
DynamicRouting(12, 6, 3, 4)([1.0])
    TypeError: capsfast.dynamic_routing: u must be a torch.Tensor [B, I, K], got list
DynamicRouting(3, 4, 6, 5)(zeros(2, 4, 6))
    ValueError: capsfast.DynamicRouting: u must be [B, in_caps=3, in_dim=6], got [2, 4, 6]
DigitCaps(12, 6, 3, 4)(zeros(5, 11, 3))
    ValueError: capsfast.nn.DigitCaps: u must be [B, in_caps=12, in_dim=3], got [5, 11, 3]
RoutingByAgreement(2)(zeros(5, 12, 6, 4), 4)
    ValueError: capsfast.nn.RoutingByAgreement: batch_size must be B=5, got 4…
RoutingByAgreement(2)(zeros(12, 6, 4))
    ValueError: capsfast.nn.RoutingByAgreement: votes must have shape [B, I, J, D]…
MatrixRouting(13, 1, 4, 4, 2)
    ValueError: capsfast.nn.MatrixRouting: out_caps must be at least 2, got 1
MatrixRouting(13, 4, 6, 10, 2)(zeros(3, 12, 6), zeros(3, 12))
    ValueError: capsfast.nn.MatrixRouting: u must be [B, I=13, K=6], got [3, 12, 6]
MatrixRouting(None, 4, 6, 10, 2)(zeros(3, 13, 5), zeros(3, 13))
    ValueError: capsfast.nn.MatrixRouting: u must be [B, I, K=6], got [3, 13, 5]
MatrixRouting(None, 4, 6, 10, 2)(zeros(3, 13, 6), zeros(3, 12))
    ValueError: capsfast.nn.MatrixRouting: scores must be [B=3, I=13], got [3, 12]
MatrixRouting(13, 4, 6, 10, 2)(zeros(3, 13, 6), zeros(3, 13).double())
    TypeError: capsfast.nn.MatrixRouting: scores must have the dtype of u (float32), …, got float64
MatrixRouting(13, 4, 6, 10, 2)(zeros(3, 13, 6).double(), zeros(3, 13).double())
    TypeError: capsfast.nn.MatrixRouting: u and weight must have one dtype, got float64 and float32; …
VectorRouting(13, 1, 5, 6)
    ValueError: capsfast.nn.VectorRouting: out_caps must be at least 2, got 1
VectorRouting(13, 4, 5, 6)(zeros(3, 14, 5))
    ValueError: capsfast.nn.VectorRouting: u must be [B, I=13, K=5], got [3, 14, 5]
VectorRouting(None, 4, 5, 6)(zeros(3, 13, 6))
    ValueError: capsfast.nn.VectorRouting: u must be [B, I, K=5], got [3, 13, 6]
VectorRouting(None, 4, 5, 6)(zeros(3, 0, 5))
    ValueError: capsfast.nn.VectorRouting: u must hold at least one input vector, got [3, 0, 5]
VectorRouting(None, 4, 5, 6)(zeros(3, 13, 5), ones(3, 13))
    TypeError: capsfast.nn.VectorRouting: mask must be bool (True = use), got float32; …
MatrixRouting(None, 4, 6, 10, 2)(zeros(3, 13, 6), zeros(3, 13), ones(3, 12).bool())
    ValueError: capsfast.nn.MatrixRouting: mask must be [B, I] = [3, 13], got [3, 12] …
VectorRouting(13, 4, 5, 6)(zeros(3, 13, 5).double())
    TypeError: capsfast.nn.VectorRouting: u and W_A must have one dtype, got float64 and float32; …

# Calls meant for another layer
DynamicRouting(3)
    TypeError: capsfast.DynamicRouting: takes (in_caps, out_caps, in_dim, out_dim, num_iterations=3) and options by …
DynamicRouting(3)
    TypeError: …'out_caps'; capsfast.compat.DynamicRouting can be called so, and for votes capsfast.nn.RoutingByAgree…
DynamicRouting(128)
    TypeError: capsfast.DynamicRouting: takes … missing a required argument: 'out_caps'; see docs/migration.md
DynamicRouting(in_capsules=7, out_capsules=4, in_dim=6, out_dim=5)
    TypeError: …(did you mean in_caps?); capsfast.compat.DynamicRouting or capsfast.compat.DynamicRoutingLayer can be …
DynamicRouting(7, 4, 6, 5, 3, share_weights=True)
    TypeError: …(did you mean shared_weight?); capsfast.compat.DynamicRoutingLayer can be called so; …
DynamicRouting(num_capsules=4, num_route_nodes=7, in_channels=6, out_channels=5)
    TypeError: …'num_capsules'; capsfast.compat.CapsuleLayer can be called so; see docs/migration.md
DynamicRouting(7, 6, 4, 5, routings=3)
    TypeError: …(did you mean num_iterations?); capsfast.compat.DenseCapsule can be called so; see docs/migration.md
DynamicRouting(7, 4, 6, 5, sofmax="in")
    TypeError: …got an unexpected keyword argument 'sofmax' (did you mean softmax?); see docs/migration.md
DigitCaps(num_lower=7, num_higher=4, lower_dim=6, higher_dim=5)
    TypeError: capsfast.nn.DigitCaps: takes …; capsfast.compat.DigitCaps can be called so; see docs/migration.md
RoutingByAgreement(7, 4, 3)
    TypeError: capsfast.nn.RoutingByAgreement: takes (num_iterations=3) …; capsfast.compat.AgreementRouting or …
DynamicRouting(7, 4, 6, 5)(zeros(2, 7, 4, 5), 2)
    TypeError: capsfast.DynamicRouting: takes u …, got [2, 7, 4, 5] and 1 more; for votes … capsfast.nn.RoutingByAgre…
DynamicRouting(7, 4, 6, 5)(zeros(2, 7, 4, 5))
    TypeError: capsfast.DynamicRouting: takes u …, got [2, 7, 4, 5]; for votes … capsfast.nn.RoutingByAgreement…

# Routings
RoutedCaps(2**20, 2**12, 64, 64)
    MemoryError: capsfast.nn.RoutedCaps: …a tensor of 70368744177664 bytes (6.55e+04 GiB); take smaller sizes
RoutedCaps(2**31 - 1, 2**31 - 1, 2**31 - 1, 4)
    MemoryError: capsfast.nn.RoutedCaps: …a tensor of more bytes than 64 bits count; take smaller sizes
MarginLoss()(zeros(1).expand(2**24, 2**24), zeros(1).long().expand(2**24))
    MemoryError: capsfast.nn.MarginLoss: …a tensor of … bytes…; take a smaller batch
RoutedCaps(3, 2, 4, 4, routing="magic")
    ValueError: capsfast.nn.RoutedCaps: routing must be one of 'dynamic', 'attention', …, got 'magic'
RoutedCaps(3, 2, 4, 4, routing=lambda *_, **__: Length())
    TypeError: capsfast.nn.RoutedCaps: routing must make a capsfast.nn.Routing, got Length; docs/passes.md shows how …
RoutedCaps(3, 2, 4, 4, routing=Length)
    TypeError: capsfast.nn.RoutedCaps: routing must be a name or a Routing class, got the class Length; derive it from …
RoutedCaps(3, 2, 4, 4, routing=Mean(3, 2, 4, 4))
    TypeError: capsfast.nn.RoutedCaps: routing must be a name …, got Mean; give its class, and its options to the layer
RoutedCaps(3, 2, 4, 4, routing=type("Empty", (Mean,), {"__init__": lambda self, *sizes: None}))
    TypeError: capsfast.nn.RoutedCaps: routing must be made by Routing.__init__, got Empty without it; call super()…
RoutedCaps(3, 2, 4, 4, routing="dynamic", sharpness=2)
    TypeError: capsfast.nn.RoutedCaps: routing dynamic has no option sharpness; it has num_iterations, learned_logits…
RoutedCaps(2, 2, 2, 2, routing="self", num_iterations=3)
    TypeError: capsfast.nn.RoutedCaps: routing self has no option num_iterations; it has shared_route, learned_logits, …
RoutedCaps(3, 2, 4, 6)(zeros(1, 4, 4))
    ValueError: capsfast.nn.RoutedCaps: u must be [B, in_caps=3, in_dim=4], got [1, 4, 4]
RoutedCaps(3, 2, 4, 6).routing(zeros(1, 4, 2, 6))
    ValueError: capsfast.AgreementRouting: votes must have I=in_caps=3, J=out_caps=2 and D=out_dim=6, got I=4, J=2, D=6
RoutedCaps(3, 2, 4, 6).routing(7)
    TypeError: capsfast.AgreementRouting: votes must be a torch.Tensor, a pair (u, weight) or Votes, got int
SelfRouting(3, 2, 4, 6)(zeros(1, 3, 2, 6))
    ValueError: capsfast.SelfRouting: the logits are made from the input capsules, got votes without them; …
SelfRouting(2, 2, 3, 2)((zeros(1, 2, 4), zeros(2, 2, 2, 4)))
    ValueError: capsfast.SelfRouting: u must have capsules of in_dim=3, got [1, 2, 4]
RoutedCaps(3, 2, 4, 4, routing=Routing)(zeros(1, 3, 4))
    NotImplementedError: capsfast.Routing: a routing overrides route(votes, activation); …
InvertedAttentionRouting(2, 2, 2, 1)
    ValueError: capsfast.InvertedAttentionRouting: out_dim must be at least 2, got 1; …
InvertedAttentionRouting(3, 2, 4, 4, learned_readout=False).logit(zeros(1, 2, 4))
    RuntimeError: capsfast.InvertedAttentionRouting: there is no classifier; build the routing with learned_readout=True
VariationalRouting(2, 2, 2, 4, nu=3)
    ValueError: capsfast.VariationalRouting: nu must be more than out_dim - 1 = 3, got 3
VariationalRouting(2, 2, 2, 2, batch_norm="poses")
    ValueError: capsfast.VariationalRouting: batch_norm must be False, True or 'both', got 'poses'
VariationalRouting(2, 2, 2, 2)(zeros(1, 2, 2, 2))
    ValueError: capsfast.VariationalRouting: batch_norm needs more than one sample (or position) in training, got 1; …
RoutedCaps(11, 4, 6, 6, routing="cosine", exact=True)
    ValueError: capsfast.nn.RoutedCaps: routing must take (u, weight), got CosineRouting…
CosineRouting(11, 4, 6, 6, exact=True)((zeros(2, 11, 6), zeros(11, 4, 6, 6)))
    ValueError: capsfast.nn.Votes: cosines need votes in memory, got (u, weight); give the votes
EMRouting(9, 3, 4, 5, inverse_temperature=[1, 2])
    ValueError: capsfast.EMRouting: inverse_temperature must hold num_iterations=3 numbers, got 2
EMRouting(9, 3, 4, 5, inverse_temperature="hot")
    TypeError: capsfast.EMRouting: inverse_temperature must be None, a number or a sequence of them, got 'hot'
EMRouting(9, 3, 4, 5, inverse_temperature=[1, 2, -1])
    ValueError: capsfast.EMRouting: inverse_temperature must be positive and finite, got -1
EMRouting(9, 3, 4, 5, momentum=1)
    ValueError: capsfast.EMRouting: momentum must be below 1, got 1
EMRouting(9, 3, 4, 5, cost_scale="max")
    ValueError: capsfast.EMRouting: cost_scale must be one of 'sum', 'inputs', 'mean', got 'max'
EMRouting(9, 3, 4, 5, cost_scale=-1.0)
    ValueError: capsfast.EMRouting: cost_scale must be positive and finite, got -1.0
EMRouting(9, 3, 4, 5, initial_beta_u=math.nan)
    ValueError: capsfast.EMRouting: initial_beta_u must be finite, got nan
EMRouting(5, 3, 4, 4)(votes, zeros(2, 5, 2, 3))
    ValueError: capsfast.EMRouting: activation must …
EMRouting(5, 3, 4, 4)(votes, [0.5])
    TypeError: capsfast.EMRouting: activation must be a torch.Tensor, got list
CosineRouting(5, 3, 4, 4)(votes[..., 0, 0], zeros(9, 9))
    ValueError: capsfast.CosineRouting: activation must be [B, I] = [2, 5], got [9, 9] (votes [2, 5, 3, 4])
couplings(Length(), zeros(1))
    TypeError: capsfast.nn.couplings: layer must be a routing layer, got Length

# Convolutional layers
ConvCaps2d(4, 6, 3, 5, weight=Groups(3))
    ValueError: capsfast.nn.ConvCaps2d: groups must divide in_types, got groups=3 and in_types=4
ConvCaps2d(4, 6, 3, 5, pose_rows=2)
    ValueError: capsfast.nn.ConvCaps2d: pose_rows must divide in_dim=3, got 2
ConvCaps2d(4, 6, 3, 5, pose_rows="2")
    TypeError: capsfast.nn.ConvCaps2d: pose_rows must be an int, got '2'
ConvCaps2d(2, 2, 4, 4, start="window")
    ValueError: capsfast.nn.ConvCaps2d: start='window' needs competition='child', got competition='window'…; leave out …
ConvCaps2d(4, 6, 3, 5)(zeros(2, 3, 4, 5, 6))
    ValueError: capsfast.nn.ConvCaps2d: poses must be [B, in_types=4, in_dim=3, H, W], got [2, 3, 4, 5, 6]
ConvCaps2d(4, 6, 3, 5)(zeros(2, 4, 3, 2, 6))
    ValueError: capsfast.nn.ConvCaps2d: a window of 3 x 3 (dilation 1 x 1) must fit …, got 2 x 6 with padding 0 x 0; …
ConvCaps2d(2, 2, 4, 4)(zeros(1, 2, 4, 5, 5), zeros(1, 2, 5, 5))
    ValueError: capsfast.nn.ConvCaps2d: dynamic routing takes no activation; the length of a pose says it
ConvCaps2d(2, 2, 4, 4, routing=Mean)(zeros(1, 2, 4, 5, 5), zeros(1, 2, 5, 4))
    ValueError: capsfast.nn.ConvCaps2d: activation must be [B, in_types, H, W] of poses …, got [1, 2, 5, 4]
SlimConvCaps3d(3, 4, 3, 5, (3, 3))
    TypeError: capsfast.nn.SlimConvCaps3d: kernel_size must be an int or three of them, got (3, 3)
SlimConvCaps2d(3, 4, 3, 5, 3, 0)
    ValueError: capsfast.nn.SlimConvCaps2d: stride must be at least 1, got 0
SlimConvTransposeCaps3d(3, 4, 3, 5, routing="self")
    ValueError: capsfast.nn.SlimConvTransposeCaps3d: routing must need only votes, …, got self, which needs the input …
SlimConvCaps2d(3, 4, 3, 5, softmax="no")
    ValueError: capsfast.nn.SlimConvCaps2d: softmax must be one of 'out', 'in', 'everywhere', got 'no'
SlimConvCaps3d(3, 4, 3, 5)(zeros(2, 3, 3, 4, 4))
    ValueError: capsfast.nn.SlimConvCaps3d: poses must have shape [B, in_types, in_dim, Z, H, W], got [2, 3, 3, 4, 4]
SlimConvCaps3d(3, 4, 3, 5)(zeros(2, 3, 3, 4, 2, 4))
    ValueError: capsfast.nn.SlimConvCaps3d: a window of 3 x 3 x 3 (dilation 1 x 1 x 1) must fit …, got 4 x 2 x 4 with …
SlimConvTransposeCaps2d(3, 4, 3, 5, 2, padding=1)(zeros(2, 3, 3, 1, 4))
    ValueError: capsfast.nn.SlimConvTransposeCaps2d: the output must have at least one position, got 0 x 6 for 1 x 4; …
SlimConvTransposeCaps2d(3, 4, 3, 5)(zeros(2, 3, 3, 4, 4), size=(8, 10))
    ValueError: capsfast.nn.SlimConvTransposeCaps2d: size must be at least [8, 8] and less than a stride of (2, 2)…
SlimConvCaps2d(3, 4, 3, 5)(zeros(2, 3, 3, 4, 4), zeros(2, 3, 4, 4))
    ValueError: capsfast.nn.SlimConvCaps2d: dynamic routing takes no activation; the length of a pose says it
SlimConvCaps2d(3, 4, 3, 5, routing=Mean)(zeros(2, 3, 3, 4, 4), zeros(2, 3, 4, 5))
    ValueError: capsfast.nn.SlimConvCaps2d: activation must be [B, in_types, H, W] of poses …, got [2, 3, 4, 5]
ClassCaps2d(2, 3, 4, 1, 2)
    ValueError: capsfast.nn.ClassCaps2d: out_dim must be at least 2 for two coordinates, got 1; …
ClassCaps2d(2, 3, 4, 4, 2, coordinates=(1, math.inf))
    ValueError: capsfast.nn.ClassCaps2d: scale of coordinates must be finite, got inf
ClassCaps2d(2, 3, 4, 4, 2, positions=2)
    TypeError: capsfast.nn.ClassCaps2d: positions is not an option; all places share the weight of a type
ClassCaps2d(2, 3, 4, 4, 2)(zeros(1, 2, 4, 2, 3))
    ValueError: capsfast.nn.ClassCaps2d: u must be [B, in_types=2, in_dim=4, 2, 2] or the list [B, 8, in_dim], got …
ClassCaps2d(2, 3, 4, 4, 2)(zeros(1, 2, 4, 2, 2), zeros(1, 2, 2, 3))
    ValueError: capsfast.nn.ClassCaps2d: activation must be [B, in_types, H, W] = [1, 2, 2, 2], got [1, 2, 2, 3]
ClassCaps2d(2, 3, 4, 4, 2)(zeros(1, 2, 4, 2, 2), [1.0])
    TypeError: capsfast.nn.ClassCaps2d: activation must be a torch.Tensor [B, I], got list

# Primary capsules
PrimaryCaps(3, 4, 5, order="view", flatten=False)
    ValueError: capsfast.nn.PrimaryCaps: flatten=False needs capsules with a place, got order='view', which has none
PrimaryCaps(3, 4, 5)(zeros(2, 4, 9, 9))
    ValueError: capsfast.nn.PrimaryCaps: features must be [B, in_channels=3, H, W], got [2, 4, 9, 9]
PrimaryCaps(3, 4, 5)(zeros(2, 3, 9, 7))
    ValueError: capsfast.nn.PrimaryCaps: a window of 9 x 9 … must fit into the input with its padding, got 9 x 7 with …
PrimaryCaps(3, 4, 5).from_list({}, "capsule")
    ValueError: capsfast.nn.PrimaryCaps.from_list: each must be one of 'type', 'component', got 'capsule'
FlattenCaps()(zeros(2, 3, 4))
    ValueError: capsfast.nn.FlattenCaps: poses must have shape [B, C, K, H, W], got [2, 3, 4]
PrimaryMatrixCaps(3, 2, 4)(zeros(1, 2, 5, 5))
    ValueError: capsfast.nn.PrimaryMatrixCaps: features must be [B, in_channels=3, H, W], got [1, 2, 5, 5]
DepthwisePrimaryCaps(2, 3, 1)(zeros(1, 5, 2, 2))
    ValueError: capsfast.nn.DepthwisePrimaryCaps: features must be [B, in_channels=6, H, W], got [1, 5, 2, 2]

# Interests
InterestCapsules(3, 6, 4)
    ValueError: capsfast.nn.InterestCapsules: initial_logits='fixed' needs max_length, …, got None
InterestCapsules(3, 6, 4, weight="position", initial_logits="zero")
    ValueError: capsfast.nn.InterestCapsules: weight='position' needs max_length, …, got None
interests(clicks, tensor([24, 1, 7, 25, 16]))
    ValueError: capsfast.nn.InterestCapsules: lengths must be from 0 to I=24, got 1 to 25
interests(clicks, tensor([24.0, 1, 7, 0, 16]))
    TypeError: capsfast.nn.InterestCapsules: lengths must hold integers, got float32
interests(clicks, tensor([24, 1, 7, 0, 16]), mask=ones(5, 24).bool())
    ValueError: capsfast.nn.InterestCapsules: …at most one of lengths, mask and offsets…
interests(clicks[0, :9], offsets=tensor([0, 4, 3, 9], dtype=uint8))
    ValueError: capsfast.nn.InterestCapsules: offsets must begin with 0, not decrease and end with N=9, …
interests(clicks[0, :9], offsets=tensor([1, 9]))
    ValueError: capsfast.nn.InterestCapsules: offsets must begin with 0, not decrease and end with N=9, …
interests(clicks[0, :9], offsets=zeros(0).long())
    ValueError: capsfast.nn.InterestCapsules: offsets must … at least one number, got none
interests(zeros(25, 6), offsets=tensor([0, 25]))
    ValueError: capsfast.nn.InterestCapsules: …at most max_length=24 long, got one of 25
interests(zeros(2, 30, 6))
    ValueError: capsfast.nn.InterestCapsules: …at most max_length=24, got 30
interests(clicks[..., :5])
    ValueError: capsfast.nn.InterestCapsules: behaviours must end in in_dim=6, …
interests(clicks, offsets=tensor([0, 4]))
    ValueError: capsfast.nn.InterestCapsules: behaviours must have shape [N, K], …
interests(clicks.double())
    TypeError: capsfast.nn.InterestCapsules: …must have one dtype…
interests(clicks, mask=ones(5, 24))
    TypeError: capsfast.nn.InterestCapsules: mask must be bool…
interests(clicks, interests=tensor([0, 1, 2, 3, 3]))
    ValueError: capsfast.nn.InterestCapsules: interests must be from 1 to num_interests=3, got 0 to 3
interests(clicks, logits=zeros(3, 3))
    ValueError: capsfast.nn.InterestCapsules: logits must be [I, J]…
LabelAwareAttention(0.5, signed=True)
    ValueError: capsfast.nn.LabelAwareAttention: power must be 0, from 1 on or math.inf, got 0.5
LabelAwareAttention(1.5)
    ValueError: capsfast.nn.LabelAwareAttention: power must be an integer unless signed…
LabelAwareAttention()(clicks, clicks[:3, 0])
    ValueError: capsfast.nn.LabelAwareAttention: items must be [B, D] or [B, N, D]…
interest_scores(clicks, zeros(3, 5))
    ValueError: capsfast.nn.interest_scores: items must end in D=6, …
interest_scores(clicks, None)
    TypeError: capsfast.nn.interest_scores: items must be a torch.Tensor, got NoneType
interest_scores(clicks, clicks[0], ones(3, 24).bool())
    ValueError: capsfast.nn.interest_scores: mask must be [B, J] = [5, 24], got [3, 24]

# Readouts, decoders and losses
Length()(zeros(5).long())
    TypeError: capsfast.nn.Length: capsules must be float32, …
Length()(3)
    TypeError: capsfast.nn.Length: capsules must be a torch.Tensor, got int
Mask()(zeros(4, 6))
    ValueError: capsfast.nn.Mask: capsules must have shape [B, J, D], got [4, 6]
Mask()(zeros(5, 4, 6), zeros(5).int())
    TypeError: capsfast.nn.Mask: labels must be int64, got int32; convert with labels.long()
Mask()(zeros(5, 4, 6), zeros(3).long())
    ValueError: capsfast.nn.Mask: labels must be [B] = [5], got [3]
Mask()(zeros(5, 4, 6), arange(5))
    ValueError: capsfast.nn.Mask: labels must be in [0, 3], got 4
Mask()(zeros(5, 4, 6), arange(5) - 1)
    ValueError: capsfast.nn.Mask: labels must be in [0, 3], got -1
Mask()(zeros(5, 4, 6), arange(5, device="meta"))
    ValueError: capsfast.nn.Mask: labels must be on cpu, got meta; …
Decoder(4, 6, (28, 28))
    ValueError: capsfast.nn.Decoder: image_shape must be (channels, height, width), got (28, 28)
ConvDecoder(4, 6, (1, 2.5, 3))
    TypeError: capsfast.nn.ConvDecoder: image_shape must be an int, got 2.5
Decoder(4, 6, masked=False, class_independent=True)
    ValueError: capsfast.nn.Decoder: class_independent needs masked=True, got masked=False
Decoder(4, 6)(zeros(5, 6, 4))
    ValueError: capsfast.nn.Decoder: capsules must be [B, num_caps=4, dim=6], got [5, 6, 4]
ConvDecoder(4, 6, masked=False)(zeros(5, 4, 6), arange(5))
    ValueError: capsfast.nn.ConvDecoder: labels need masked=True, which keeps the capsule they name
MarginLoss()(zeros(5, 4), zeros(5))
    TypeError: capsfast.nn.MarginLoss: targets must be int64, got float32; convert with targets.long()
MarginLoss()(zeros(5, 4), ones(5, 3))
    ValueError: capsfast.nn.MarginLoss: targets must be [B] or [B, J] = [5, 4], got [5, 3]
MarginLoss()(zeros(5), arange(5))
    ValueError: capsfast.nn.MarginLoss: lengths must have shape [B, J], got [5]
MarginLoss()(zeros(5, 4, 16, 1), arange(5))
    ValueError: capsfast.nn.MarginLoss: lengths must be [B, J] or …, got [5, 4, 16, 1]; give lengths.squeeze(3)
MarginLoss()(zeros(5, 4, 1, 16), arange(5))
    ValueError: capsfast.nn.MarginLoss: lengths must be [B, J] or …, got [5, 4, 1, 16]; give lengths.squeeze(2)
SpreadLoss()(zeros(5, 1, 4, 16, 1), arange(5), 0)
    ValueError: capsfast.nn.SpreadLoss: activations must be …, got [5, 1, 4, 16, 1]; give activations.squeeze((4, 1))
MarginLoss()(ones(5, 4).long(), arange(5))
    TypeError: capsfast.nn.MarginLoss: lengths must be float32, …
ReconstructionLoss()(zeros(5, 1, 4, 4), zeros(5, 4, 4))
    ValueError: capsfast.nn.ReconstructionLoss: reconstruction and images must have one shape [B, ...], got … and …
ReconstructionLoss()(zeros(5, 4), zeros(5, 4, dtype=uint8))
    TypeError: capsfast.nn.ReconstructionLoss: images must be float32, … got uint8; convert it with images.float()
SpreadLoss()(zeros(5, 4), ones(5, 4), 0)
    ValueError: capsfast.nn.SpreadLoss: targets must have shape [B], got [5, 4]
CouplingEntropy()(zeros(5, 4))
    ValueError: capsfast.nn.CouplingEntropy: coupling must have shape [B, I, J], got [5, 4]

# Networks
CapsNet(1, (28, 28, 1))
    TypeError: capsfast.models.CapsNet: image_size must be an int or two of them, got (28, 28, 1)
CapsNet(1, 8, kernel_size=9)
    ValueError: capsfast.models.CapsNet: a window of 9 x 9 … must fit …, got 8 x 8 with padding 0 x 0; …
DeepCaps(dims=(4, 8))
    ValueError: capsfast.models.DeepCaps: the last two of dims must be alike, got (4, 8)
DeepCaps(dims=(4,))
    ValueError: capsfast.models.DeepCaps: dims must hold at least 2 of them, got (4,)
EfficientCapsNet(1, (8, 2))
    ValueError: capsfast.models.EfficientCapsNet: image_size must be at least 3, got 8 x 2
EfficientCapsNet(strides=(1, 2))
    ValueError: capsfast.models.EfficientCapsNet: strides must hold four of them, got (1, 2)
EfficientCapsNet(1, 8, strides=(2, 2, 2, 2))
    ValueError: capsfast.models.EfficientCapsNet: image_size must be larger for these kernel_sizes and …, got 8 x 8
EfficientCapsNet(1, 8, kernel_size=4)
    ValueError: capsfast.models.EfficientCapsNet: a window of 4 x 4 … must fit …, got 3 x 3 with padding 0 x 0; …
InvertedAttentionCapsNet(primary_dim=1)
    ValueError: capsfast.models.InvertedAttentionCapsNet: primary_dim must be at least 2, got 1
MatrixCapsNet(form="variational", activation_std=3.0)
    ValueError: capsfast.models.MatrixCapsNet: activation_std needs form='em': a norm would undo it; leave it out
MatrixCapsNet(windows=(5, 3, 3))
    TypeError: capsfast.models.MatrixCapsNet: windows must be three pairs (kernel size, stride), got (5, 3, 3)
MatrixCapsNet(windows=3)
    TypeError: capsfast.models.MatrixCapsNet: windows must be three pairs (kernel size, stride), got 3
MatrixCapsNet(windows=[(3, 1)] * 2)
    ValueError: capsfast.models.MatrixCapsNet: windows must be three pairs (kernel size, stride), got …
MatrixCapsNet(1, 4, windows=[(3, 1)] * 3)
    ValueError: capsfast.models.MatrixCapsNet: a window of 3 x 3 … must fit …, got 2 x 2 with padding 0 x 0; …
MatrixCapsNet().reconstruct(zeros(2, 4, 4))
    RuntimeError: capsfast.models.MatrixCapsNet: there is no decoder
SegCaps(1, 9, 3, kernel_size=4)
    ValueError: capsfast.models.SegCaps: kernel_size must be odd, so that a window has a middle, got 4
SegCaps(1, 9, 3, types=(2, 4))
    ValueError: capsfast.models.SegCaps: types must be an int or one for each of dims=(8, 16, 16), got (2, 4)
SegCaps(1, 8, 3, form="r3", types=2)
    ValueError: capsfast.models.SegCaps: form='r3' has its own conv_channels, types, dims and kernel_size, got 16, …
SegCaps(1, 12, 3, form="r3")
    ValueError: capsfast.models.SegCaps: with form='r3' image_size must be divisible by 8, got (12, 12); pad the images
SegCaps(1, 9, 3, sharpness=1)
    TypeError: capsfast.nn.SlimConvCaps2d: routing dynamic has no option sharpness; it has num_iterations, …
SegCaps(1, 9, 3)(zeros(1, 1, 9, 9), zeros(1, 3, 9, 8).bool())
    ValueError: capsfast.models.SegCaps: classes must be [B, J, H, W] of capsules …, got [1, 3, 9, 8]
SegCaps(1, 9, 3)(zeros(1, 1, 9, 9), zeros(1, 3, 9, 9))
    TypeError: capsfast.models.SegCaps: classes must be bool, got float32; convert with classes.bool()
stacked.SetTransformer(3, 8, 2, num_heads=3)
    ValueError: capsfast.nn.stacked.SetTransformer: num_heads must divide dim=16, got 3

# Samples
InterestCapsules(3, 6, 4, max_length=24)(clicks, tensor([4]))
    ValueError: capsfast.nn.InterestCapsules: lengths must be [5], one for each user, got [1]
InterestCapsules(3, 6, 4, max_length=24)([1.0], None)
    TypeError: capsfast.nn.InterestCapsules: behaviours must be a torch.Tensor [B, I, K], got list
Decoder(4, 3, (1, 4, 4))(zeros(2, 4, 3), tensor([5, 1]))
    ValueError: capsfast.nn.Mask: labels must be in [0, 3], got 5

# Programs
export.program(Length(), clicks)
    ValueError: capsfast.export.program: model must be in evaluation mode, got one in training mode; call model.eval()
export.program(Length().eval(), clicks[:1])
    ValueError: capsfast.export.program: …batch of 2 or more for dynamic_batch=True, got [1, 24, 6]…
export.program(Length().eval(), 3)
    TypeError: capsfast.export.program: example must be a tensor or a sequence of arguments, got int…
export.program(Length.forward, clicks)
    TypeError: capsfast.export.program: model must be a torch.nn.Module or an exported program, got function…
export.to_package(Length().eval(), clicks, "model.so")
    ValueError: capsfast.export.to_package: file must end in .pt2, got 'model.so'…
export.to_onnx(Length().eval(), clicks, "absent/model.onnx")
    ValueError: capsfast.export.to_onnx: file must be in a folder that exists…
export.to_package(export.program(Length().eval(), clicks), clicks, "model.pt2")
    ValueError: capsfast.export.to_package: example must be None for an exported program…

# Diagnosis
diagnose(CapsNet(1, 8), zeros(2, 30, 5))
    TypeError: capsfast.diagnose: layer must be …, got CapsNet; of a model, take its part .routing
diagnose(DynamicRouting(30, 4, 5, 6), zeros(0, 30, 5))
    ValueError: capsfast.diagnose: u must hold at least one sample, got [0, 30, 5]
diagnose(DynamicRouting(30, 4, 5, 6), [1.0])
    TypeError: capsfast.diagnose: u must be a torch.Tensor, got list
diagnose(ConvCaps2d(3, 4, 5, 6, padding=1), zeros(2, 30, 5))
    ValueError: capsfast.nn.ConvCaps2d: poses must have shape [B, in_types, in_dim, H, W]…
diagnose(RoutedCaps(30, 4, 5, 6, routing="inverted-attention", learned_readout=False), zeros(2, 30, 5))
    ValueError: capsfast.diagnose: the activations of RoutedCaps… must depend on u, got constants; …
"""
ROWS = re.findall(r"^([^#\s].*)\n    (\w+): (.*)$", REFUSED, re.MULTILINE)
NAMES: dict[str, Any] = {
    **{name: getattr(module, name) for module in (nn, models) for name in module.__all__},
    **{name: getattr(torch, name) for name in ("arange", "ones", "tensor", "uint8", "zeros")},
    **{each.__name__: each for each in (Mean, math, capsfast.DynamicRouting, capsfast.diagnose)},
    **{
        name: getattr(capsfast, name)
        for name in ("dynamic_routing", "route_votes", "routing_pass", "squash", "votes_pass")
    },
    "__name__": __name__,
    "export": capsfast.export,
    "stacked": stacked,
    "votes": torch.randn(2, 5, 3, 4, 3, 2),
    "interests": nn.InterestCapsules(3, 6, 4, max_length=24),
    "clicks": torch.zeros(5, 24, 6),
}


def test_every_row_is_read() -> None:
    assert len(ROWS) == len([line for line in REFUSED.splitlines() if line[:1] not in ("", " ", "#")]) > 150


@pytest.mark.rows(len(ROWS))
@pytest.mark.parametrize(("call", "error", "said"), ROWS, ids=[call for call, _, _ in ROWS])
def test_refused(call: str, error: str, said: str) -> None:
    with pytest.raises(getattr(builtins, error), match=f"^{'.*'.join(map(re.escape, said.split('…')))}$") as caught:
        eval(call, NAMES)
    assert type(caught.value) is getattr(builtins, error)
    assert not re.search(r"\{|  ", str(caught.value)), "a message that was not filled in"
