"""The kernels of ``capsfast::triton_em_update``; the contract is in ops/em_update.py."""

from typing import Any

import torch
from torch import Tensor

from ..options import EMOptions
from .config import power_of_two
from .kernels.em_update import em_update_gradient_kernel, em_update_kernel
from .launch import bytes_of
from .recorder import launch
from .replay import replayed

# Numbers of a tile for each warp: half a dozen arrays of them stay in registers.
NUMBERS_OF_A_WARP = 512


def _arguments(
    tensors: tuple[Tensor | None, ...], out_mask: Tensor | None, options: EMOptions
) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
    """Both kernels' tensors, numbers and constants. tensors: mass, first, second, center, beta_a, beta_u, last."""
    mass, first, second, center, beta_a, beta_u, last = (
        None if value is None else value.contiguous() for value in tensors
    )
    assert first is not None and beta_u is not None
    o, (_, J, D) = options, first.shape
    JP, DP = power_of_two(J), power_of_two(D)
    constants = {
        "J": J,
        "D": D,
        "JP": JP,
        "DP": DP,
        "HELD": o.momentum != 0,
        "ISOTROPIC": o.isotropic,
        "VARIANCE": o.cost == "variance",
        "MEAN": o.cost_scale == 0,
        "COMPONENT": beta_u.dim() == 2,
        "SOFTMAX": o.nonlinearity == "softmax",
        "num_warps": min(8, max(1, JP * DP // NUMBERS_OF_A_WARP)),
    }
    numbers = (float(o.floor), float(o.momentum), float(o.cost_scale), float(o.inverse_temperature))
    return (mass, first, second, center, last, beta_a, beta_u, bytes_of(out_mask)), numbers, constants


@replayed
def forward(*args: Any) -> tuple[Tensor, ...]:
    # Seven tensors, the mask, the options.
    tensors, out_mask, options = args[:7], args[7], EMOptions(*args[8:])
    given, numbers, constants = _arguments(tensors, out_mask, options)
    first = given[1]
    poses, score = torch.empty_like(first), first.new_empty(first.shape[:2])
    precision = first.new_empty(0) if options.final else torch.empty_like(first)
    if first.numel():
        out = (poses, None if options.final else precision, score)
        launch(em_update_kernel, (first.shape[0],), *given, *out, *numbers, **constants)
    return poses, precision, score


@replayed
def backward(*args: Any) -> tuple[Tensor, ...]:
    # Three gradients of outputs, seven tensors, the mask, the options, what is needed.
    upstream = [None if value is None else value.contiguous() for value in args[:3]]
    tensors, out_mask, options, needed = args[3:10], args[10], EMOptions(*args[11:-1]), args[-1]
    given, numbers, constants = _arguments(tensors, out_mask, options)
    mass, first, last = given[0], given[1], given[4]
    dmass, dbeta_a, dbeta_u = (torch.empty_like(mass) for _ in range(3))
    dfirst, dsecond, dcenter = (torch.empty_like(first) for _ in range(3))
    dlast = torch.empty_like(first) if last is not None and needed[6] else None
    if first.numel():
        out = (dmass, dfirst, dsecond, dcenter, dlast, dbeta_a, dbeta_u)
        grid = (first.shape[0],)
        launch(em_update_gradient_kernel, grid, *given, *upstream, *out, *numbers, **constants, FINAL=options.final)
    else:
        dbeta_a, dbeta_u = torch.zeros_like(mass), torch.zeros_like(mass)
    of_beta_u = dbeta_u.sum(0)
    if constants["COMPONENT"]:
        of_beta_u = of_beta_u[:, None].expand(first.shape[1:]).contiguous()
    found = (dmass, dfirst, dsecond, dcenter, dbeta_a.sum(0), of_beta_u, dlast)
    return tuple(
        first.new_empty(0) if gradient is None or not wanted else gradient
        for gradient, wanted in zip(found, needed, strict=True)
    )
