"""The routing of interest capsules, as passes: what no fused routing has as an option."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import checks
from ..arguments import RoutingParameters, unchecked
from ..functional import dynamic_routing
from ..functional import squash as _squash
from ..ops import shared_routing
from ..ops.define import as_under_autocast
from ..options import Options
from ..passes import Moments, routing_pass, votes_pass
from ..precision import wide_dtype

# c of the squash kinds whose length is n / (c + n), n = |s|^2.
RATIO = {"paper": 1.0, "half": 0.5, "eps_outside": 1.0}


class InterestOptions(NamedTuple):
    """num_iterations, softmax, gradient, squash, eps: as in :class:`capsfast.options.Options`. The others are those of
    :class:`capsfast.nn.InterestCapsules`."""

    num_iterations: int
    softmax: str
    gradient: str
    squash: str
    eps: float
    update: str
    mask_after: bool
    temperature: float
    squash_power: float

    @property
    def plain(self) -> bool:
        """Whether the iterations are those of dynamic routing but for update and temperature."""
        return self.squash_power == 1 and not self.masks_after

    @property
    def masks_after(self) -> bool:
        # Over the interests a masked behaviour has a softmax of its own: it is the same before and after.
        return self.mask_after and self.softmax == "in"


def squash(s: Tensor, options: InterestOptions) -> Tensor:
    if options.squash_power == 1:
        return _squash(s, kind=options.squash, eps=options.eps)
    # eps within the power, or the gradient at 0 of one below 1 is infinite.
    n = s.square().sum(-1, keepdim=True) + options.eps
    return (n / (RATIO[options.squash] + n)) ** options.squash_power * n.rsqrt() * s


def route(
    u: Tensor,
    weight: Tensor,
    J: int,
    logits: Tensor | None,
    mask: Tensor | None,
    out_mask: Tensor | None,
    options: InterestOptions,
    backend: str | None,
) -> Tensor:
    """``u [B, I, K]`` and ``weight [1 or I, 1 or J, D, K]`` to interests ``[B, J, D]`` in the dtype of u.

    Under autocast that is autocast's, as of the ops, and what is done between passes is not cast.
    """
    if logits is not None and checks.autocast_dtype(u.device) is not None:
        logits = logits.to(wide_dtype(u.dtype))
    (u, weight), no_autocast = as_under_autocast(u, weight)
    o = options
    with no_autocast:
        fused = Options(o.num_iterations, o.softmax, o.gradient, False, o.squash, o.eps)
        if weight.shape[0] == 1 and weight.shape[1] == 1 and o.plain:
            scaled = logits if logits is None or o.temperature == 1 else logits / o.temperature
            given = RoutingParameters(scaled, None, mask, out_mask)
            call = unchecked(u, weight, given, fused, J, "capsfast.nn.InterestCapsules")
            if shared_routing.serves(call, backend):
                return shared_routing.run(call, o.update == "accumulate", 1 / o.temperature)
        if out_mask is None and logits is None and weight.shape[1] != J:
            # Says how many output capsules there are.
            logits = u.new_zeros(u.shape[1], J)
        if o.plain and o.update == "accumulate" and o.temperature == 1:
            return dynamic_routing(  # type: ignore[no-any-return]
                u,
                weight,
                o.num_iterations,
                logits=logits,
                mask=mask,
                out_mask=out_mask,
                softmax=o.softmax,
                gradient=o.gradient,
                squash=o.squash,
                eps=o.eps,
                backend=backend,
            )
        return Passes(u, weight, J, logits, mask, out_mask, o, backend).run()


class Passes:
    """The same, as a loop over passes. With one matrix for all pairs they are passes over u, which form no votes."""

    def __init__(
        self,
        u: Tensor,
        weight: Tensor,
        J: int,
        logits: Tensor | None,
        mask: Tensor | None,
        out_mask: Tensor | None,
        options: InterestOptions,
        backend: str | None,
    ) -> None:
        self.u, self.weight, self.J, self.logits, self.options = u, weight, J, logits, options
        self.given = {"out_mask": out_mask, "backend": backend, "normalize": options.softmax}
        if options.masks_after and mask is not None:
            self.given["activation"] = mask.to(u.dtype)
        else:
            self.given["mask"] = mask
        self.matrix = weight[0, 0] if weight.shape[0] == 1 and weight.shape[1] == 1 else None

    def moments(self, query: Tensor | None, logits: Tensor | None, **changed: object) -> Moments:
        given = {**self.given, **changed}
        if self.matrix is None:
            return routing_pass(self.u, self.weight, query=query, logits=logits, **given)  # type: ignore[arg-type]
        if query is not None:
            query = query @ self.matrix.to(query.dtype)
        m = votes_pass(self.u[:, :, None], query=query, logits=logits, **given)  # type: ignore[arg-type]
        return m._replace(first=F.linear(m.first, self.matrix.to(m.first.dtype)))

    def run(self) -> Tensor:
        o = self.options
        if o.gradient == "full":
            v, _ = self.iterate(o.num_iterations)
        else:
            v = self.last_only()
        return v.to(self.u.dtype)

    def iterate(self, num_iterations: int) -> tuple[Tensor, Tensor]:
        """v of the last iteration, and what a further one would score with."""
        v = query = self.u.new_zeros(self.u.shape[0], self.J, self.weight.shape[2])
        for t in range(num_iterations):
            m = self.moments(None if t == 0 else query / self.options.temperature, self.prior(t))
            v = squash(m.first, self.options)
            query = query + v if self.options.update == "accumulate" else v
        return v, query

    def prior(self, t: int) -> Tensor | None:
        if self.logits is None:
            # Passes over u or shared votes have to be told J.
            return None if t > 0 else self.u.new_zeros(self.u.shape[1], self.J)
        return self.logits / self.options.temperature if t == 0 or self.options.update == "accumulate" else None

    def last_only(self) -> Tensor:
        """The agreement as a constant: it is added to the logits of one pass without a query."""
        t = self.options.num_iterations - 1
        logits = self.prior(t)
        if t > 0:
            with torch.no_grad():
                _, query = self.iterate(t)
                every = {
                    "normalize": "none",
                    "mask": None,
                    "activation": None,
                    "out_mask": None,
                    "return_weights": True,
                }
                agreement = self.moments(query / self.options.temperature, None, **every).weights
            assert agreement is not None
            logits = agreement if logits is None else logits + agreement
        return squash(self.moments(None, logits).first, self.options)
