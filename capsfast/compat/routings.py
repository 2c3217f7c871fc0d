"""Dynamic routing as older code has it: logits averaged over the batch, a mask after the softmax."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..calls import arguments, checks, keywords
from ..calls.arguments import Call, RoutingParameters
from ..calls.options import Backend, Normalize, OptionKeywords, Options
from ..calls.precision import in_wide_dtype
from ..passes import routing_pass, votes_pass
from ..reference.coupling import coupling_coefficients
from ..reference.dynamic_routing import agree
from ..reference.routing_pass import Moments

Linear = Callable[[Tensor], Tensor]


class Keywords(OptionKeywords, total=False):
    """The keywords that both functions take."""

    logits: Tensor | None
    bias: Tensor | None
    return_coupling: bool


def averaged_routing(
    u: Tensor,
    weight: Tensor | None,
    num_iterations: int = 3,
    *,
    mask: Tensor | None = None,
    **options: Unpack[Keywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`capsfast.dynamic_routing` that averages the logits over the batch before every softmax.

    Several older implementations do so. The result of a sample then depends on the other samples, and accuracy falls
    at small batches: use this function to reproduce such models, not to train new ones. Under DistributedDataParallel
    each rank averages over its own batch.

    All samples have the same coupling ``c [I, J]``. So the weighted sums are ``sum_ik u_bik (c_ij W_ijdk)``, and the
    mean of the agreement ``W_ij u_bi . v_bj`` is ``<W_ij, mean_b v_bj u_bi^T>``: products of matrices without votes.
    torch computes them, on any device, differentiable any number of times.

    Args:
        u: input capsules ``[B, I, K]``; with ``weight=None`` votes ``[B, I, J, D]``.
        weight: ``[I, J, D, K]``, ``[1, J, D, K]``, or None.
        all others: as in :func:`capsfast.dynamic_routing`, without out_mask and backend.

    Returns:
        ``v [B, J, D]``; with ``return_coupling`` the pair of ``v`` and ``c [B, I, J]``.

    Raises:
        ValueError, TypeError: as :func:`capsfast.dynamic_routing`; a mask with ``softmax="in"``, because each sample
            would then have its own softmax.
    """
    op = "capsfast.compat.averaged_routing"
    call, pair = _checked(averaged_routing, op, u, weight, num_iterations, mask, options)
    if mask is not None and call.options.softmax == "in":
        raise ValueError(f"{op}: mask needs softmax='out', got softmax='in', with which samples differ; drop the mask")
    v, c = in_wide_dtype(_averaged, call, (0, 1))
    return (v, c) if pair else v


