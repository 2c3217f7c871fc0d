"""The op behind :func:`capsfast.routing_pass`.

``capsfast::routing_pass`` returns ``(mass [B, J], first [B, J, D], second [B, J, D], weights [B, I, J], lse, norm)``.
second, weights and lse (``[B, I]`` for normalize "out", ``[B, J]`` for "in") are empty if they are not asked for.
weights has the dtype of u, all others that in which sums are formed. norm is for the backward, empty unless normalize
is "in": the normaliser over the input capsules ``[2, B, J]``, a number m that the largest logit exceeds by 8 at most
and ``1 / sum_i exp(logit - m)``.

Pose matrices come as ``u [B, I, P K]`` and ``weight [I or 1, J, R, K]``, see dynamic_routing.py.

``capsfast::routing_pass_backward`` returns ``(du, dweight, dquery, dprecision, dcenter, dprior, dlogits, dactivation,
dlse)``, each empty if its need_ flag is false. It recomputes votes, logits and coupling. tf32: products of float32 may
be rounded to TF32; it has no effect on the CPU.
"""

from typing import Any

from torch import Tensor

from ..backend import select
from ..options import PassOptions
from ..precision import tf32_allowed
from ..reference.routing_pass import routing_pass as reference
from ..reference.votes_pass import PassParameters
from . import votes_pass
from ._glue import fake_gradients, in_wide_dtype
from ._pass import OPTIONS, SHARED, WEIGHTS, fake_outputs, received, run_reference, why_not_fused
from ._product import fake_sizes, poses, width
from ._register import Contract, define
from ._shared_outputs import votes

NAME = "capsfast.routing_pass"


def call(
    u: Tensor,
    weight: Tensor,
    parameters: PassParameters,
    J: int,
    options: PassOptions,
    return_weights: bool,
    return_lse: bool,
    backend: str | None,
) -> tuple[Tensor, ...]:
    """``(mass, first, second, weights, lse)`` from the chosen backend, with empty tensors for what is not wanted.

    The arguments were checked by the caller.
    """
    if weight.shape[1] != J:

        def run(u: Tensor, weight: Tensor, *given: Tensor | None) -> tuple[Tensor, ...]:
            wide = PassParameters(*given)
            # All output capsules have the same votes, 1 / J of the others' size.
            x = votes(u, weight, wide.mask)
            return votes_pass.call(x, wide, J, options, return_weights, return_lse, backend, NAME)

        return in_wide_dtype(run, (u, weight), parameters, (WEIGHTS,))
    cannot = why_not_fused(u.dtype, width(u, weight), parameters, options, poses=poses(u, weight))
    chosen = select(NAME, u.device, backend, cannot)
    if chosen == "reference":
        return run_reference(reference, (u, weight), parameters, J, options, return_weights, return_lse)
    tf32 = chosen != "cpp" and tf32_allowed()
    *found, _ = _ops[chosen](u, weight, *parameters, *options, tf32, return_weights, return_lse)
    return tuple(found)


def _fake(u: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return fake_outputs(u, fake_sizes(u, weight), rest)


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    # Five gradients of outputs, then the tensors.
    return fake_gradients(args[5:14], args[-9:])


CONTRACT = Contract(
    name="routing_pass",
    inputs=("u", "weight"),
    options=f"{OPTIONS}, bool tf32",
    fake=_fake,
    fake_backward=_fake_backward,
    received=received,
    **SHARED,
)
_ops = define(CONTRACT)
