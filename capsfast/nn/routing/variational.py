"""Routing as variational inference of a mixture of Gaussians."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ...calls import checks
from ...reference.em_update import inverse, not_negative
from .base import Capsules, IterativeRouting
from .votes import Votes


class VariationalRouting(IterativeRouting):
    """Capsule routing via variational Bayes with diagonal precisions (Ribeiro, Leontidis, Kollias 2020).

    The votes for an output capsule are draws from a Gaussian whose mean and precision are random themselves, with the
    priors ``N(0, 1 / (kappa precision))`` and Wishart with ``nu`` degrees of freedom and scale ``1 / psi``. The shares
    of the output capsules have a Dirichlet prior ``alpha``. An iteration updates these posteriors from the votes,
    weighted by coupling and input activation, then the coupling, ``softmax_j`` of the expected log share plus log
    density (Bishop 2006, equations 10.46 to 10.67, restricted to diagonal precisions).

    Poses are the posterior means. The activation of an output capsule is ``sigmoid(beta_a - beta_u - share H)``, where
    H is the entropy of a Gaussian with the expected log precision and share the exponential of the expected log share.
    As in the authors' code, the argument of the sigmoid and the poses are normalised over the batch. Without this,
    activations are slow to learn: see ``batch_norm``.

    One more pass, without a gradient, finds the mean vote. The first iteration takes moments about this mean, a later
    iteration about the mean vote of the iteration before, so that float32 does not cancel in the variances.

    Parameters: ``beta_a [out_caps]`` and ``beta_u [out_caps]``, starting at 0. With ``batch_norm`` the running
    statistics of its parts ``norm`` and ``pose_norm`` belong to the state.

    Args:
        num_iterations: updates of the posteriors, at least 1.
        alpha, kappa, psi: of the priors, positive.
        nu: of the prior, more than ``out_dim - 1``; None for ``out_dim + 1``.
        batch_norm: ``"both"`` normalises the argument of the sigmoid over the batch (and positions) while training, and
            the poses over the batch (and positions) and their D numbers together. A sample then depends on its batch,
            and the activations no longer on ``beta_a`` and ``beta_u``. Output capsules that are masked do not count. In
            training there must be two samples (or positions). True: the argument alone. False: neither, and no sample
            depends on another.
        all others: as for :class:`Routing`.
    """

    uses_activation = True
    norm: nn.BatchNorm1d | None
    pose_norm: nn.BatchNorm1d | None

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        in_dim: int,
        out_dim: int,
        *,
        num_iterations: int = 3,
        alpha: float = 1.0,
        kappa: float = 1.0,
        psi: float = 1.0,
        nu: float | None = None,
        batch_norm: bool | str = "both",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **factory_kwargs: Any,
    ) -> None:
        super().__init__(in_caps, out_caps, in_dim, out_dim, num_iterations=num_iterations, **factory_kwargs)
        self.nu = float(out_dim + 1) if nu is None else nu
        if self.nu <= out_dim - 1:
            raise ValueError(f"{self._op}: nu must be more than out_dim - 1 = {out_dim - 1}, got {self.nu:g}")
        if not isinstance(batch_norm, (bool, str)) or batch_norm not in (True, False, "both"):
            raise ValueError(f"{self._op}: batch_norm must be False, True or 'both', got {checks.shown(batch_norm)}")
        self.alpha, self.kappa, self.psi = alpha, kappa, psi
        self.beta_a = nn.Parameter(torch.empty(out_caps, device=device, dtype=dtype))
        self.beta_u = nn.Parameter(torch.empty(out_caps, device=device, dtype=dtype))
        for name, wanted in (("norm", batch_norm), ("pose_norm", batch_norm == "both")):
            norm = nn.BatchNorm1d(out_caps, affine=False, device=device, dtype=dtype) if wanted else None
            self.register_module(name, norm)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.zeros_(self.beta_a)
        nn.init.zeros_(self.beta_u)

    @property
    def independent(self) -> bool:  # type: ignore[override]
        return self.norm is None

    def route(self, votes: Votes, activation: Tensor | None) -> Capsules:
        checks.not_negative(self._op, "activation", activation)
        if isinstance(self.norm, nn.BatchNorm1d) and self.training and votes.B == 1:
            raise ValueError(
                f"{self._op}: batch_norm needs more than one sample (or position) in training, got 1; "
                f"call .eval(), use a larger batch, or batch_norm=False"
            )
        with torch.no_grad():  # the origin of the first moments, on which the result does not depend
            start = votes.moments(activation=activation)
            center = start.first * inverse(start.mass)[..., None]
        below = torch.arange(self.out_dim, dtype=center.dtype, device=votes.device)
        score: dict[str, Any] = {}
        for t in range(self.num_iterations):
            m = votes.moments(center=center, activation=activation, second=True, **score)
            assert m.second is not None
            shift = m.first * inverse(m.mass)[..., None]
            mass = m.mass[..., None]
            kappa, nu = self.kappa + mass, self.nu + mass
            # The weighted sum of the votes. Their mean appears only times the mass, as in
            # mass mean^2 = center (total + first) + first shift, so gradients do not grow with 1 / mass.
            total = mass * center + m.first
            poses = total / kappa
            towards_0 = self.kappa / kappa * (center * (total + m.first) + m.first * shift)
            inverse_psi = self.psi + not_negative(m.second - m.first * shift) + towards_0
            log_precision = torch.digamma(0.5 * (nu - below)) + math.log(2) - inverse_psi.log()
            log_precision = log_precision.sum(-1)
            log_share = self._log_share(m.mass, votes.out_mask)
            if t + 1 < self.num_iterations:
                precision = nu / inverse_psi
                # The next pass is about the mean vote: there the quadratic form about the posterior mean is expanded.
                center = (center + shift).detach()
                offset = center - poses
                distance = 0.5 * (self.out_dim / kappa.squeeze(-1) + (precision * offset**2).sum(-1))
                score = {
                    "precision": precision,
                    "query": -precision * offset,
                    "prior": log_share + 0.5 * log_precision - distance,
                }
        entropy = 0.5 * (self.out_dim * math.log(2 * math.pi * math.e) - log_precision)
        logit = self.beta_a - self.beta_u - log_share.exp() * entropy
        poses = self._normalized(self.pose_norm, poses, votes.out_mask)
        return Capsules(poses, torch.sigmoid(self._normalized(self.norm, logit, votes.out_mask)))

    def _normalized(self, norm: nn.BatchNorm1d | None, value: Tensor, out_mask: Tensor | None) -> Tensor:
        """``[B, J]`` or ``[B, J, D]`` normalised over the samples in which an output capsule is there."""
        if norm is None:
            return value
        value = value.to(self.beta_a.dtype)
        if out_mask is None or not self.training:
            return norm(value)  # type: ignore[no-any-return]
        of_sample = value[..., None].flatten(2)  # [B, J, 1 or D]
        there = out_mask[..., None].to(value.dtype).expand_as(of_sample)
        count = there.sum((0, 2))
        mean = (there * of_sample).sum((0, 2)) / count.clamp_min(1)
        apart = of_sample - mean[:, None]
        squares = (there * apart**2).sum((0, 2))
        with torch.no_grad():
            assert norm.running_mean is not None and norm.running_var is not None and norm.momentum is not None
            assert norm.num_batches_tracked is not None
            norm.num_batches_tracked.add_(1)
            momentum = norm.momentum * (count > 1).to(mean.dtype)  # one number has no variance
            norm.running_mean.lerp_(mean, momentum)
            norm.running_var.lerp_(squares / (count - 1).clamp_min(1), momentum)
        deviation = (squares / count.clamp_min(1) + norm.eps).sqrt()
        return (apart / deviation[:, None]).view_as(value)

    def _log_share(self, mass: Tensor, out_mask: Tensor | None) -> Tensor:
        alpha = self.alpha + mass
        there = alpha if out_mask is None else alpha.masked_fill(~out_mask, 0.0)
        total = there.sum(1, keepdim=True)
        # total is 0 if all output capsules of a sample are masked, and digamma(0) is infinite.
        return torch.digamma(alpha) - torch.digamma(torch.where(total > 0, total, 1.0))
