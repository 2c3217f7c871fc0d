"""The options under which capsfast computes what a layer computes, found by trying."""

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from .. import checks
from . import candidates, structures
from .identification import Identification
from .idle import same
from .inputs import Inputs
from .misses import SAME_DIRECTION, Miss, no_options, off_direction, other_direction
from .probe import modes_swapped, other_random_numbers
from .proof import Proof
from .squashes import Fit, fits
from .trial import capsules, relative

# Of u, so that all coupling is equal; and lengths of weighted sums, one that shows eps and one that shows the coupling.
NEAR_0 = 1e-5
LENGTHS = (3e-5, 1e-2)


class Float64Error(Exception):
    """The forward makes tensors of another dtype."""


class Search(Proof):
    miss: Miss | None = None

    def result(self) -> Identification:
        self._steady()
        if self.probe.dtype != torch.float64:
            self.notes.append("compared in float32, in which it computes whatever it is given; eps may be another one")
        if self.probe.hooked:
            self.notes.append("the layer has forward or backward hooks, which the call leaves out")
        if self.probe.built:
            self.notes.append(f"the first forward makes {', '.join(self.probe.built)}")
        self._random()
        output = self._run(replace(self.inputs, u=self.inputs.u.clone().requires_grad_()))
        if not output.requires_grad:
            raise self._refused("its output has no gradient, as under torch.no_grad")
        mattering = [name for name in self.probe.names if self._matters(name)]
        routed = None
        for weight in [*sorted(mattering, key=lambda name: -self.probe.true[name].numel()), None]:
            routed = self._routed(weight, [name for name in mattering if name != weight])
            if routed is not None:
                break
        if routed is None:
            raise self._refused(self._why_none(mattering))
        found = self._with_arguments(self._with_parameters(routed, mattering))
        found = self._with_gradient(found)
        self._check_idle(found)
        return self._verified(found)

    def _steady(self) -> None:
        """Whether a result depends on the parameters and the input alone."""
        try:
            first = self.probe(self.inputs.u, *self.inputs.others)
            with other_random_numbers(self.inputs.u.device) if self.probe.draws else nullcontext():
                again = self.probe(self.inputs.u, *self.inputs.others)
        except Exception as error:
            if self.probe.dtype == torch.float64:
                raise Float64Error from error
            raise self._refused(f"its forward fails, with {type(error).__name__}: {error}") from error
        if first.dim() < 2 or not first.is_floating_point():
            raise self._refused(f"its output {checks.shape_of(first)} holds no capsules [B, J, D]")
        if not same(first, again):
            if self.probe.draws:
                raise self._refused(
                    "it draws random numbers (logits that start at random, or dropout): two calls on one input differ"
                )
            raise self._refused("two calls on one input differ: it keeps a state")
        with modes_swapped(self.probe.layer):
            try:
                other = self.probe(self.inputs.u, *self.inputs.others)
            except Exception as error:
                mode = "training" if not self.probe.layer.training else "evaluation"
                raise self._refused(f"it fails in {mode} mode, with {type(error).__name__}: {error}") from error
        without = self.probe(self.inputs.u, *self.inputs.others, gradient=False)
        if not relative(without.nan_to_num(), first.detach().nan_to_num()) < self.same:
            raise self._refused("it computes something else under torch.no_grad")
        if not same(first, other):
            raise self._refused("it computes something else in training mode than in evaluation mode, as dropout does")
        changed = [name for name, value in self.probe.true.items() if not same(self.probe.tensor(name), value)]
        changed += [name for name, value in self.probe.others.items() if not same(value, self.probe.other_true[name])]
        if changed:
            self.probe.set(self.probe.true)
            self.notes.append(f"its forward changes {', '.join(changed)}, the call does not")

    def _matters(self, name: str) -> bool:
        if name not in self.probe.settable:
            # A parametrized one: what its own parameters are differs by kind, so it is taken to matter.
            return True
        value = self.probe.tensor(name).detach().clone()
        # A forward may keep its output, and this may be the tensor that is set.
        before = self._run(self.inputs).detach().clone()
        self.probe.set({name: self.draw(value, 0.3)})
        after = self._run(self.inputs)
        self.probe.set({name: value})
        return not same(before, after)

    def _routed(self, weight: str | None, rest: list[str]) -> Identification | None:
        """The options without logits and bias, if this is the weight."""
        neutral = self.inputs.neutral()
        # What a layer multiplies by, such as a mask, takes its output away where it is 0.
        for value in (0.0, 1.0):
            self.probe.set({name: torch.full_like(self.probe.true[name], value) for name in rest})
            output = self._run(neutral.scaled(NEAR_0)).detach()
            if output.any():
                break
        shapes = tuple(neutral.u.shape), tuple(output.shape)
        if weight is None:
            possible = structures.of_votes(*shapes)
        else:
            possible = structures.with_weight(weight, tuple(self.probe.true[weight].shape), *shapes)
        for candidate in possible:
            total, v = self._sums(candidate, neutral.u), capsules(candidate, output)
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
            if self._difference(tried, inputs, output) < self.same:
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
        if self.nearest is None:
            inputs = self._moderate(candidate)
            output = self._run(inputs)
            for options in candidates.options(
                [Fit(softmax, False, "paper", 1e-8) for softmax in ("out", "in")], most=4
            ):
                self._difference(replace(candidate, **options), inputs, output)
        more = f" (its output depends on {depends})" if len(mattering) > 1 else ""
        return self.miss.reason + more

    def _with_parameters(self, found: Identification, mattering: list[str]) -> Identification:
        """With the roles of the tensors besides the weight, one after the other."""
        inputs = self._moderate(found).neutral()
        for name in mattering:
            if name == found.weight:
                continue
            self._random_again([name])
            output = self._run(inputs)
            self._start_anew(found, inputs, output)
            for each in candidates.roles(name, tuple(self.probe.true[name].shape), found, self.B):
                if self._difference(each, inputs, output) < self.same:
                    found = each
                    break
            else:
                raise self._refused(
                    f"its output depends on `{name}` {checks.shape_of(self.probe.true[name])}, which is neither "
                    "logits, nor a bias of the weighted sum"
                )
        return found

    def _with_arguments(self, found: Identification) -> Identification:
        """With the roles of the further arguments of the forward."""
        for n in range(len(self.inputs.others)):
            inputs = self._moderate(found).neutral(but=(*range(n + 1),))
            output = self._run(inputs)
            self._start_anew(found, inputs, output)
            for role, order in self.inputs.roles(n, found.sizes._asdict()):
                if found.averaged and (role == "out_mask" or (role == "mask" and found.softmax == "in")):
                    continue  # the samples, whose logits are averaged, would have softmaxes of their own
                tried = replace(
                    found, arguments=(*found.arguments, role), argument_orders=(*found.argument_orders, order)
                )
                if self._difference(tried, inputs, output) < self.same:
                    found = tried
                    break
            else:
                raise self._refused(
                    f"its output depends on argument {n + 2} of the forward, which is neither a mask nor logits as "
                    "capsfast has them"
                )
        return found

    def _start_anew(self, candidate: Identification, inputs: Inputs, output: Tensor) -> None:
        """Differences on other numbers are not to be compared with those so far."""
        self.nearest = None
        self._difference(candidate, inputs, output)
