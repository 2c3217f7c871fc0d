"""The kernels of ``capsfast::triton_routing_pass``; the contract is in ops/routing_pass.py."""

from typing import Any

from torch import Tensor

from ..options import PassOptions
from ..reference.votes_pass import PassParameters
from . import moments
from .replay import replayed


@replayed
def forward(u: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    parameters, (*options, tf32, return_weights, return_lse) = PassParameters(*rest[:9]), rest[9:]
    call = moments.call(u, weight, parameters, PassOptions(*options), tf32)
    return moments.forward(call, parameters.lse, return_weights, return_lse)


@replayed
def backward(*args: Any) -> tuple[Tensor, ...]:
    # Five gradients of outputs, u and weight, nine parameters, six saved outputs, the options and tf32, nine needs.
    given, (u, weight), parameters, saved = args[:5], args[5:7], PassParameters(*args[7:16]), args[16:22]
    (*options, tf32), needed = args[22:-9], args[-9:]
    call = moments.call(u, weight, parameters, PassOptions(*options), tf32)
    return moments.backward(call, parameters, given, saved, needed)
