"""A routing pass over votes that exist: score them, normalise, add up their moments."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..axes import axes_of
from ..options import PassOptions
from ..positions import from_samples, to_samples
from ..precision import wide_dtype
from .coupling import coupling_coefficients, log_sum_exp, valid_pairs


class PassParameters(NamedTuple):
    """What a pass scores votes against, in the order of the op schemas; None where there is nothing of its kind."""

    query: Tensor | None = None  # [B, J, D]
    precision: Tensor | None = None  # [B, J, D]
    center: Tensor | None = None  # [B, J, D]
    prior: Tensor | None = None  # [B, J]
    logits: Tensor | None = None  # [I, J] or [B, I, J]
    activation: Tensor | None = None  # [B, I]
    lse: Tensor | None = None  # [B, I]
    mask: Tensor | None = None  # [B, I]
    out_mask: Tensor | None = None  # [B, J]

    def without_masked(self, dtype: torch.dtype) -> "PassParameters":
        """Converted to dtype, with zeros for masked capsules: what they hold must not reach a gradient either."""

        def cleared(value: Tensor | None, mask: Tensor | None) -> Tensor | None:
            if value is None:
                return None
            value = value.to(dtype)
            if mask is None:
                return value
            return value.masked_fill(~mask.reshape(*mask.shape, *(1,) * (value.dim() - 2)), 0.0)

        return self._replace(
            query=cleared(self.query, self.out_mask),
            precision=cleared(self.precision, self.out_mask),
            center=cleared(self.center, self.out_mask),
            prior=cleared(self.prior, self.out_mask),
            logits=cleared(self.logits, None),
            activation=cleared(self.activation, self.mask),
            lse=cleared(self.lse, self.mask),
        )


def votes_pass(
    votes: Tensor, parameters: PassParameters, J: int, options: PassOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """``votes [B, I, J or 1, D]`` to mass ``[B, J]``, first and second ``[B, J, D]``, weights ``[B, I, J]`` and lse.

    lse is that of the softmax, ``[B, I]`` for "out" and ``[B, J]`` for "in", None without one. 16-bit votes are
    converted to float32 first, and so are all results. Votes ``[B, I, J, D, S]`` have S positions, and so has all that
    has an axis B.
    """
    if votes.dim() == 5:
        B, S = votes.shape[0], votes.shape[4]
        given = {
            name: value if value is None or axes_of(name, value)[0] != "B" else to_samples(value)
            for name, value in parameters._asdict().items()
        }
        *moments, found = votes_pass(to_samples(votes), PassParameters(**given), J, options)
        mass, first, second, r = (value if value.dim() == 1 else from_samples(value, B, S) for value in moments)
        return mass, first, second, r, None if found is None else from_samples(found, B, S)
    B, I, _, D = votes.shape
    wide = wide_dtype(votes.dtype)
    mask, out_mask = parameters.mask, parameters.out_mask
    query, precision, center, prior, logits, activation, lse, *_ = parameters.without_masked(wide)
    x = votes.to(wide)
    if mask is not None:
        x = x.masked_fill(~mask[:, :, None, None], 0.0)
    if center is not None:
        x = x - center[:, None]
    score = x.new_zeros(B, I, J)
    if query is not None:
        score = score + torch.einsum("bijd,bjd->bij", x, query)
    if precision is not None:
        score = score - 0.5 * torch.einsum("bijd,bjd->bij", x * x, precision)
    if prior is not None:
        score = score + prior[:, None]
    if logits is not None:
        score = score + logits
    valid = valid_pairs(mask, out_mask)
    r = coupling_coefficients(score, valid, options.normalize, options.leaky, lse)
    if activation is not None:
        r = r * activation[:, :, None]
    x = x.expand(B, I, J, D)
    first = torch.einsum("bij,bijd->bjd", r, x)
    second = torch.einsum("bij,bijd->bjd", r, x * x) if options.second else first.new_empty(0)
    found = log_sum_exp(score, valid, options.normalize, options.leaky) if options.normalize in ("out", "in") else None
    return r.sum(1), first, second, r, found
