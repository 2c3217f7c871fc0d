"""EM routing: every output capsule is a Gaussian of votes."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...calls import checks
from ...calls.options import EMOptions
from ...calls.precision import wide_dtype
from ...passes import em_update
from .base import Capsules, IterativeRouting
from .votes import Votes

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
        final: what that schedule goes to. The authors' code has 0.01 for costs twice as large: 0.02 with ``"sum"``,
            and a quarter of it for class capsules.
        floor: added to the variance; 5e-4 in the authors' code.
        momentum: share of the previous iteration's mean in the new mean; the mean starts at 0. The authors' code has
            0.1, the paper 0. The variance is about the new mean.
        component_beta: a beta_u for each component of a pose.
        initial_beta_a, initial_beta_u: initial values. None for beta_u means 0, with ``cost="mass"`` -1.
        cost: ``"variance"``, as above; ``"mass"``: without log sigma, so that the mass alone decides.
        cost_scale: ``"sum"``: 1, the paper's; ``"inputs"``: J / I, so that equal coupling of activations 1 has mass 1,
            whatever the size of the layer (Gritzman 2019); ``"mean"``: 1 / mean of mass_j, whatever the activations
            are; or a number.
        nonlinearity: ``"sigmoid"``, or ``"softmax"`` over the output capsules.
        isotropic: one variance for all components, the mean of the components' variances.
        leaky: the softmax over the output capsules has one more entry of logit 0 (the authors' code).
        all others: as for :class:`Routing`.

    Source: also the authors' code, google-research/capsule_em; Gritzman (2019), "Avoiding implementation pitfalls of
    matrix capsules with EM routing".

    Raises:
        ValueError, TypeError: a size or an option that does not fit.
    """

    independent = True
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
        cost: Literal["variance", "mass"] = "variance",
        cost_scale: str | float = "mean",
        nonlinearity: Literal["sigmoid", "softmax"] = "sigmoid",
        isotropic: bool = False,
        leaky: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **factory_kwargs: Any,
    ) -> None:
        super().__init__(in_caps, out_caps, in_dim, out_dim, num_iterations=num_iterations, **factory_kwargs)
        op = self._op
        self.inverse_temperatures = schedule(op, inverse_temperature, final, num_iterations)
        if momentum >= 1:
            raise ValueError(f"{op}: momentum must be below 1, got {momentum}")
        if isinstance(cost_scale, str):
            checks.choice(op, "cost_scale", cost_scale, COST_SCALE)
        else:
            checks.positive(op, "cost_scale", cost_scale)
        self.floor, self.momentum, self.cost, self.cost_scale = floor, momentum, cost, cost_scale
        self.nonlinearity, self.isotropic, self.leaky = nonlinearity, isotropic, leaky
        if initial_beta_u is None:
            initial_beta_u = 0.0 if cost == "variance" else -1.0
        self._betas = (float(initial_beta_a), float(initial_beta_u))
        size = (out_caps, out_dim) if component_beta else (out_caps,)
        self.beta_a = nn.Parameter(torch.empty(out_caps, device=device, dtype=dtype))
        self.beta_u = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self._initialise()

    def _initialise(self) -> None:
        for parameter, value in zip((self.beta_a, self.beta_u), self._betas, strict=True):
            nn.init.constant_(parameter, value)

    def route(self, votes: Votes, activation: Tensor | None) -> Capsules:
        checks.not_negative(self._op, "activation", activation)
        beta_u = self.beta_u.to(wide_dtype(self.beta_u.dtype))
        beta_u = beta_u.mean(1) if beta_u.dim() == 2 else beta_u
        updates = [self._update(votes, t) for t in range(self.num_iterations)]
        routed = votes._gaussians(activation, (self.beta_a, beta_u), updates, self.leaky)
        if routed is not None:
            return Capsules(*routed)
        center = votes.origin(activation)  # the result does not depend on it
        last = torch.zeros_like(center) if self.momentum else None
        precision = found = None
        for update in updates:
            # Moments about the last mean: in float32, second / mass - shift^2 does not cancel, wherever the votes lie.
            mass, first, second, *_ = votes.moments(
                center=center, precision=precision, prior=found, activation=activation, second=True, leaky=self.leaky
            )
            assert second is not None
            # The results are precision and prior of the next pass; after the last update, None and the activations.
            center, precision, found = em_update(
                mass, first, second, center, self.beta_a, beta_u, last, votes.out_mask, update, votes.backend
            )
            last = center if self.momentum else None
        assert found is not None
        return Capsules(center, found)

    def _update(self, votes: Votes, t: int) -> EMOptions:
        """The options of the update after the pass of iteration t."""
        scale = self.cost_scale
        if isinstance(scale, str):
            scale = {"sum": 1.0, "inputs": votes.J / max(votes.I, 1), "mean": 0.0}[scale]
        return EMOptions(
            self.floor,
            self.momentum,
            self.isotropic,
            self.cost,
            scale,
            self.nonlinearity,
            self.inverse_temperatures[t],
            t + 1 == self.num_iterations,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, inverse_temperatures={self.inverse_temperatures}"


def schedule(
    op: str, inverse_temperature: float | Sequence[float] | None, final: float, num_iterations: int
) -> tuple[float, ...]:
    """An inverse temperature for each iteration."""
    if inverse_temperature is None:
        return tuple(final * (1 - 0.95 ** (t + 1)) for t in range(num_iterations))
    if isinstance(inverse_temperature, (int, float)):
        inverse_temperature = [inverse_temperature] * num_iterations
    if not isinstance(inverse_temperature, Sequence) or isinstance(inverse_temperature, str):
        got = checks.shown(inverse_temperature)
        raise TypeError(f"{op}: inverse_temperature must be None, a number or a sequence of them, got {got}")
    if len(inverse_temperature) != num_iterations:
        raise ValueError(
            f"{op}: inverse_temperature must hold num_iterations={num_iterations} numbers, "
            f"got {len(inverse_temperature)}"
        )
    for value in inverse_temperature:
        checks.positive(op, "inverse_temperature", value)
    return tuple(inverse_temperature)
