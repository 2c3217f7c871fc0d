"""The options under which capsfast computes what a layer computes, found by trying."""

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from .. import checks
from . import candidates, structures, values
from .identification import Identification
from .idle import argument_that_matters, same, tensor_that_matters
from .inputs import Draw, Inputs
from .misses import SAME_DIRECTION, Miss, no_options, off_direction, other_direction
from .orders import follow, steps_from
from .probe import Call, Probe, modes_swapped, other_random_numbers
from .refusal import NotReproduced
from .squashes import Fit, fits

OP = "capsfast.identify"
# Relative differences of what is equal; second, with the layer's own numbers: a squash that is saturated loses digits.
SAME = {torch.float64: (1e-10, 1e-8), torch.float32: (1e-5, 1e-3)}
# Of u, so that all coupling is equal; and lengths of weighted sums, one that shows eps and one that shows the coupling.
NEAR_0 = 1e-5
LENGTHS = (3e-5, 1e-2)
VOTE_LENGTH = 1.5
# Of inputs that are short and long, on which a layer that clamps or looks at them shows.
FACTORS = (1e-2, 30.0)
# Numbers in the votes of u that are compared.
QUICK = 2**20


class Float64Error(Exception):
    """The forward makes tensors of another dtype."""


class Search:
    def __init__(
        self, layer: nn.Module, real: Inputs, call: Call | None, output: Call | None, dtype: torch.dtype
    ) -> None:
        self.name = type(layer).__name__
        self.nearest: tuple[float, Identification] | None = None
        self.miss: Miss | None = None
        self.notes: list[str] = []
        self.draw = Draw(real.u.device)
        self.same, self.same_on_real = SAME[dtype]
        self.real, self.probe = self._copied(layer, real, call, output, dtype)
        self.given = replace(real, sized=self.real.sized)
        self.inputs = self.real.to(dtype)
        self.B = self.inputs.u.shape[0]

    def _copied(
        self, layer: nn.Module, real: Inputs, call: Call | None, output: Call | None, dtype: torch.dtype
    ) -> tuple[Inputs, Probe]:
        """A few samples are enough, unless the layer takes no other number than that of u."""
        failed: Exception | None = None
        for inputs in (real.few(), replace(real, sized=True).few(), real):
            try:
                return inputs, Probe(layer, call, output, inputs.u, inputs.others, dtype)
            except Exception as error:  # noqa: PERF203
                failed = error
        reason = f"a copy of it fails on u, with {type(failed).__name__}: {failed}"
        raise self._refused(reason) from failed

    def _refused(self, reason: str) -> NotReproduced:
        difference, nearest = self.nearest or (None, None)
        return NotReproduced(OP, self.name, reason, nearest, difference)

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

    # What a layer is run on.

    def _run(self, inputs: Inputs) -> Tensor:
        try:
            return self.probe(inputs.u, *inputs.others)
        except Exception as error:
            raise self._refused(f"it fails on random numbers, with {type(error).__name__}: {error}") from error

    def _random(self) -> None:
        """Numbers of which no two are alike, for what can be set."""
        values = {name: self.draw(value, 0.3) for name, value in self.probe.true.items()}
        self.probe.set(values)
        self.inputs = self.inputs.random(self.draw)

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

    # Candidates.

    def _evaluate(self, candidate: Identification, inputs: Inputs) -> Tensor:
        if candidate.share_batch_logits:
            return candidates.averaged(candidate, self.probe.tensors(), inputs.u, *inputs.others)
        backend = None if inputs.u.device.type == "cpu" else "reference"
        return candidate(self.probe.tensors(), inputs.u, *inputs.others, backend=backend)

    def _difference(self, candidate: Identification, inputs: Inputs, output: Tensor) -> float:
        difference = relative(self._evaluate(candidate, inputs).detach(), output.detach())
        if self.nearest is None or difference < self.nearest[0]:
            self.nearest = (difference, candidate)
        return difference

    def _start_anew(self, candidate: Identification, inputs: Inputs, output: Tensor) -> None:
        """Differences on other numbers are not to be compared with those so far."""
        self.nearest = None
        self._difference(candidate, inputs, output)

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

    def _random_again(self, names: list[str]) -> None:
        self.probe.set({name: self.draw(self.probe.true[name], 0.3) for name in names})

    def _product(self, candidate: Identification, u: Tensor) -> tuple[Tensor, Tensor | None]:
        tensors, _ = candidate.arguments_of_call(
            {name: value.detach() for name, value in self.probe.tensors().items()}, u
        )
        return tensors[0], tensors[1] if len(tensors) > 1 else None

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

    def _vote_length(self, candidate: Identification, u: Tensor) -> float:
        u, weight = self._product(candidate, u[:1])
        if weight is not None:
            weight = weight.expand(u.shape[1], -1, -1, -1)
            u = torch.einsum("ijdk,bik->bijd", weight, u)
        return float(u.square().sum(-1).mean().sqrt())

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

    def _moderate(self, candidate: Identification) -> Inputs:
        return self.inputs.scaled(VOTE_LENGTH / self._vote_length(candidate, self.inputs.u))

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

    def _check_idle(self, found: Identification) -> None:
        """Whether it depends on nothing that the call does not read, for other numbers than those that are there."""
        inputs = self._moderate(found)
        name = tensor_that_matters(self.probe, inputs, found)
        if name is not None:
            raise self._refused(
                f"with other numbers in `{name}`, which the call does not read, its output is another one"
            )
        n = argument_that_matters(self.probe, inputs, found)
        if n is not None:
            raise self._refused(
                f"with other values of argument {n + 2} of the forward, which the call does not read, its output is "
                "another one"
            )
        for n, role in enumerate(found.arguments):
            mask = inputs.others[n]
            if role.endswith("mask") and mask.dtype != torch.bool:
                for other in values.truths(mask):
                    changed = inputs.with_other(n, other)
                    if not relative(self._evaluate(found, changed).detach(), self._run(changed).detach()) < self.same:
                        self.notes.append(
                            f"argument {n + 2} is a mask of 0 and 1 alone: the layer computes something else for other "
                            "numbers, the call takes them for 1"
                        )
                        break

    def _with_gradient(self, found: Identification) -> Identification:
        inputs = self._moderate(found)
        differences = {}
        for gradient in ("full", "last"):
            tried = replace(found, gradient=gradient)
            difference = self._gradient_difference(tried, inputs)
            if difference < self.same:
                self._check_gradient_of_other_mode(tried, inputs)
                return replace(tried, gradient_difference=difference)
            differences[difference] = tried
        nearest = min(differences)
        self.nearest = nearest, differences[nearest]
        raise self._refused(
            "its values are those of the call, but its gradient goes neither through all iterations nor through the "
            "last one alone"
        )

    def _check_gradient_of_other_mode(self, found: Identification, inputs: Inputs) -> None:
        with modes_swapped(self.probe.layer):
            difference = self._gradient_difference(found, inputs)
        if not difference < self.same:
            self.nearest = difference, found
            raise self._refused("its gradient in training mode is another one than in evaluation mode")

    def _gradient_difference(self, candidate: Identification, inputs: Inputs) -> float:
        inputs = replace(inputs, u=inputs.u.detach().requires_grad_())
        leaves = [inputs.u, *self.probe.leaves(candidate.names)]
        theirs = self._run(inputs)
        direction = self.draw(theirs)
        wanted = _gradients(theirs, leaves, direction)
        got = _gradients(self._evaluate(candidate, inputs), leaves, direction)
        return max(relative(mine, right) for mine, right in zip(got, wanted, strict=True))

    def _verified(self, found: Identification) -> Identification:
        """With its own numbers, on u, and on a single sample."""
        moderate = self._moderate(found)
        forward = [self._difference(found, moderate, self._run(moderate))]
        gradient = [found.gradient_difference]
        self.probe.set(self.probe.true)
        real = self._of_given(found)
        output = self._run(real)
        if bool(output.isfinite().all()):
            forward.append(self._real_difference(found, real, output))
            gradient.append(self._gradient_difference(found, real))
        else:
            self.notes.append("on u the layer gives numbers that are not finite, so only random ones were compared")
        self._of_one_sample(found, real)
        if self.probe.dtype == torch.float64:
            # In float32 the rounding of saturated numbers is too large.
            self._check_variations(found, real, "u")
        self._random_again([*self.probe.names])
        moderate = self._moderate(found)
        self._check_variations(found, moderate, "random numbers")
        if found.weight in self.probe.settable:
            self.probe.set({found.weight: FACTORS[-1] * self.probe.tensor(found.weight).detach()})
            if not self._difference(found, moderate, self._run(moderate)) < self.same_on_real:
                raise self._refused(f"with weights {FACTORS[-1]:g} times as large it computes something else")
        if not gradient[-1] < self.same_on_real:
            self.nearest = gradient[-1], found
            raise self._refused("with its own parameters and on u its gradient is another one than on random numbers")
        return replace(
            found,
            part=self.probe.part,
            forward_difference=max(forward),
            gradient_difference=max(gradient),
            notes=tuple(self.notes),
        )

    def _check_variations(self, found: Identification, inputs: Inputs, source: str) -> None:
        """Whether it also holds for short and long inputs, and where some input capsules are 0."""
        axes = "BIJD" if found.weight is None else "BIK"
        variations = [
            ("some input capsules 0", inputs.with_zeros(found.input_order, axes, found.sizes._asdict())),
            *((f"inputs {factor:g} times as long", inputs.scaled(factor)) for factor in FACTORS),
        ]
        for words, changed in variations:
            output = self._run(changed).detach()
            difference = relative(self._evaluate(found, changed).detach(), output)
            if not bool(output.isfinite().all()):
                if source != "u":
                    self.notes.append(f"on {source} with {words} the layer gives numbers that are not finite")
            elif not difference < self.same_on_real:
                self.nearest = difference, found
                raise self._refused(f"on {source} with {words} it computes something else")

    def _of_given(self, found: Identification) -> Inputs:
        """As many samples of u as are quick to run, and at least those that were."""
        if "B" in found.logits_order:
            return self.real.to(self.probe.dtype)
        sizes = found.sizes
        quick = QUICK // (sizes.I * sizes.J * sizes.D)
        return self.given.batch(max(self.B, min(self.given.u.shape[0], quick))).to(self.probe.dtype)

    def _real_difference(self, found: Identification, real: Inputs, output: Tensor) -> float:
        difference = relative(self._evaluate(found, real).detach(), output.detach())
        if not difference < self.same_on_real:
            self.nearest = difference, found
            raise self._refused("with its own parameters and on u it computes something else than on random numbers")
        return difference

    def _of_one_sample(self, found: Identification, real: Inputs) -> None:
        if "B" in found.logits_order:
            self.notes.append(f"`{found.logits}` fixes the batch size at {self.B}")
            return
        one = real.batch(1)
        try:
            output = self.probe(one.u, *one.others)
        except Exception as error:
            self.notes.append(f"the layer fails on a single sample, with {type(error).__name__}")
            return
        ours = self._evaluate(found, one)
        if ours.shape != output.shape:
            self.notes.append(
                f"for a single sample the layer gives {checks.shape_of(output)}, the call {checks.shape_of(ours)}"
            )
        elif bool(output.isfinite().all()):
            self._real_difference(found, one, output)


def capsules(candidate: Identification, output: Tensor) -> Tensor:
    """The output of a layer as ``[B, J, D]``."""
    return follow(output, steps_from(candidate.output_order, "BJD", candidate.sizes._asdict()))


def relative(found: Tensor, right: Tensor) -> float:
    if found.shape != right.shape:
        return float("inf")
    difference = float((found - right).norm())
    return difference / max(float(right.norm()), 1e-300) if difference else 0.0


def _gradients(output: Tensor, leaves: list[Tensor], direction: Tensor) -> list[Tensor]:
    if not output.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad((output * direction).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if each is None else each for each, leaf in zip(found, leaves, strict=True)]
