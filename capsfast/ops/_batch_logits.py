"""dynamic_routing with logits averaged over the batch, as products of matrices, without the votes.

Where all samples have the same coupling ``c [I, J]``, the weighted sums are ``sum_ik u_bik (c_ij W_ijdk)``, a product.
The mean of the agreement ``W_ij u_bi . v_bj`` over the batch is ``<W_ij, mean_b v_bj u_bi^T>``: another product, and a
contraction with W. Both are torch's, differentiable as often as wanted, on any device.

As elsewhere, u is ``[B, I, P K]`` and the weight ``[I or 1, J, R, K]``, with P = 1 but for pose matrices.
"""

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from ..options import Options
from ..reference.coupling import coupling_coefficients
from ..reference.squash import squash
from ._glue import in_wide_dtype
from ._product import poses
from ._routing import BOTH


def serves(mask: Tensor | None, out_mask: Tensor | None, softmax: str) -> bool:
    """Whether all samples have the same coupling, but for input capsules that a mask takes out.

    A softmax without some of its entries is another one: over the outputs those of out_mask, over the inputs those of
    mask.
    """
    return out_mask is None and (mask is None or softmax == "out")


def dynamic_routing(
    u: Tensor,
    weight: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """``v [B, J, P R]`` and the last coupling ``c [B, I, J]``, in the dtype of u. Sums are in float32 or float64."""
    v, c = in_wide_dtype(partial(_route, options), (u, weight), (logits, bias, mask), BOTH)
    return v, c


def _route(
    options: Options, u: Tensor, weight: Tensor, logits: Tensor | None, bias: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    B, I, _ = u.shape
    J = weight.shape[1]
    count = max(B, 1)  # nothing is the mean of no samples
    if mask is not None:
        # What a masked capsule holds (NaN, say) must not reach dW, nor its weight the sums.
        u = u.masked_fill(~mask[:, :, None], 0.0)
        if weight.shape[0] != 1:
            weight = weight.masked_fill(~mask.any(0)[:, None, None, None], 0.0)
    # A single row for a single input capsule is its own.
    product = _Shared(u, weight) if weight.shape[0] != I else _Own(u, weight)
    prior = u.new_zeros(I, J) if logits is None else logits
    if prior.dim() == 3:
        prior = prior.sum(0) / count

    agreement: Tensor | float = 0.0
    for t in range(options.num_iterations):
        last = t + 1 == options.num_iterations
        with torch.no_grad() if options.gradient == "last" and not last else nullcontext():
            c = coupling_coefficients((prior + agreement)[None], None, options.softmax, options.leaky)[0]
            s = product.weighted_sums(c)
            if bias is not None:
                s = s + bias
            v = squash(s, -1, options.eps, options.squash) if options.squash_last or not last else s
            if not last:
                agreement = agreement + product.agreement(v) / count
                if options.gradient == "last":
                    agreement = agreement.detach()
    coupling = c.expand(B, I, J)
    if mask is not None:
        coupling = coupling.masked_fill(~mask[:, :, None], 0.0)
    return v, coupling


class _Own:
    """Each input capsule has its own matrices."""

    def __init__(self, u: Tensor, weight: Tensor) -> None:
        I, J, R, K = weight.shape
        self.sizes = u.shape[0], poses(u, weight), I, J, R, K
        B, P = self.sizes[:2]
        self.u = u.reshape(B, I, P, K).transpose(1, 2).reshape(B * P, I * K)
        self.weight = weight.permute(0, 3, 1, 2).contiguous()  # [I, K, J, R]

    def weighted_sums(self, c: Tensor) -> Tensor:
        """``c [I, J]`` to ``s [B, J, P R]``."""
        B, P, I, J, R, K = self.sizes
        scaled = (c[:, None, :, None] * self.weight).reshape(I * K, J * R)
        return (self.u @ scaled).reshape(B, P, J, R).transpose(1, 2).reshape(B, J, P * R)

    def agreement(self, v: Tensor) -> Tensor:
        """``v [B, J, P R]`` to the sum of ``W_ij u_bi . v_bj`` over the batch, ``[I, J]``."""
        B, P, I, J, R, K = self.sizes
        v = v.reshape(B, J, P, R).transpose(1, 2).reshape(B * P, J * R)
        return ((self.u.T @ v).reshape(I, K, J, R) * self.weight).sum((1, 3))


class _Shared:
    """All input capsules share their matrices: the sum over them comes before the product with these."""

    def __init__(self, u: Tensor, weight: Tensor) -> None:
        _, J, R, K = weight.shape
        B, I, _ = u.shape
        self.sizes = B, poses(u, weight), I, J, R, K
        self.u = u.transpose(0, 1).flatten(1)  # [I, B P K]
        self.weight = weight[0]

    def weighted_sums(self, c: Tensor) -> Tensor:
        B, P, _, J, R, K = self.sizes
        s = (c.T @ self.u).reshape(J, B * P, K) @ self.weight.transpose(1, 2)
        return s.reshape(J, B, P * R).transpose(0, 1)

    def agreement(self, v: Tensor) -> Tensor:
        B, P, _, J, R, K = self.sizes
        back = v.transpose(0, 1).reshape(J, B * P, R) @ self.weight
        return self.u @ back.reshape(J, B * P * K).T
