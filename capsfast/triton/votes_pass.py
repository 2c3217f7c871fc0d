"""The kernels of ``capsfast::triton_votes_pass``; the contract is in ops/votes_pass.py."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..options import PassOptions
from ..positions import as_positions, as_samples
from ..reference.votes_pass import PassParameters
from . import moments
from .replay import replayed

# What has positions behind, as the votes have them, and is read and written like that.
IN_PLACE = ("votes", "logits", "weights", "norm")
OUTPUTS = ("mass", "first", "second", "weights", "lse", "norm")
GRADIENTS = ("votes", *PassParameters._fields[:-2])


def _samples(names: Sequence[str], values: Sequence[Tensor | None], votes: Tensor) -> tuple[Tensor | None, ...]:
    """Values by name, with a row for every position."""
    spatial = votes.shape[4:]
    pairs = zip(names, values, strict=True)
    return tuple(value if name in IN_PLACE else as_samples(value, spatial) for name, value in pairs)


def _positions(names: Sequence[str], values: Sequence[Tensor], votes: Tensor) -> tuple[Tensor, ...]:
    """The opposite."""
    B, spatial = votes.shape[0], votes.shape[4:]
    pairs = zip(names, values, strict=True)
    return tuple(value if name in IN_PLACE else as_positions(value, B, spatial) for name, value in pairs)


@replayed
def forward(votes: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    (J, *options, return_weights, return_lse) = rest[9:]
    parameters = PassParameters(*_samples(PassParameters._fields, rest[:9], votes))
    call = moments.call(votes, None, parameters, PassOptions(*options), outputs=J)
    return _positions(OUTPUTS, moments.forward(call, parameters.lse, return_weights, return_lse), votes)


@replayed
def backward(*args: Any) -> tuple[Tensor, ...]:
    # Five gradients of outputs, the votes, nine parameters, six saved outputs, J and the options, eight needs.
    votes, (J, *options), (need_votes, *needed) = args[5], args[21:-8], args[-8:]
    given = _samples(OUTPUTS[:5], args[:5], votes)
    parameters = PassParameters(*_samples(PassParameters._fields, args[6:15], votes))
    saved: Any = _samples(OUTPUTS, args[15:21], votes)
    call = moments.call(votes, None, parameters, PassOptions(*options), outputs=J)
    dvotes, _, *others = moments.backward(call, parameters, given, saved, (need_votes, False, *needed))
    return _positions(GRADIENTS, (dvotes, *others), votes)
