"""The published routings, each in a few lines of torch that form votes and coupling coefficients.

One row of ROUTINGS for each name of :data:`capsfast.nn.ROUTINGS`. A plain routing is a function of the votes
``[B, I, J, D]``, the activation ``[B, I]``, the module (for its options and parameters) and the input capsules
``u [B, I, K]``, that returns poses ``[B, J, D]`` and activations ``[B, J]``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import plain

Plain = Callable[[Tensor, Tensor, Any, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Row:
    """definition: the plain routing. options: those of the module under test, each set a case of its own.

    of_votes: whether votes alone say everything, so that a routing of given votes exists.
    """

    definition: Plain
    options: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    of_votes: bool = True


def dynamic(votes: Tensor, a: Tensor, module: Any, u: Tensor) -> tuple[Tensor, Tensor]:
    """Sabour, Frosst, Hinton 2017, procedure 1."""
    v, _ = plain.route(votes, module.num_iterations, logits=module.logits, kind=module.squash)
    return v, v.square().sum(-1).sqrt()


def em(votes: Tensor, a: Tensor, module: Any, u: Tensor) -> tuple[Tensor, Tensor]:
    """Hinton, Sabour, Frosst 2018, procedure 1: responsibilities and Gaussian densities."""
    B, I, J, D = votes.shape
    mean, c = torch.zeros_like(votes[:, 0]), torch.full_like(votes[..., 0], 1 / (J + module.leaky))
    beta_u = module.beta_u if module.beta_u.dim() == 2 else module.beta_u[:, None].expand(J, D)
    for inverse_temperature in module.inverse_temperatures:
        r = c * a[:, :, None]
        mass = r.sum(1)  # [B, J]
        mean = (1 - module.momentum) * (r[..., None] * votes).sum(1) / mass[..., None] + module.momentum * mean
        variance = (r[..., None] * (votes - mean[:, None]) ** 2).sum(1) / mass[..., None] + module.floor
        if module.isotropic:
            variance = variance.mean(2, keepdim=True).expand(B, J, D)
        scale = {"sum": 1, "inputs": J / I, "mean": 1 / mass.mean(1, keepdim=True)}.get(module.cost_scale)
        scaled = (module.cost_scale if scale is None else scale) * mass
        terms = beta_u + (variance.sqrt().log() if module.cost == "variance" else 0)
        logit = inverse_temperature * (module.beta_a - (terms * scaled[..., None]).sum(2))
        e = logit.exp()
        out = e / (1 + e) if module.nonlinearity == "sigmoid" else e / e.sum(1, keepdim=True)
        distance = ((votes - mean[:, None]) ** 2 / (2 * variance[:, None])).sum(3)
        joint = out.log()[:, None] - distance - (2 * math.pi * variance).sqrt().log().sum(2)[:, None]
        if module.leaky:
            joint = torch.cat([joint, torch.zeros_like(joint[..., :1])], 2)
        c = plain.couple(joint)[..., :J]
    return mean, out


EM_OPTIONS: list[dict[str, Any]] = [
    {},
    {"final": 0.01, "cost_scale": "sum", "floor": 5e-4, "momentum": 0.1, "leaky": True},
    {"inverse_temperature": 0.5, "component_beta": True, "cost_scale": "inputs", "num_iterations": 2},
    {"floor": 0.01, "inverse_temperature": [0.1, 0.2, 0.4, 0.8], "nonlinearity": "softmax", "num_iterations": 4},
    {"isotropic": True, "cost_scale": 0.3, "num_iterations": 1},
    {"cost": "mass", "isotropic": True, "inverse_temperature": 0.2},
]

ROUTINGS: dict[str, Row] = {
    "dynamic": Row(dynamic, [{}, {"num_iterations": 2, "learned_logits": True, "squash": "exp"}]),
    "em": Row(em, EM_OPTIONS),
}


def cases() -> list[tuple[str, dict[str, Any]]]:
    """(name, options), every set of options of every row."""
    return [(name, options) for name, row in ROUTINGS.items() for options in row.options]


def randomize(module: nn.Module) -> None:
    """Parameters that no test passes with by luck: none is 0 or 1, nor alike."""
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.add_(0.3 * torch.randn_like(parameter))
