"""The kernel of ``capsfast::triton_em_update`` and its backward; the contract is in ops/em_update.py."""

from collections.abc import Sequence
from typing import Any

import torch

from ..calls.options import EMOptions
from .config import power_of_two
from .kernels.em_update import em_update_kernel
from .kernels.update import add_up_kernel
from .launch import bytes_of, cdiv
from .plan import Plan, Slot, planned

# Numbers of a tile for each warp. Registers then hold half a dozen arrays of the size of the tile.
NUMBERS_OF_A_WARP = 512


def step(
    plan: Plan,
    tensors: Sequence[Slot | None],
    out_mask: Slot | None,
    o: EMOptions,
    of_results: Sequence[Slot | None],
    of_next: tuple[Slot | None, Slot | None] = (None, None),
    gradients: Sequence[Slot | None] = (None,) * 7,
    routing: bool = False,
) -> None:
    """Launches em_update_kernel. tensors: mass, first, second, center, beta_a, beta_u, last. of_results, of_next and
    gradients: in the order of the kernel's arguments."""
    mass, first, second, center, beta_a, beta_u, last, *of_results = (
        None if value is None else value.contiguous() for value in (*tensors, *of_results)
    )
    assert first is not None
    B, J, D = first.shape
    JP, DP = power_of_two(J), power_of_two(D)
    if not B:
        return
    given = (mass, first, second, center, last, beta_a, beta_u, bytes_of(out_mask), *of_results, *of_next)
    numbers = (float(o.floor), float(o.momentum), float(o.cost_scale), float(o.inverse_temperature))
    plan.launch(
        em_update_kernel, (B,), *given, *gradients, *numbers, J=J, D=D, JP=JP, DP=DP,
        ISOTROPIC=o.isotropic, VARIANCE=o.cost == "variance", SOFTMAX=o.nonlinearity == "softmax", FINAL=o.final,
        MOMENTUM=bool(o.momentum) if routing else last is not None, ROUTING=routing,
        num_warps=min(8, max(1, JP * DP // NUMBERS_OF_A_WARP)),
    )  # fmt: skip


def add_up(plan: Plan, shares: Slot, dtype: torch.dtype = torch.float32) -> Slot:
    """The gradient of a beta [J] from the shares [..., J] of samples and iterations."""
    J = shares.shape[-1]
    total = plan.new(J, dtype=dtype)
    # Few sums of many terms: a program reads 512 rows at once.
    plan.launch(add_up_kernel, (cdiv(J, 4),), shares, total, J, shares.numel() // max(J, 1), WIDTH=4, SB=512)
    return total


@planned
def forward(plan: Plan, *args: Any) -> tuple[Slot, ...]:
    # args: seven tensors, the mask, the options.
    first, final = args[1], args[-1]
    poses, score = plan.new(*first.shape), plan.new(*first.shape[:2])
    precision = plan.new(*((0,) if final else first.shape))
    step(plan, args[:7], args[7], EMOptions(*args[8:]), (poses, None if final else precision, score))
    return poses, precision, score


@planned
def backward(plan: Plan, *args: Any) -> tuple[Slot, ...]:
    # args: three gradients of results, seven tensors, the mask, the options, and which gradients are needed.
    dposes, dprecision, dscore, *tensors = args[:10]
    out_mask, *options, needed = args[10:]
    first = tensors[1]
    dmass, dbeta_a, dbeta_u = (plan.new(*first.shape[:2]) for _ in range(3))
    dfirst, dsecond, dcenter, dlast = (plan.new(*first.shape) for _ in range(4))
    gradients = (dmass, dfirst, dsecond, dcenter, dlast, dbeta_a, dbeta_u)
    step(plan, tensors, out_mask, EMOptions(*options), (dposes, dprecision, dscore), gradients=gradients)
    dbeta_a, dbeta_u = (add_up(plan, gradient) for gradient in (dbeta_a, dbeta_u))
    found = (dmass, dfirst, dsecond, dcenter, dbeta_a, dbeta_u, dlast)
    return tuple(
        gradient if wanted and tensor is not None else plan.new(0)
        for gradient, wanted, tensor in zip(found, needed, tensors, strict=True)
    )
