"""The kernels of ``capsfast::triton_em_routing``; the contract is in ops/em_routing.py.

The forward runs a pass for the origin, then a pass and an update for each iteration. The backward takes the iterations
from the last to the first. At its end, one gradient pass serves all iterations, so it makes votes and products once.
"""

import copy
import math
from typing import Any, NamedTuple

import torch

from ..calls.arguments import PassParameters
from ..calls.options import EMOptions, PassOptions
from ..calls.positions import as_positions, as_samples
from . import em_update, passes
from .dynamic_routing import added, joined, samples_at_once
from .kernels.arguments import Norms, OutputGradients
from .kernels.update import add_terms_kernel
from .launch import KernelCall, bytes_of, cdiv
from .plan import Plan, Slot, planned


class Iteration(NamedTuple):
    """What ``state`` holds of an iteration, in this order; rows are samples or, with positions, (b, s)."""

    mass: Slot  # [rows, J], as prior
    prior: Slot
    first: Slot  # [rows, J, D], as all that follow
    second: Slot
    center: Slot
    precision: Slot


class EMCall:
    """A call of the op. inputs: activation and masks, with a row for every position."""

    def __init__(self, u: Slot, *rest: Any) -> None:
        self.plan, self.u = u.plan, u
        self.weight, activation, *betas, mask, out_mask, J, temperatures, floor, momentum = rest[:10]
        isotropic, cost, cost_scale, nonlinearity, leaky, self.stride, self.tf32 = rest[10:17]
        self.betas, self.temperatures, self.r = betas, temperatures, len(temperatures)
        self.options = EMOptions(floor, momentum, isotropic, cost, cost_scale, nonlinearity, 0.0, True)
        self.leaky = leaky
        moved = (self.plan.compute(as_samples, value, u.shape[4:]) for value in (activation, mask, out_mask))
        activation, mask, out_mask = moved
        self.inputs = {"activation": activation, "mask": bytes_of(mask), "out_mask": bytes_of(out_mask)}
        self.J = J
        self.rows, _, self.J, self.D, _ = self.call().sizes

    def part(self, b: slice) -> "EMCall":
        """The call for samples b."""
        part, rows = copy.copy(self), self.rows_of(b)
        part.u, part.rows = self.u[b], rows.stop - rows.start
        part.inputs = {name: value and value[rows] for name, value in self.inputs.items()}
        return part

    def rows_of(self, b: slice) -> slice:
        positions = self.rows // max(self.u.shape[0], 1)
        return slice(b.start * positions, min(b.stop, self.u.shape[0]) * positions)

    def call(self, now: Iteration | None = None, t: int = 0, iterations: int = 1) -> KernelCall:
        """The call of the pass of iteration t. iterations: how many iterations have their vectors side by side."""
        per_input: dict[str, Any] = dict(self.inputs)
        if now is not None:
            per_input["center"] = now.center
        if now is not None and t:
            per_input |= {"precision": now.precision, "prior": now.prior}
        parameters, options = PassParameters(**per_input), PassOptions("out", self.leaky, True)
        call = KernelCall(self.u, self.weight, parameters, options, self.tf32, self.J, own_parameters=True)
        call.iterations = iterations
        return call

    def of_origin(self) -> KernelCall:
        """The call of the pass over every stride-th input capsule, with equal coupling."""
        few, weight = slice(None, None, self.stride), self.weight
        activation, mask, out_mask = self.inputs.values()
        sampled: Any = (value and value[:, few].contiguous() for value in (activation, mask))
        parameters: Any = PassParameters(None, None, None, None, None, next(sampled), None, next(sampled), out_mask)
        weight = weight if weight is None or weight.shape[0] == 1 else weight[few]
        return KernelCall(self.u[:, few], weight, parameters, PassOptions("out", False, False), self.tf32, self.J)

    def iterations(self, state: Slot, kept: int) -> list[Iteration]:
        """Views of a state that holds ``kept`` iterations; iteration t is in place t % kept."""
        pair, vector = (self.rows, self.J), (self.rows, self.J, self.D)
        sizes = (pair, pair, vector, vector, vector, vector) * kept
        parts = state.ghost.split([math.prod(size) for size in sizes])
        slots = [Slot(self.plan, state.memory, part.view(size)) for part, size in zip(parts, sizes, strict=True)]
        return [Iteration(*slots[6 * t : 6 * t + 6]) for t in (t % kept for t in range(self.r))]

    def update(
        self, t: int, now: Iteration, results: Any, scores: Any = (None, None), gradients: Any = (None,) * 7
    ) -> None:
        """The update of iteration t; with gradients its backward, see em_update.step()."""
        options = self.options._replace(inverse_temperature=self.temperatures[t], final=t + 1 == self.r)
        last = now.center if t and options.momentum else None
        tensors = (now.mass, now.first, now.second, now.center, *self.betas, last)
        em_update.step(self.plan, tensors, self.inputs["out_mask"], options, results, scores, gradients, routing=True)


