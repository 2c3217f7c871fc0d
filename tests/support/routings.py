"""The published routings, each in a few lines of torch that form votes and coupling coefficients.

One row of ROUTINGS for each name of :data:`capsfast.nn.ROUTINGS`. A plain routing is a function of the votes
``[B, I, J, D]``, the activation ``[B, I]``, the module (for its options and parameters) and the input capsules
``u [B, I, K]``, that returns poses ``[B, J, D]`` and activations ``[B, J]``.
"""

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


ROUTINGS: dict[str, Row] = {
    "dynamic": Row(dynamic, [{}, {"num_iterations": 2, "learned_logits": True, "squash": "exp"}]),
}


def cases() -> list[tuple[str, dict[str, Any]]]:
    """(name, options), every set of options of every row."""
    return [(name, options) for name, row in ROUTINGS.items() for options in row.options]


def randomize(module: nn.Module) -> None:
    """Parameters that no test passes with by luck: none is 0 or 1, nor alike."""
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.add_(0.3 * torch.randn_like(parameter))
