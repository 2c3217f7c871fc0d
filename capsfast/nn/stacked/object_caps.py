"""Object capsules that explain the poses of parts (Kosiorek et al. 2019, section 2.3)."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...environment.private_torch import result
from .._layer import Layer
from .affine import affine, compose


@result
class Objects(NamedTuple):
    """K object capsules for M parts.

    votes ``[B, K, M, 6]``: the pose that an object predicts for a part. vote_presences ``[B, K, M]``: presence of the
    object times presence of the vote. scales ``[B, K, M]``: standard deviations of the votes. deformation ``[]``: half
    the sum of the squared sample-dependent parts of the relations, mean over the samples.
    """

    votes: Tensor
    vote_presences: Tensor
    scales: Tensor
    deformation: Tensor

    @property
    def presences(self) -> Tensor:
        """``[B, K]``: the largest presence of a vote of each object."""
        return self.vote_presences.amax(2)


@result
class Explained(NamedTuple):
    """log_likelihood ``[B]`` of the part poses; posterior ``[B, M, K]``: the share of each object in a part. The rest
    belongs to no object."""

    log_likelihood: Tensor
    posterior: Tensor


class _EachLinear(Layer):
    """A linear layer for each object capsule, ``[B, K, n] -> [B, K, m]``."""

    def __init__(
        self, count: int, inputs: int, outputs: int, bias: bool = True, std: float | None = None, **factory_kwargs: Any
    ) -> None:
        super().__init__()
        self.std = std or inputs**-0.5
        self.weight = nn.Parameter(torch.empty(count, inputs, outputs, **factory_kwargs))
        self.bias = nn.Parameter(torch.empty(count, outputs, **factory_kwargs)) if bias else None
        self._initialise()

    def _initialise(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bkn,knm->bkm", x, self.weight)
        return y if self.bias is None else y + self.bias


class ObjectCaps(Layer):
    """Object capsules from encodings of a set of parts, each with a vote for the pose of each part.

    An object has a pose in the image and a relation to each part: a constant plus a deviation that depends on the
    sample. A vote is the product of pose and relation.

    Args:
        in_dim: size of an encoding.
        num_objects, num_parts: K and M.
        dim: size of the description of an object.
        hidden: width of the two hidden layers of each object.
        noise: in training, uniform noise from -noise to noise is added to the logits of the presences.
        device, dtype: device and dtype of the parameters.

    Shapes: ``[B, K, in_dim]`` to :class:`Objects`.
    """

    def __init__(
        self,
        in_dim: int,
        num_objects: int = 24,
        num_parts: int = 24,
        *,
        dim: int = 32,
        hidden: int = 128,
        noise: float = 2.0,
        **factory_kwargs: Any,
    ) -> None:
        super().__init__()
        self.num_parts, self.noise = num_parts, noise
        K, M = num_objects, num_parts
        self.describe = nn.Sequential(
            _EachLinear(K, in_dim, hidden, **factory_kwargs), nn.ReLU(), _EachLinear(K, hidden, dim, **factory_kwargs)
        )
        # The last layer has no bias, because `relations` holds the constant part, which the deformation does not count.
        # The layer starts small, so that relations are nearly constant and presences near 1/2.
        self.predict = nn.Sequential(
            _EachLinear(K, dim, hidden, **factory_kwargs),
            nn.ReLU(),
            _EachLinear(K, hidden, 8 * M + 7, bias=False, std=0.1 * hidden**-0.5, **factory_kwargs),
        )
        self.relations = nn.Parameter(torch.empty(K, M, 6, **factory_kwargs))
        self.pose = nn.Parameter(torch.empty(K, 6, **factory_kwargs))
        self.presence = nn.Parameter(torch.empty(K, 1 + M, **factory_kwargs))
        self.scale = nn.Parameter(torch.empty(K, M, **factory_kwargs))
        self._initialise()

    def _initialise(self) -> None:
        for drawn in (self.relations, self.pose):
            nn.init.normal_(drawn, std=0.1)
        for neutral in (self.presence, self.scale):
            nn.init.zeros_(neutral)

    def forward(self, encodings: Tensor) -> Objects:
        M = self.num_parts
        predicted = self.predict(self.describe(encodings))
        relations, pose, logits, scales = predicted.split((6 * M, 6, 1 + M, M), 2)
        relations = relations.unflatten(2, (M, 6))
        logits = logits + self.presence
        if self.training and self.noise:
            logits = logits + self.noise * (2 * torch.rand_like(logits) - 1)
        presence = logits.sigmoid()
        votes = compose(affine(pose + self.pose)[:, :, None], affine(relations + self.relations))
        return Objects(
            votes.flatten(3),
            presence[:, :, :1] * presence[:, :, 1:],
            nn.functional.softplus(scales + self.scale + 0.5) + 1e-2,
            relations.square().sum() / 2 / relations.shape[0],
        )


def explain(objects: Objects, poses: Tensor, presences: Tensor, nobody: float = 1e-4) -> Explained:
    """How well objects predict the poses of parts: the weighted sum of the densities of the votes for each part.

    The weight of a vote is its presence, a_k a_km in equation 5. The paper divides it by the sum of all weights. This
    function does not, like public code of the network, so that a present object explains more.

    Args:
        objects: objects with votes for M parts.
        poses: poses of the parts, ``[B, M, 2, 3]``.
        presences: presences of the parts, ``[B, M]``: exponents of their likelihoods.
        nobody: weight times density of a component that belongs to no object, positive.
    """
    x = poses.flatten(2)[:, None]  # [B, 1, M, 6]
    scales = objects.scales[..., None]
    density = -0.5 * ((x - objects.votes) / scales).square() - scales.log() - 0.5 * math.log(2 * math.pi)
    joint = objects.vote_presences.clamp_min(1e-16).log() + density.sum(3)  # [B, K, M]
    rest = torch.full_like(joint[:, :1], math.log(nobody))
    total = torch.cat([joint, rest], 1).logsumexp(1)  # [B, M]
    posterior = (joint - total[:, None]).exp().transpose(1, 2)
    return Explained((presences * total).sum(1), posterior)