def masked_after_routing(
    u: Tensor,
    weight: Tensor | None,
    num_iterations: int = 3,
    *,
    mask: Tensor,
    backend: Backend | None = None,
    **options: Unpack[Keywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`capsfast.dynamic_routing` that multiplies the coupling by a mask, or any factor, after the softmax.

    With ``softmax="in"`` masked input capsules take part in the softmax, so that the coupling of an output capsule adds
    up to less than one. Torch ports of ComiRec (Cen et al. 2020) do so; the authors' code, in TensorFlow, has its
    softmax over the output capsules. With ``softmax="out"`` and a mask of 0 and 1,
    ``capsfast.dynamic_routing(mask=...)`` is faster: this function routes by single passes.

    Args:
        u: input capsules ``[B, I, K]``; with ``weight=None`` votes ``[B, I, J, D]``.
        weight: ``[I, J, D, K]``, with size 1 along an axis that shares it, or None.
        mask: ``[B, I]``, bool or factors of any value.
        all others: as in :func:`capsfast.dynamic_routing`, without out_mask.

    Returns:
        ``v [B, J, D]`` in the dtype of u; with ``return_coupling`` the pair of ``v`` and ``c [B, I, J]``, masked.

    Raises:
        ValueError, TypeError: as :func:`capsfast.dynamic_routing`.
    """
    op = "capsfast.compat.masked_after_routing"
    if not isinstance(mask, Tensor):
        raise TypeError(f"{op}: mask must be a torch.Tensor [B, I], got {checks.shown(mask)}")
    call, pair = _checked(masked_after_routing, op, u, weight, num_iterations, mask != 0, options)
    # If output capsules share the weight, an out_mask tells the pass their number.
    common: dict[str, Any] = {"backend": backend}
    if weight is not None and weight.shape[1] == 1 and call.J != 1:
        common["out_mask"] = torch.ones(u.shape[0], call.J, dtype=torch.bool, device=u.device)

    def moments(**given: Any) -> Moments:
        given |= common
        return votes_pass(u, **given) if weight is None else routing_pass(u, weight, **given)

    logits, bias = call.parameters[:2]
    v, last = agree(moments, call.options, logits=logits, bias=bias, return_weights=pair, activation=mask.to(u.dtype))
    cast = checks.autocast_dtype(u.device)  # the result gets the dtype of the fused op's result
    v = v.to(u.dtype if cast is None or u.dtype.itemsize == 8 else cast)
    if not pair:
        return v
    assert last.weights is not None
    return v, last.weights


def _checked(
    function: Callable[..., Any],
    op: str,
    u: Tensor,
    weight: Tensor | None,
    num_iterations: int,
    mask: Tensor | None,
    given: Mapping[str, Any],
) -> tuple[Call, bool]:
    """The checked call, and whether the coupling is wanted."""
    keywords.check(function, given, Keywords, op)
    plain = {**given}
    logits, bias, pair = plain.pop("logits", None), plain.pop("bias", None), plain.pop("return_coupling", False)
    checks.boolean(op, "return_coupling", pair)
    options = Options(num_iterations, **plain).checked(op)
    parameters = RoutingParameters(logits, bias, mask, None)
    call, restore = arguments.check(op, u, arguments.GIVEN if weight is None else weight, parameters, options)
    if restore is not None or (weight is not None and u.dim() == 4):
        raise ValueError(
            f"{op}: u must be [B, I, K] or votes [B, I, J, D], got {checks.shape_of(u)} with more axes; "
            f"capsfast.dynamic_routing takes these"
        )
    return call, pair


def _averaged(call: Call) -> tuple[Tensor, Tensor]:
    logits, bias, mask, _ = call.parameters
    u, weight, J = call.u, call.weight, call.J
    B, I = u.shape[:2]
    if mask is not None:
        # Values of a masked capsule, such as NaN, must not reach dW, and its weight must not reach the sums.
        u = u.masked_fill(~mask.reshape(B, I, *(1,) * (u.dim() - 2)), 0.0)
        if weight is not None and weight.shape[0] == I:
            weight = weight.masked_fill(~mask.any(0)[:, None, None, None], 0.0)
    weighted_sums, agreement = _sums(u, weight, J)
    if logits is not None and logits.dim() == 3:
        logits = logits.sum(0) / max(B, 1)  # 0 for an empty batch

    def moments(query: Tensor | None, logits: Tensor | None, normalize: Normalize, leaky: bool) -> Moments:
        b = u.new_zeros(I, J) if logits is None else logits
        b = b if query is None else b + agreement(query)
        c = coupling_coefficients(b[None], None, normalize, leaky)[0]
        return Moments(c.sum(0), weighted_sums(c), weights=c)

    v, last = agree(moments, call.options, logits=logits, bias=bias, agreement=agreement)
    assert last.weights is not None
    coupling = last.weights.expand(B, I, J)
    return v, coupling if mask is None else coupling.masked_fill(~mask[:, :, None], 0.0)


def _sums(u: Tensor, weight: Tensor | None, J: int) -> tuple[Linear, Linear]:
    """Two functions: from a coupling to weighted sums, and from outputs to the agreement averaged over the batch."""
    B, I = u.shape[:2]
    if weight is None:
        votes = u.expand(-1, -1, J, -1)
        return (
            lambda c: torch.einsum("ij,bijd->bjd", c, votes),
            lambda v: torch.einsum("bijd,bjd->ij", votes, v) / max(B, 1),
        )
    u = u.flatten(1)
    weight = weight.expand(I, J, -1, -1).permute(0, 3, 1, 2).contiguous()  # [I, K, J, D]
    # Neither function forms votes.
    return (
        lambda c: (u @ (c[:, None, :, None] * weight).flatten(0, 1).flatten(1)).unflatten(1, (J, -1)),
        lambda v: torch.einsum("ikjd,ikjd->ij", (u.T @ v.flatten(1)).view(weight.shape), weight) / max(B, 1),
    )
