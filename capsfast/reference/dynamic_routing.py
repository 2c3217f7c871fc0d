"""Routing by agreement (Sabour, Frosst, Hinton 2017, procedure 1)."""

from dataclasses import replace

from torch import Tensor

from ..arguments import Call
from ..positions import from_samples
from .agreement import by_passes
from .routing_pass import routing_pass
from .votes import votes


def dynamic_routing(call: Call) -> tuple[Tensor, Tensor]:
    """Output capsules ``v [B, J, D]`` and the last coupling ``[B, I, J]``."""
    if call.weight is None and call.u.dim() == 5:
        B, S = call.u.shape[0], call.u.shape[4]
        v, c = dynamic_routing(call.as_samples())
        return from_samples(v, B, S), from_samples(c, B, S)
    made = replace(call, u=votes(call), weight=None, P=1)
    v, last = by_passes(made, lambda one, _: routing_pass(one), True)
    assert last is not None
    return v, last
