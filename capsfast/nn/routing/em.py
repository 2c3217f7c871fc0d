"""EM routing: every output capsule is a Gaussian of votes."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import checks
from .. import _arguments
from .base import Capsules, IterativeRouting
from .votes import Votes, inverse

NONLINEARITY = ("sigmoid", "softmax")
COST = ("variance", "mass")
COST_SCALE = ("sum", "inputs", "mean")


class EMRouting(IterativeRouting):
    """EM routing (Hinton, Sabour, Frosst 2018, procedure 1).

    Output capsule j is a Gaussian with mean m_j, its pose, and a variance for each component. An iteration is::

        mean, variance: of the votes, weighted by r_ij
        cost_j = scale mass_j sum_d (beta_u_j + log sigma_jd)            mass_j = sum_i r_ij
        a_j = sigmoid(inverse_temperature (beta_a_j - cost_j))
        r_ij = softmax_j(log a_j + log N(vote_ij; m_j, sigma_j^2)) a_i   with r_ij = a_i / J in the first one

    Parameters: ``beta_a [out_caps]``, ``beta_u [out_caps]``, or ``[out_caps, out_dim]`` with ``component_beta``.

    An output capsule of mass 0 keeps the mean of the iteration before, 0 in the first one, and has the least variance.

    Args:
        num_iterations: M-steps, at least 1.
        inverse_temperature: None for ``final (1 - 0.95^(t+1))`` in iteration t = 0, 1, ... (the authors' code); a
            number for all iterations; or a number for each of them.
        final: what that schedule goes to. The authors have 0.01 beside the plain sum of costs.
        floor: added to the variance; 5e-4 in the authors' code.
        momentum: share of the mean of the iteration before in the mean, which starts at 0. The authors' code has
            0.1, the paper 0. The variance is about this mean.
        component_beta: a beta_u for each component of a pose.
        initial_beta_a, initial_beta_u: what the parameters start with. None for beta_u is 0, with ``cost="mass"`` -1.
        cost: ``"variance"``, as above; ``"mass"``: without log sigma, so that the mass alone decides.
        cost_scale: ``"sum"``: 1, the paper's; ``"inputs"``: J / I, so that equal coupling of activations 1 has mass 1,
            whatever the size of the layer (Gritzman 2019); ``"mean"``: 1 / mean of mass_j, whatever the activations
            are; or a number.
        nonlinearity: ``"sigmoid"``, or ``"softmax"`` over the output capsules.
        isotropic: one variance for all components, the mean of theirs.
        leaky: the softmax over the output capsules has one more entry of logit 0 (the authors' code).
        all others: as for :class:`Routing`.

    Source: also the authors' code, google-research/capsule_em; Gritzman (2019), "Avoiding implementation pitfalls of
    matrix capsules with EM routing".

    Raises:
        ValueError, TypeError: a size or an option that does not fit.
    """

    uses_activation = True

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        in_dim: int,
        out_dim: int,
        *,
        num_iterations: int = 3,
        inverse_temperature: float | Sequence[float] | None = None,
        final: float = 10.0,
        floor: float = 1.0,
        momentum: float = 0.0,
        component_beta: bool = False,
        initial_beta_a: float = 0.0,
        initial_beta_u: float | None = None,
        cost: str = "variance",
        cost_scale: str | float = "mean",
        nonlinearity: str = "sigmoid",
        isotropic: bool = False,
        leaky: bool = False,
        **made: Any,
    ) -> None:
        super().__init__(in_caps, out_caps, in_dim, out_dim, num_iterations=num_iterations, **made)
        op = self.op
        self.inverse_temperatures = schedule(op, inverse_temperature, final, num_iterations)
        _arguments.positive(op, "floor", floor)
        _arguments.positive(op, "momentum", momentum, zero=True)
        if momentum >= 1:
            raise ValueError(f"{op}: momentum must be below 1, got {momentum}")
        for name, value in (("component_beta", component_beta), ("isotropic", isotropic), ("leaky", leaky)):
            checks.boolean(op, name, value)
        checks.choice(op, "cost", cost, COST)
        checks.choice(op, "nonlinearity", nonlinearity, NONLINEARITY)
        if isinstance(cost_scale, str):
            checks.choice(op, "cost_scale", cost_scale, COST_SCALE)
        else:
            _arguments.positive(op, "cost_scale", cost_scale)
        self.floor = floor
        self.momentum = momentum
        self.cost = cost
        self.cost_scale = cost_scale
        self.nonlinearity = nonlinearity
        self.isotropic = isotropic
        self.leaky = leaky
        if initial_beta_u is None:
            initial_beta_u = 0.0 if cost == "variance" else -1.0
        _arguments.finite(op, "initial_beta_a", initial_beta_a)
        _arguments.finite(op, "initial_beta_u", initial_beta_u)
        size = (out_caps, out_dim) if component_beta else (out_caps,)
        self.beta_a = nn.Parameter(torch.full((out_caps,), float(initial_beta_a), **self._made))
        self.beta_u = nn.Parameter(torch.full(size, float(initial_beta_u), **self._made))

    def route(self, votes: Votes, activation: Tensor | None) -> Capsules:
        checks.not_negative(self.op, "activation", activation)
        center = votes.origin(activation)  # the result does not depend on it
        last = torch.zeros_like(center)
        score: dict[str, Any] = {}
        for t, inverse_temperature in enumerate(self.inverse_temperatures):
            # About the last mean: in float32, second / mass - shift^2 does not cancel, however far from 0 votes lie.
            moments = votes.moments(center=center, activation=activation, second=True, leaky=self.leaky, **score)
            assert moments.second is not None
            per_mass = inverse(moments.mass)[..., None]
            shift = moments.first * per_mass
            poses, variance = center + shift, moments.second * per_mass - shift.square()
            if self.momentum:
                held = self.momentum * (last - poses)
                poses, variance = poses + held, variance + held.square()
            variance = variance.clamp_min(0) + self.floor
            if self.isotropic:
                variance = variance.mean(2, keepdim=True).expand_as(variance)
            log_sigma = 0.5 * variance.log().sum(2)  # the sum over the components
            logit = inverse_temperature * (self.beta_a.to(poses.dtype) - self._cost(votes, moments.mass, log_sigma))
            if t + 1 < self.num_iterations:
                prior = self._activated(votes, logit, log=True) - (log_sigma + 0.5 * votes.D * math.log(2 * math.pi))
                score = {"precision": variance.reciprocal(), "prior": prior}
                center = last = poses
        return Capsules(poses, self._activated(votes, logit))

    def _cost(self, votes: Votes, mass: Tensor, log_sigma: Tensor) -> Tensor:
        """``[B, J]``."""
        beta_u = self.beta_u.to(mass.dtype)
        each = beta_u.sum(1) if beta_u.dim() == 2 else beta_u * votes.D
        if self.cost == "variance":
            each = each + log_sigma
        if self.cost_scale == "inputs":
            mass = mass * (votes.J / votes.I)
        elif self.cost_scale == "mean":
            there = votes.J if votes.out_mask is None else votes.out_mask.sum(1, keepdim=True)
            mass = mass * (there * inverse(mass.sum(1, keepdim=True)))
        elif not isinstance(self.cost_scale, str):
            mass = mass * self.cost_scale
        return mass * each

    def _activated(self, votes: Votes, logit: Tensor, log: bool = False) -> Tensor:
        """``[B, J]``: activations, or their logarithms."""
        if self.nonlinearity == "sigmoid":
            return F.logsigmoid(logit) if log else logit.sigmoid()
        if votes.out_mask is not None:
            # Not -inf, of which a row with no capsule left would become nan.
            logit = logit.masked_fill(~votes.out_mask, torch.finfo(logit.dtype).min)
        return logit.log_softmax(1) if log else logit.softmax(1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, inverse_temperatures={self.inverse_temperatures}"


def schedule(
    op: str, inverse_temperature: float | Sequence[float] | None, final: float, num_iterations: int
) -> tuple[float, ...]:
    """An inverse temperature for each iteration."""
    _arguments.positive(op, "final", final)
    if inverse_temperature is None:
        return tuple(final * (1 - 0.95 ** (t + 1)) for t in range(num_iterations))
    if isinstance(inverse_temperature, (int, float)):
        inverse_temperature = [inverse_temperature] * num_iterations
    if not isinstance(inverse_temperature, Sequence) or isinstance(inverse_temperature, str):
        raise TypeError(
            f"{op}: inverse_temperature must be None, a number or a sequence of them, got {inverse_temperature!r}"
        )
    if len(inverse_temperature) != num_iterations:
        raise ValueError(
            f"{op}: inverse_temperature must hold num_iterations={num_iterations} numbers, "
            f"got {len(inverse_temperature)}"
        )
    for value in inverse_temperature:
        _arguments.positive(op, "inverse_temperature", value)
    return tuple(inverse_temperature)
