"""Turns calls with a weight that output or input capsules share into calls of the ops without the weight.

If output capsules share the weight, the votes are one product of matrices. If input capsules share it, a pass needs no
votes and runs over u: ``(W_j u_i) . q_j = u_i . (W_j^T q_j)`` and ``sum_i c_ij W_j u_i = W_j sum_i c_ij u_i``.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..backend import choose
from ..calls.arguments import Call
from ..calls.precision import in_wide_dtype
from ..environment.private_torch import surely

# The fewest saved multiply-adds that pay for the additional steps, by backend. The other backends do not serve votes
# that output capsules share. The number for Triton is a guess, not measured.
WORTH_IT = {"cpp": 2**20, "triton": 2**30}
# The backends that route by passes over u. On the CPU, factored_routing or the op with votes is faster.
ROUTED_BY_PASSES = ("triton",)


def with_votes(run: Callable[..., Any], narrow: Sequence[int], call: Call, *rest: Any) -> tuple[Tensor, ...]:
    """``run(call, *rest)`` over stored votes, which output capsules share: 1 / J of the memory of separate votes."""

    def routed(wide: Call) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = run(replace(wide, u=votes(wide), weight=None, P=1), *rest)
        return results

    return in_wide_dtype(routed, call, narrow)


def votes(call: Call) -> Tensor:
    """``u [B, I, P K]``, ``weight [I or 1, 1, R, K]``, ``mask [B, I]`` to the votes ``[B, I, 1, P R]``."""
    u, weight, P, D, mask = call.u, call.weight, call.P, call.D, call.parameters.mask
    assert weight is not None
    if mask is not None:
        # The values of a masked capsule must not reach the gradient of the weight.
        u = u.masked_fill(~mask[:, :, None], 0.0)
    # No reshape infers a size (-1): it would fail for an empty batch.
    if weight.shape[0] == 1:
        x = torch.nn.functional.linear(u if P == 1 else u.unflatten(2, (P, weight.shape[3])), weight[0, 0])
        return x.flatten(2).unsqueeze(2)
    B, I, _ = u.shape
    x = u.reshape(B, I, P, weight.shape[3]).transpose(0, 1).flatten(1, 2)  # [I, B P, K]
    x = torch.bmm(x, weight[:, 0].transpose(1, 2))
    return x.reshape(I, B, 1, D).transpose(0, 1)


def saves_votes(call: Call, backend: str | None, where: Collection[str] = tuple(WORTH_IT)) -> bool:
    """Whether :func:`without_votes` makes the passes of a call faster; ``where``: the backends that may do so."""
    u, weight, parameters = call.u, call.weight, call.parameters
    if weight is None or weight.shape[0] != 1 or call.P != 1:
        return False
    if type(u) not in (Tensor, torch.nn.Parameter) or getattr(call.options, "second", False):
        return False
    if getattr(parameters, "precision", None) is not None or getattr(parameters, "center", None) is not None:
        return False
    chosen = choose(call, backend)
    if chosen not in where:
        return False
    (B, I, K), J, D = u.shape, call.J, call.D
    votes = B * I * J * D * (K + 2) if weight.shape[1] == J else B * I * D * (K + 2 * J)
    return surely(votes - 2 * B * J * K * (I + D) > WORTH_IT[chosen])


def without_votes(run: Callable[..., Any], narrow: Sequence[int], call: Call, *rest: Any) -> tuple[Tensor, ...]:
    """The pass ``run(call, *rest)`` with u as votes that all output capsules share."""

    def routed(wide: Call) -> tuple[Tensor, ...]:
        u, weight, parameters = wide.u, wide.weight, wide.parameters
        assert weight is not None
        matrices = weight[0].expand(wide.J, -1, -1)
        query = parameters.query if parameters.query is None else by_output(parameters.query, matrices)
        keys = replace(wide, u=u[:, :, None], weight=None, D=u.shape[2], parameters=parameters._replace(query=query))
        mass, first, *others = run(keys, *rest)
        return mass, by_output(first, matrices.transpose(1, 2)), *others

    return in_wide_dtype(routed, call, narrow)


def by_output(rows: Tensor, matrices: Tensor) -> Tensor:
    """``rows [B, J, N]`` times ``matrices [J, N, M]`` as ``[B, J, M]``: einsum takes 20 us more, a tenth of a pass."""
    return torch.matmul(rows.transpose(0, 1), matrices).transpose(0, 1)