@planned
def forward(plan: Plan, u: Slot, *rest: Any) -> tuple[Slot, ...]:
    em = EMCall(u, *rest)
    rows, J, D, return_state = em.rows, em.J, em.D, rest[-1]
    kept = em.r if return_state else min(em.r, 2)
    poses, activations, state = plan.new(rows, J, D), plan.new(rows, J), plan.new(kept * rows * J * (4 * D + 2))
    iterations = em.iterations(state, kept)
    # An update after a pass about 0 makes the origin. Nothing reads the precision and the prior of the first iteration.
    sums, _ = passes.weighted_sums(em.of_origin(), None, True)
    about_0, options = (sums.mass, sums.first, *(None,) * 5), em.options._replace(momentum=0.0, final=False)
    results: Any = (iterations[0].center, iterations[0].precision, iterations[0].prior)
    em_update.step(plan, about_0, None, options, results, routing=True)
    for t, now in enumerate(iterations):
        call = em.call(now, t)
        passes.arrange(call)
        passes.weighted_sums(call, None, True, mass=now.mass, s=now.first, second=now.second)
        following = iterations[t + 1] if t + 1 < em.r else None
        results = (following.center, following.precision, following.prior) if following else (poses, None, activations)
        em.update(t, now, results)
    poses, activations = (plan.compute(as_positions, value, u.shape[0], u.shape[4:]) for value in (poses, activations))
    return poses, activations, state if return_state else plan.new(0)


@planned
def backward(plan: Plan, *args: Any) -> tuple[Slot, ...]:
    """Takes the batch in parts if the coefficients of all samples would take too much memory."""
    # args: two gradients of outputs, the seven tensors, the state, J, the options, and the gradients needed.
    u, weight, activation, *betas = args[2:7]
    needed = need_u, need_weight, need_activation, *_ = args[-1]
    em = EMCall(*args[2:9], *args[10:-1])
    iterations, rows, J = em.iterations(args[9], em.r), em.rows, em.J
    douts = [plan.compute(as_samples, value, u.shape[4:]) for value in args[:2]]
    douts = [dout and dout.contiguous() for dout in douts]
    shares = plan.new(2, em.r, rows, J)
    dactivation = plan.new(*activation.shape, dtype=activation.dtype) if need_activation else None
    B = u.shape[0]
    # The terms of the activation take half as much as the coefficients.
    step = samples_at_once(u, J, em.D, 1.5 * em.r if need_activation else em.r - 1)
    step = max(min(step, B) if need_u or need_weight or need_activation else B, 1)
    # The parts of dx are written where they belong, unless they are sums over output capsules.
    dx = plan.new(*u.shape, dtype=u.dtype) if need_u and not em.call().common else None
    parts = []
    for lo in range(0, B, step):
        b = slice(lo, lo + step)
        at = em.rows_of(b)
        of_part = [Iteration(*(state[at] for state in now)) for now in iterations]
        douts_of_part = [dout and dout[at] for dout in douts]
        parts.append(_backward(
            em if step == B else em.part(b), of_part, douts_of_part, shares[:, :, at], needed[:3],
            dx and dx[b], dactivation and dactivation[b], torch.float32 if step < B else None,
        ))  # fmt: skip
    dxs, dweights = zip(*parts, strict=True)
    if len(parts) == 1:
        ((dx, dweight),) = parts
    else:
        dx = plan.compute(joined, u.dtype, *dxs) if need_u and dx is None else dx
        dweight = plan.compute(added, weight.dtype, *dweights) if need_weight else None
    dbetas = [
        em_update.add_up(plan, share, beta.dtype) if wanted else None
        for share, beta, wanted in zip(shares, betas, needed[3:], strict=True)
    ]
    gradients = (dx, dweight, dactivation, *dbetas)
    return tuple(
        tensor or plan.new(0, dtype=(like or u).dtype) for tensor, like in zip(gradients, args[2:7], strict=True)
    )


