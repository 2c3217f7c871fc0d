"""Finds the options with which capsfast computes what a layer computes, by trial."""

import itertools
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import checks
from . import candidates, structures
from .identification import Identification
from .inputs import Inputs
from .misses import (
    OVER_OUTPUTS,
    SAME_DIRECTION,
    Miss,
    no_options,
    off_direction,
    other_direction,
    squashes_over_outputs,
)
from .orders import follow, steps_to
from .probe import modes_swapped, same
from .proof import Proof
from .squashes import Fit, fits
from .structures import orders
from .trace import BATCHES, BranchError, UntraceableError
from .trial import SAME, capsules, relative

# A factor of u that makes all coupling equal. Two lengths of weighted sums: the first shows eps, the second coupling.
NEAR_0 = 1e-5
LENGTHS = (3e-5, 1e-2)


class Search(Proof):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.miss: Miss | None = None
        # Orders of axes in which a squash over the output capsules is possible.
        self.over_outputs: list[Identification] = []
        # Operations that only special numbers show. They are reported last, because numbers give better reasons.
        self.thresholds: dict[str, None] = {}

    def result(self) -> Identification:
        first = self._run(replace(self.inputs, u=self.inputs.u.clone().requires_grad_()))
        if first.dim() < 2 or not first.is_floating_point():
            raise self._refused(f"its output {checks.shape_of(first)} holds no capsules [B, J, D]")
        if not first.requires_grad:
            raise self._refused("its output has no gradient, as under torch.no_grad")
        reads = self._traced()
        self._steady(first.detach())
        if self.probe.hooked:
            self.notes.append("modules in it have hooks, which the call leaves out")
        if self.probe.built:
            self.notes.append(f"the first forward makes {', '.join(self.probe.built)}")
        if self.probe.written:
            self.notes.append(f"its forward changes {', '.join(self.probe.written)}, the call does not")
        self._random()
        mattering = [name for name in self.probe.names if name in reads or name not in self.probe.settable]
        routed = None
        for weight in [*sorted(mattering, key=lambda name: -self.probe.true[name].numel()), None]:
            routed = self._routed(weight, [name for name in mattering if name != weight])
            if routed is not None:
                break
        if routed is None:
            raise self._refused(self._why_none(mattering))
        found = self._with_arguments(self._with_parameters(routed, mattering), reads)
        self._check_reads(found, reads)
        found, reads = self._with_coupling(self._with_gradient(found), reads)
        self._check_reads(found, reads)
        return self._verified(found)

    def _check_reads(self, found: Identification, reads: frozenset[str]) -> None:
        known = (*self.probe.integers, *self.probe.settable)
        unread = [name for name in known if name in reads and name not in found.names]
        if unread:
            raise self._refused(f"its output depends on `{unread[0]}`, which the call does not read")
        if self.thresholds:
            raise self._refused(
                f"its forward or its gradient applies {', '.join(self.thresholds)}, which only some numbers show, and "
                f"capsfast does not"
            )

    def _traced(self, *parts: int) -> frozenset[str]:
        """Names of the tensors that the output depends on, the same in both modes.

        Raises:
            NotReproduced: the layer does something that probing can't show: random numbers, branches, other tensors.
        """
        try:
            own = self.probe.trace(self.inputs, *parts)
            with modes_swapped(self.probe.layer):
                other = self.probe.trace(self.inputs, *parts)
            conditions = () if self.fixed else self._conditions()
        except BranchError as error:
            raise self._refused(
                "its forward branches on numbers in a tensor (by if, .item() or the like), so others may go another way"
            ) from error
        except UntraceableError as error:
            self._steady(self._run(self.inputs).detach())  # a state may be the cause, and is the better reason
            raise self._refused(f"torch cannot trace it, so numbers may hide what it does: {error}") from error
        if own.random or other.random:
            raise self._refused("it draws random numbers (logits that start at random, or dropout)")
        if own.steps != other.steps:
            raise self._refused("it computes something else in training mode than in evaluation mode, as dropout does")
        if conditions:
            raise self._refused(f"its forward goes by the number B of samples: {' and '.join(conditions)}")
        if own.outside:
            raise self._refused(
                "its output depends on a tensor in a list, a mapping, an array or outside of it; make that a buffer"
            )
        self.thresholds |= dict.fromkeys(own.thresholds)
        return own.reads

    def _conditions(self) -> tuple[str, ...]:
        """The forward's conditions on the number of samples, if they change the operations."""
        lengths = {size for name in self.probe.places for size in self.probe.tensor(name).shape}
        for each in (self.inputs.u, *self.inputs.others):
            lengths |= set(each.shape[1:]) if isinstance(each, Tensor) else set()
        apart = self.inputs.batch(next(size for size in itertools.count(5) if size not in lengths))
        found = self.probe.trace(apart, symbolic=True).conditions
        # Code such as a loop over samples is traced for one number of samples but does the same for other numbers.
        named = {int(number) + more for each in found for number in re.findall(r"\d+", each) for more in (0, 1)}
        sizes = {2, 17, 64, 300, *(size for size in named if 1 < size <= BATCHES[-1])}
        several = (self.inputs, self.given.double(), *map(self.inputs.batch, sorted(sizes)))
        return found if found and len({_runs(self.probe.trace(each).steps) for each in several}) > 1 else ()

    def _steady(self, first: Tensor) -> None:
        """Refuses a layer unless equal numbers give equal results each time, in both modes and without gradients."""
        if not same(first, self._run(self.inputs)):
            raise self._refused("two calls on one input differ: it keeps a state")
        before = {name: place[key].clone() for name, (place, key) in self.probe.places.items()}
        with modes_swapped(self.probe.layer):
            if not same(first, self._run(self.inputs)):
                raise self._refused("it computes something else in training mode than in evaluation mode")
        changed = [name for name, value in before.items() if not same(self.probe.tensor(name), value)]
        self.probe.written = tuple(dict.fromkeys((*self.probe.written, *changed)))
        if not relative(self.probe(self.inputs, gradient=False).nan_to_num(), first.nan_to_num()) < SAME:
            raise self._refused("it computes something else under torch.no_grad")

    def _routed(self, weight: str | None, rest: list[str]) -> Identification | None:
        """The call without logits and bias, if this tensor is the weight; else None."""
        neutral = self.inputs.neutral()
        # A tensor of zeros that the layer multiplies by, such as a mask, would make the output 0: then try ones.
        for value in (0.0, 1.0):
            self.probe.set({name: torch.full_like(self.probe.true[name], value) for name in rest})
            output = self._run(neutral.scaled(NEAR_0)).detach()
            if output.any():
                break
        shape = () if weight is None else tuple(self.probe.true[weight].shape)
        for candidate in structures.calls(weight, shape, tuple(neutral.u.shape), tuple(output.shape)):
            total, v = self._sums(candidate, neutral.u), capsules(candidate, output)
            if v.shape[1] > 1 and off_direction(v.transpose(1, 2), total.transpose(1, 2)) < SAME_DIRECTION:
                self.over_outputs.append(candidate)
            off = off_direction(v, total)
            if off < SAME_DIRECTION:
                found = self._with_options(candidate, neutral, total)
                if found is not None:
                    return found
            else:
                self._missed(other_direction(v, total, off), candidate)
        self._random_again(rest)
        return None

    def _missed(self, why: tuple[float, str], candidate: Identification) -> None:
        if self.miss is None or why[0] > self.miss.rank:
            self.miss = Miss(*why, candidate)

    def _sums(self, candidate: Identification, u: Tensor) -> Tensor:
        """The sum of the votes of all input capsules, ``[B, J, D]``."""
        u, weight = self._product(candidate, u)
        if weight is None:
            return u.sum(1)
        if weight.shape[0] == 1:
            s = torch.einsum("jdk,bk->bjd", weight[0], u.sum(1))
        else:
            s = torch.einsum("ijdk,bik->bjd", weight, u)
        return s.expand(-1, candidate.sizes.J, -1)

    def _with_options(self, candidate: Identification, inputs: Inputs, total: Tensor) -> Identification | None:
        sizes = candidate.sizes
        length = float(total.square().sum(-1).mean().sqrt()) / sizes.J
        levels = [inputs.scaled(scale / length).spread() for scale in LENGTHS]
        sums = [self._sums(candidate, each.u) for each in levels]
        results = [capsules(candidate, self._run(each)).detach() for each in levels]
        inputs = self._moderate(candidate).neutral()
        output = self._run(inputs)
        fitting = fits(sums, results, sizes.I, sizes.J)
        for options in candidates.options(fitting):
            tried = replace(candidate, **options)
            if self._difference(tried, inputs, output) < SAME:
                return tried
        self._missed(no_options(sums, results, bool(fitting)), candidate)
        return None

    def _why_none(self, mattering: list[str]) -> str:
        depends = ", ".join(f"`{name}` {checks.shape_of(self.probe.true[name])}" for name in mattering)
        if self.miss is None:
            return (
                f"input {checks.shape_of(self.inputs.u)}, output {checks.shape_of(self._run(self.inputs))} and the "
                f"parameters that its output depends on ({depends or 'none'}) do not have the axes of one routing: "
                "[B, I, K] and a weight of I, J, D, K, or votes [B, I, J, D], to [B, J, D]"
            )
        candidate = self.miss.candidate
        inputs = self._moderate(candidate)
        output = self._run(inputs)
        if self.nearest is None:
            for options in candidates.options(
                [Fit(softmax, False, "paper", 1e-8) for softmax in ("out", "in")], most=4
            ):
                self._difference(replace(candidate, **options), inputs, output)
        if any(self._squashes_over_outputs(each, inputs, output) for each in self.over_outputs):
            return OVER_OUTPUTS
        more = f" (its output depends on {depends})" if len(mattering) > 1 else ""
        return self.miss.reason + more

    def _squashes_over_outputs(self, candidate: Identification, inputs: Inputs, output: Tensor) -> bool:
        u, weight = self._product(candidate, inputs.u)
        votes = u if weight is None else torch.einsum("ijdk,bik->bijd", weight.expand(u.shape[1], -1, -1, -1), u)
        votes = votes.expand(-1, -1, candidate.sizes.J, -1)
        return squashes_over_outputs(votes, capsules(candidate, output.detach()))

    def _with_parameters(self, found: Identification, mattering: list[str]) -> Identification:
        """Adds the roles of the tensors besides the weight, one after the other."""
        inputs = self._moderate(found).neutral()
        for name in mattering:
            if name == found.weight:
                continue
            self._random_again([name])
            output = self._run(inputs)
            self._start_anew(found, inputs, output)
            for each in candidates.roles(name, tuple(self.probe.true[name].shape), found):
                if self._difference(each, inputs, output) < SAME:
                    found = each
                    break
            else:
                raise self._refused(
                    f"its output depends on `{name}` {checks.shape_of(self.probe.true[name])}, which is neither "
                    "logits, nor a bias of the weighted sum"
                )
        return found

    def _with_arguments(self, found: Identification, reads: frozenset[str]) -> Identification:
        """Adds the roles of the further arguments of the forward."""
        for n in range(len(self.inputs.others)):
            inputs = self._moderate(found).neutral(but=(*range(n + 1),))
            output = self._run(inputs)
            self._start_anew(found, inputs, output)
            for role, order in self.inputs.roles(n, found.sizes._asdict(), f"argument {n + 2}" in reads):
                if found.averaged and (role == "mask_after" or (role == "mask" and found.softmax == "in")):
                    continue  # with averaged logits all samples must have the same softmax
                tried = replace(
                    found, arguments=(*found.arguments, role), argument_orders=(*found.argument_orders, order)
                )
                if self._difference(tried, inputs, output) < SAME and self._is_factor(tried, n, inputs):
                    found = tried
                    break
            else:
                raise self._refused(
                    f"its output depends on argument {n + 2} of the forward, which is no mask as capsfast has it"
                )
        return found

    def _is_factor(self, tried: Identification, n: int, inputs: Inputs) -> bool:
        """False if the role "mask_after" was tried for a mask of floats but its values don't act as factors."""
        mask = inputs.others[n]
        if tried.arguments[n] != "mask_after" or not mask.is_floating_point():
            return True
        changed = inputs.with_other(n, 0.7 * mask)
        return self._difference(tried, changed, self._run(changed)) < SAME

    def _start_anew(self, candidate: Identification, inputs: Inputs, output: Tensor) -> None:
        """Forgets the nearest call, because differences on new numbers can't be compared with earlier ones."""
        self.nearest = None
        self._difference(candidate, inputs, output)

    def _with_coupling(self, found: Identification, reads: frozenset[str]) -> tuple[Identification, frozenset[str]]:
        """Adds the index of the last coupling in the layer's tuple, if it is there, and the tensors it depends on."""
        outputs = self.probe.outputs(inputs := self._moderate(found))
        if not isinstance(outputs, tuple) or self.probe.part is None:
            return found, reads
        _, c = found.with_coupling(self.probe.tensors(), inputs.u, *inputs.others, backend=self._backend(inputs))
        known = {**found.sizes._asdict(), "B": self.B}
        for part, value in enumerate(outputs):
            if part == self.probe.part or not isinstance(value, Tensor):
                continue
            for order, _ in orders(tuple(value.shape), "BIJ", known):
                if relative(follow(c, steps_to(order, "BIJ")), value.detach()) < SAME:
                    return replace(found, coupling=part, coupling_order=order), reads | self._traced(part)
        return found, reads


def _runs(steps: tuple[str, ...]) -> tuple[str, ...]:
    """The steps without repetitions, so that a loop over samples counts once."""
    return tuple(step for step, _ in itertools.groupby(steps))
