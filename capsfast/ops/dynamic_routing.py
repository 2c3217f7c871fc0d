"""The op behind :func:`capsfast.dynamic_routing` and :func:`capsfast.route_votes`.

``capsfast::dynamic_routing`` returns ``(v [B, J, D], c [B, I, J], s [r, B, J, D], norm [2, r, B, J])``. v and the last
coupling c (empty without return_coupling) have the dtype of u; if wide, v has the dtype that sums are formed in. For
softmax "in" c has that dtype too, because the backward subtracts a sum of c from its terms: where one c is nearly 1, a
rounded c would leave no digit of the difference. s and norm are for the backward, in the dtype of sums. s holds the
weighted sum of every iteration, without the bias. norm, empty unless softmax is "in", is the normaliser over the input
capsules: a number m, which the largest logit exceeds by at most 8, and ``1 / sum_i exp(b - m)``. The backward
recomputes votes, coupling and logits. Iteration t scores the votes with V_t: the sharpness times the sum of v of the
iterations before t, or without accumulate times v of iteration t - 1 alone.

Pose matrices come as ``u [B, I, P K]`` and ``weight [I or 1, J, R, K]``: P poses that share the weight. Then D is P R,
the P votes one after the other.

Without a weight, u are votes ``[B, I, J or 1, D]``; with size 1 all J output capsules share them, and du has size 1
too. Votes ``[B, I, J, D, S]`` have S positions. Then every tensor with an axis B ends in an axis S, and s and norm are
empty: s would take r / I times the memory of the votes, which is much for few input capsules. The backward computes s
and norm again, for a part of the positions at a time.

:class:`capsfast.calls.options.RoutingOptions` lists the options. Logits need accumulate, except in factored_routing.
tf32: float32 products may be rounded to TF32; no effect on the CPU.

``capsfast::dynamic_routing_backward`` returns the gradients that are needed, and empty tensors for the others.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ..calls.arguments import Call, PassParameters
from ..calls.options import PassOptions, RoutingOptions
from ..calls.precision import as_under_autocast, in_wide_dtype, wide_dtype
from ..reference.dynamic_routing import agree
from ..reference.dynamic_routing import dynamic_routing as by_definition
from ..reference.routing_pass import Moments
from . import factored_routing, flops, routing_pass
from .define import Op, check_fake, fake_sizes
from .shared_weights import ROUTED_BY_PASSES, saves_votes, with_votes, without_votes


def _narrow(options: RoutingOptions) -> tuple[int, ...]:
    """Indices of the results in (v, c) that have the dtype of u."""
    return (1,) if options.wide else (0, 1)


def run(call: Call, return_coupling: bool, backend: str | None) -> tuple[Tensor, Tensor]:
    """``(v, c)`` from the chosen backend; c is empty if it is not wanted."""
    weight = call.weight
    rows, columns = (0, call.J) if weight is None else weight.shape[:2]
    if rows == 1 or columns != call.J:
        if factored_routing.serves(call, backend):
            v, c = factored_routing.run(call, return_coupling)
            return v, _rounded(call, v, c) if return_coupling else c
        if columns != call.J:
            v, c = with_votes(run, _narrow(call.options), call, return_coupling, backend)
            return v, c
        if saves_votes(call, backend, ROUTED_BY_PASSES):
            definition = partial(_by_passes, return_coupling=return_coupling, backend=backend)
            v, c = in_wide_dtype(definition, call, _narrow(call.options))
            return v, c
    v, c, *_ = OP.run(call, (return_coupling,), backend)
    return v, _rounded(call, v, c) if return_coupling else c


def _rounded(call: Call, v: Tensor, c: Tensor) -> Tensor:
    """c in the dtype of u. v has this dtype too, unless the call is wide."""
    if not call.options.wide:
        return c.to(v.dtype)
    (u,), _ = as_under_autocast(call.u)
    return c.to(u.dtype)


def _by_passes(call: Call, return_coupling: bool, backend: str | None) -> tuple[Tensor, Tensor]:
    """``(v, c)`` by passes that form no votes."""
    logits, bias, mask, out_mask = call.parameters

    def moments(normalize: str, leaky: bool = False, return_weights: bool = False, **given: Tensor | None) -> Moments:
        parameters = PassParameters(mask=mask, out_mask=out_mask, **given)
        one = replace(call, parameters=parameters, options=PassOptions(normalize, leaky, False))
        found = without_votes(routing_pass.run, (), one, return_weights, False, backend)
        return Moments(found[0], found[1], weights=found[3])

    v, last = agree(moments, call.options, logits=logits, bias=bias, out_mask=out_mask, return_weights=return_coupling)
    assert last.weights is not None
    return v, last.weights


def _fake(a: Any) -> tuple[Tensor, ...]:
    sizes, S = fake_sizes(a.u, a.weight, a.J)
    check_fake({"logits": a.logits, "bias": a.bias, "mask": a.mask, "out_mask": a.out_mask}, sizes, S)
    (B, I, J, D), new, wide = sizes, a.u.new_empty, wide_dtype(a.u.dtype)
    kept = len(S) == 0
    return (
        new(B, J, D, *S, dtype=wide if a.wide else a.u.dtype),
        new((B, I, J, *S) if a.return_coupling else (0,), dtype=wide if a.softmax == "in" else a.u.dtype),
        new((a.num_iterations, B, J, D) if kept else (0,), dtype=wide),
        new((2, a.num_iterations, B, J) if kept and a.softmax == "in" else (0,), dtype=wide),
    )


def _flops(a: Any) -> Any:
    votes, once = flops.of_votes(a, *fake_sizes(a.u, a.weight, a.J))
    return votes + (2 * a.num_iterations - 1) * once


def _flops_backward(a: Any) -> Any:
    votes, once = flops.of_votes(a, *fake_sizes(a.u, a.weight, a.J))
    u, weight, logits, _ = a.needed
    sums, couplings, agreements = flops.of_steps(a, logits)
    of_votes = u or weight
    return votes * (u + weight) + once * (sums * of_votes + couplings + agreements * (1 + of_votes))


OP = Op(
    "dynamic_routing",
    ("capsfast.dynamic_routing", "capsfast.route_votes"),
    _fake,
    definition=by_definition,
    flops=(_flops, _flops_backward),
    narrow=lambda options: tuple(n for n in _narrow(options) if n == 0 or options.softmax == "out"),
)
