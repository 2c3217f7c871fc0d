"""The op of EM routing (Hinton, Sabour, Frosst 2018, procedure 1): all passes and updates of a call.

``capsfast::em_routing`` returns ``(poses [B, J, D], activations [B, J], state)``, all in the dtype that sums are
formed in, which beta_a and beta_u, both [J], have too; beta_u is the mean of the components. u, weight, votes and tf32
are as in dynamic_routing.py. With positions, activation and masks end in an axis S, as poses and activations do.

A call computes what :class:`capsfast.nn.EMRouting` computes with routing_pass and em_update: one iteration for each of
``inverse_temperatures``. The first iteration takes moments about the origin: the mean of the votes of every stride-th
input capsule, with equal coupling. The origin has no gradient. cost_scale 0 is 1 / the mean of the mass.

``state`` is for the backward. For each iteration it holds, with a row for each sample or (b, s): mass and prior
``[rows, J]``; first, second, center and precision ``[rows, J, D]``. The first iteration has no prior and no precision.
Without ``return_state`` it is empty, and the call takes memory for two iterations.

``capsfast::em_routing_backward`` returns the gradients of the float tensors, empty if not needed.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..backend import BACKENDS, choose_for_em
from ..calls import checks
from ..calls.arguments import Call
from ..calls.options import EMOptions
from ..calls.precision import tf32_allowed, wide_dtype
from ..environment.private_torch import forward_level
from . import flops
from .define import Op, check_fake, fake_sizes


def backend_of(call: Call, betas: tuple[Tensor, Tensor], backend: str | None) -> str | None:
    """The backend whose op computes a call; None if single passes have to compute the call.

    Compiled programs, transforms and tensors without elements always use passes.

    Raises:
        RuntimeError: the demanded backend cannot serve the call.
    """
    parameters = call.parameters
    tensors = (call.u, call.weight, parameters.activation, parameters.mask, parameters.out_mask, *betas)
    if forward_level() >= 0 or not checks.is_eager(*tensors):
        return None
    if not call.u.numel() * call.J * call.D or (call.weight is not None and call.weight.shape[1] != call.J):
        return None
    return choose_for_em(call, backend)


def run(
    call: Call,
    betas: tuple[Tensor, Tensor],
    inverse_temperatures: tuple[float, ...],
    options: EMOptions,
    stride: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """``(poses, activations)``. options: of an update."""
    parameters, wide = call.parameters, wide_dtype(call.u.dtype)
    beta_a, beta_u = (beta if beta.dtype == wide else beta.to(wide) for beta in betas)
    J = call.J if call.weight is None else None
    differentiated = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad
        for tensor in (call.u, call.weight, parameters.activation, beta_a, beta_u)
    )
    tf32 = BACKENDS[backend].rounds and tf32_allowed()
    poses, activations, *_ = OP.kernels[backend](
        call.u, call.weight, parameters.activation, beta_a, beta_u, parameters.mask, parameters.out_mask, J,
        inverse_temperatures, *options[:6], call.options.leaky, stride, tf32, differentiated,
    )  # fmt: skip
    return poses, activations


def _fake(a: Any) -> tuple[Tensor, ...]:
    (B, I, J, D), S = fake_sizes(a.u, a.weight, a.J)
    check_fake({name: getattr(a, name) for name in ("activation", "mask", "out_mask")}, (B, I, J, D), S)
    iterations = len(a.inverse_temperatures) if a.return_state else 0
    wide, numbers = wide_dtype(a.u.dtype), iterations * B * math.prod(S) * J * (4 * D + 2)
    return tuple(a.u.new_empty(size, dtype=wide) for size in ((B, J, D, *S), (B, J, *S), (numbers,)))


def _flops(a: Any) -> Any:
    """The FLOPs of the definition's passes: one pass for the origin; two moments and a score in every iteration."""
    votes, once = flops.of_votes(a, *fake_sizes(a.u, a.weight, a.J))
    r = len(a.inverse_temperatures)
    return (votes + once) // a.stride + r * votes + (3 * r - 1) * once


def _flops_backward(a: Any) -> Any:
    votes, once = flops.of_votes(a, *fake_sizes(a.u, a.weight, a.J))
    u, weight, activation, *_ = a.needed
    r = len(a.inverse_temperatures)
    return r * votes * (u + weight) + once * (2 * ((u or weight) + activation) + 6 * (r - 1))


# Errors name the passes, as they do where passes run alone.
PUBLIC = ("capsfast.routing_pass", "capsfast.votes_pass")
OP = Op("em_routing", PUBLIC, _fake, flops=(_flops, _flops_backward), sharded=False, backends=("cpp", "triton"))
