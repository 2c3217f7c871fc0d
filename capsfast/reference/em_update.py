"""The definition of the EM update between two passes: the M-step, after its sums over the votes."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..calls.options import EMOptions

# A smaller mass counts as none.
LEAST_MASS = 1e-12


def inverse(mass: Tensor) -> Tensor:
    """1 / mass; 0 without a gradient where the mass is at most LEAST_MASS."""
    there = mass > LEAST_MASS
    return torch.where(there, torch.where(there, mass, 1.0).reciprocal(), 0.0)


def not_negative(variance: Tensor) -> Tensor:
    """The variance, 0 where rounding made it negative, always with its gradient.

    The variance of a single vote with coupling is 0, but its gradient for the coupling of the other votes is not, and
    rounding decides the sign. torch.clamp_min would drop the gradient of half of these variances.
    """
    return variance - variance.detach().clamp_max(0)


def em_update(
    mass: Tensor,
    first: Tensor,
    second: Tensor,
    center: Tensor,
    beta_a: Tensor,
    beta_u: Tensor,
    last: Tensor | None,
    out_mask: Tensor | None,
    options: EMOptions,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """``(poses [B, J, D], precision [B, J, D], score [B, J])``; see capsfast/ops/em_update.py.

    precision is None in the final iteration. beta_u: [J], the mean of the components. last: the previous poses, None
    without momentum.
    """
    o, D = options, first.shape[2]
    per_mass = inverse(mass)[..., None]
    # With a center near the mean, second / mass - shift^2 does not cancel in float32.
    shift = first * per_mass
    poses, variance = center + shift, second * per_mass - shift.square()
    if last is not None:
        held = o.momentum * (last - poses)
        poses, variance = poses + held, variance + held.square()
    variance = not_negative(variance) + o.floor
    if o.isotropic:
        variance = variance.mean(2, keepdim=True).expand_as(variance)
    log_sigma = 0.5 * variance.log().sum(2)  # the sum over the components
    logit = o.inverse_temperature * (beta_a - _cost(mass, D * beta_u, log_sigma, out_mask, o))
    if o.final:
        return poses, None, _activation(logit, out_mask, o.nonlinearity)
    log_activation = _activation(logit, out_mask, o.nonlinearity, log=True)
    return poses, variance.reciprocal(), log_activation - (log_sigma + 0.5 * D * math.log(2 * math.pi))


def _cost(mass: Tensor, beta_u: Tensor, log_sigma: Tensor, out_mask: Tensor | None, options: EMOptions) -> Tensor:
    """``[B, J]``. beta_u: a sum over the components."""
    each = beta_u + log_sigma if options.cost == "variance" else beta_u
    if options.cost_scale:
        return mass * options.cost_scale * each
    there = mass.shape[1] if out_mask is None else out_mask.sum(1, keepdim=True)
    return mass * (there * inverse(mass.sum(1, keepdim=True))) * each


def _activation(logit: Tensor, out_mask: Tensor | None, nonlinearity: str, log: bool = False) -> Tensor:
    """``[B, J]``: activations, or their logarithms."""
    if nonlinearity == "sigmoid":
        return F.logsigmoid(logit) if log else logit.sigmoid()
    if out_mask is not None:
        # Not -inf: a row whose capsules are all masked would become NaN.
        logit = logit.masked_fill(~out_mask, torch.finfo(logit.dtype).min)
    return logit.log_softmax(1) if log else logit.softmax(1)
