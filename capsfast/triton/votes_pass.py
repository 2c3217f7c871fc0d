"""The kernels of ``capsfast::triton_votes_pass``; the contract is in ops/votes_pass.py."""

from typing import Any

from torch import Tensor

from ..options import PassOptions
from ..reference.votes_pass import PassParameters
from . import moments


def forward(votes: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    parameters, (J, *options, return_weights, return_lse) = PassParameters(*rest[:9]), rest[9:]
    call = moments.call(votes, None, parameters, PassOptions(*options), outputs=J)
    return moments.forward(call, parameters.lse, return_weights, return_lse)


def backward(*args: Any) -> tuple[Tensor, ...]:
    # Five gradients of outputs, the votes, nine parameters, six saved outputs, J and the options, eight needs.
    given, votes, parameters, saved = args[:5], args[5], PassParameters(*args[6:15]), args[15:21]
    (J, *options), (need_votes, *needed) = args[21:-8], args[-8:]
    call = moments.call(votes, None, parameters, PassOptions(*options), outputs=J)
    dvotes, _, *others = moments.backward(call, parameters, given, saved, (need_votes, False, *needed))
    return (dvotes, *others)
