"""A weight that all output capsules share: its votes are a product of matrices, which torch's own do best."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..arguments import Call
from ..precision import in_wide_dtype
from .define import Op


def with_votes(run: Callable[..., Any], op: Op, call: Call, *rest: Any) -> tuple[Tensor, ...]:
    """``run(call, *rest)`` over the votes, which then are in memory: 1 / J of those with a weight of each."""

    def routed(wide: Call) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = run(replace(wide, u=votes(wide), weight=None, P=1), *rest)
        return found

    return in_wide_dtype(routed, call, op.narrow)


def votes(call: Call) -> Tensor:
    """``u [B, I, P K]``, ``weight [I or 1, 1, R, K]``, ``mask [B, I]`` to the votes ``[B, I, 1, P R]``."""
    u, weight, P, D, mask = call.u, call.weight, call.P, call.D, call.parameters.mask
    assert weight is not None
    if mask is not None:
        # What a masked capsule holds must not reach the gradient of the weight.
        u = u.masked_fill(~mask[:, :, None], 0.0)
    # Nothing is inferred from a number of elements: of an empty batch that is 0.
    if weight.shape[0] == 1:
        x = torch.nn.functional.linear(u if P == 1 else u.unflatten(2, (P, weight.shape[3])), weight[0, 0])
        return x.flatten(2).unsqueeze(2)
    B, I, _ = u.shape
    x = u.reshape(B, I, P, weight.shape[3]).transpose(0, 1).flatten(1, 2)  # [I, B P, K]
    x = torch.bmm(x, weight[:, 0].transpose(1, 2))
    return x.reshape(I, B, 1, D).transpose(0, 1)
