"""Whether a call that computes what a layer computes on random numbers does so on others, gradients included."""

from dataclasses import replace

import torch
from torch import Tensor

from .. import checks
from . import values
from .identification import Identification
from .idle import argument_that_matters, tensor_that_matters
from .inputs import Inputs
from .probe import modes_swapped
from .trial import Trial, relative

# Of inputs that are short and long, on which a layer that clamps or looks at them shows.
FACTORS = (1e-2, 30.0)
# Numbers in the votes of u that are compared.
QUICK = 2**20


class Proof(Trial):
    """Of the call that was found: its gradient, what it leaves out, and other numbers."""

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
            if role.endswith("mask"):
                self._note_mask(found, n, inputs)

    def _note_mask(self, found: Identification, n: int, inputs: Inputs) -> None:
        """What the call computes for a mask, and the layer perhaps does not."""

        def differs(mask: Tensor) -> bool:
            changed = inputs.with_other(n, mask)
            output = self._run(changed).detach()
            difference = relative(self._evaluate(found, changed).detach(), output)
            return bool(output.isfinite().all()) and not difference < self.same

        mask = inputs.others[n]
        if mask.dtype != torch.bool and any(map(differs, values.truths(mask))):
            self.notes.append(
                f"argument {n + 2} is a mask of 0 and 1 alone: the layer computes something else for other numbers, "
                "the call takes them for 1"
            )
        if differs(torch.zeros_like(mask)):
            self.notes.append(
                f"for a sample whose mask, argument {n + 2}, is 0 everywhere, the layer computes something else than "
                "the call"
            )

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
