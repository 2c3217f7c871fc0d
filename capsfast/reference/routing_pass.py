"""A routing pass: votes ``W_ij u_i``, then what votes_pass.py does with them."""

from torch import Tensor

from ..options import PassOptions
from .dynamic_routing import votes
from .votes_pass import PassParameters, votes_pass


def routing_pass(
    u: Tensor, weight: Tensor, parameters: PassParameters, J: int, options: PassOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """``u [B, I, P K]``, ``weight [I or 1, J or 1, R, K]`` to the moments, see votes_pass.py."""
    if parameters.mask is not None:
        # Before the product: what a masked capsule holds (NaN, say) must not reach dW either.
        u = u.masked_fill(~parameters.mask[:, :, None], 0.0)
    return votes_pass(votes(u, weight), parameters, J, options)