def _backward(
    em: EMCall,
    iterations: list[Iteration],
    douts: list[Slot | None],
    shares: Slot,
    needed: tuple[bool, ...],
    dx: Slot | None,
    dactivation: Slot | None,
    dtype: torch.dtype | None,
) -> tuple[Slot | None, Slot | None]:
    """Returns dx and dweight, and fills dactivation and the shares of the gradients of beta_a and beta_u. dtype and dx:
    as in passes.gradients()."""
    r, rows, J, D = em.r, em.rows, em.J, em.D
    need_votes, need_activation = needed[0] or needed[1], needed[2]
    new, call = em.plan.new, em.call(iterations[-1], r - 1, r)
    state, vectors = call.vectors(r, 2), (call.vectors(r), call.vectors(r), call.vectors(r))
    # The first iteration has equal couplings, which need no pairs, unless the activation needs its terms.
    start = 0 if need_activation else 1
    pairs = passes.new_coefficients(call, r - start) if need_votes and r > start else None
    positions = () if call.positions is None else (call.positions,)
    terms = new(r, *em.u.shape[:2], J, *positions) if need_activation else None
    dposes, dscore = douts
    next_precision = of_x = of_xx = None
    for t in reversed(range(r)):
        now = iterations[t]
        dmass, dfirst, dsecond = new(rows, J), new(rows, J, D), new(rows, J, D)
        dbefore = new(rows, J, D) if t else None
        gradients = (dmass, dfirst, dsecond, dbefore, None, shares[0, t], shares[1, t])
        em.update(t, now, (dposes, of_xx, dscore), (next_precision, of_x), gradients)
        of_pass = em.call(now, t, r)
        if t or need_votes or need_activation:
            passes.arrange_iteration(of_pass, t, dfirst, dsecond, state, vectors)
        if t or need_activation:
            sums = passes.partial_sums(of_pass, "accumulate_gradient", True, True) if t else None
            outer = OutputGradients(None, dmass, vectors[2][:, :, t])
            passes.accumulate_gradient(
                of_pass, state[:, :, t], Norms(), outer, pairs and pairs[t - start], sums, terms and terms[t]
            )
            if sums is not None:
                of_x, dscore, of_xx = passes.update(of_pass, sums)
        dposes, next_precision = dbefore, now.precision
    dweight = None
    if need_votes:
        of_inputs = needed[0], needed[1], False
        call.arranged = vectors[0] if r > 1 else None, vectors[1]
        dx, dweight, _ = passes.gradients(call, state, pairs, start == 1, of_inputs, dtype, dx, dsecond=vectors[2])
    if terms is not None:
        assert dactivation is not None
        n, S = dactivation.numel(), call.positions or 1
        sizes = (n, J, S, r * J, n * J)
        em.plan.launch(add_terms_kernel, (cdiv(n, 32),), terms, dactivation, *sizes, WIDTH=32, SB=32)
    return dx, dweight
