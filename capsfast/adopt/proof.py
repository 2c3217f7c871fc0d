"""Checks a call that agrees with a layer on random numbers: on other numbers, and its gradients."""

from dataclasses import replace

import torch
from torch import Tensor

from .. import checks
from .identification import Identification
from .inputs import Inputs
from .trial import SAME, SAME_ON_REAL, Trial, relative

# Largest number of entries in the votes with which a call is compared on u.
QUICK = 2**20


class Proof(Trial):
    """Checks the call that was found: its gradient, its masks, other numbers, a single sample."""

    def _with_gradient(self, found: Identification) -> Identification:
        inputs = self._moderate(found)
        differences = {}
        for gradient in ("full", "last"):
            tried = replace(found, gradient=gradient)
            difference = self._gradient_difference(tried, inputs)
            if difference < SAME:
                for n, role in enumerate(found.arguments):
                    if "mask" in role:
                        self._doubt_mask(tried, n, inputs)
                return replace(tried, gradient_difference=difference)
            differences[difference] = tried
        nearest = min(differences)
        self.nearest = nearest, differences[nearest]
        raise self._refused(
            "its values are as in the call, but its gradient goes neither through all iterations nor through the "
            "last one alone"
        )

    def _doubt_mask(self, found: Identification, n: int, inputs: Inputs) -> None:
        """Records a doubt if layer and call differ for masks of other numbers, or of zeros only."""

        def differs(mask: Tensor) -> bool:
            changed = inputs.with_other(n, mask)
            output = self._run(changed).detach()
            difference = relative(self._evaluate(found, changed).detach(), output)
            return bool(output.isfinite().all()) and not difference < SAME

        mask = inputs.others[n]
        others = () if mask.dtype == torch.bool else (number * mask for number in (2, -1, 0.3))
        if any(
            differs(other.to(mask.dtype)) for other in others if mask.is_floating_point() or other.dtype == mask.dtype
        ):
            self.doubts.append(
                f"argument {n + 2} is a mask of 0 and 1 alone: the layer computes something else for other numbers, "
                "the call takes them for 1"
            )
        if differs(torch.zeros_like(mask)):
            self.doubts.append(
                f"for a sample whose mask, argument {n + 2}, is 0 everywhere, the layer computes something else than "
                "the call"
            )

    def _verified(self, found: Identification) -> Identification:
        """Compares with the layer's own parameters on u, and on a single sample."""
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
        self._random_again([*self.probe.names])
        self._check_special(found)
        if not gradient[-1] < SAME_ON_REAL:
            self.nearest = gradient[-1], found
            raise self._refused("with its parameters and on u it has a different gradient than on random numbers")
        return replace(
            found,
            part=self.probe.part,
            forward_difference=max(forward),
            gradient_difference=max(gradient),
            notes=(*self.notes, *self.doubts),
        )

    def _check_special(self, found: Identification) -> None:
        """Checks that layer and call agree if some input capsules are 0, or a whole sample is 0, infinite or NaN."""
        inputs = self._moderate(found)
        axes = "BIJD" if found.weight is None else "BIK"
        first = torch.zeros_like(inputs.u, dtype=torch.bool)
        first[0] = True
        variations = {"some input capsules 0": inputs.with_zeros(found.input_order, axes, found.sizes._asdict())}
        for words, number in (("0", 0.0), ("NaN", float("nan")), ("infinite", float("inf"))):
            variations[f"a sample that is {words}"] = replace(inputs, u=inputs.u.masked_fill(first, number))
        for words, changed in variations.items():
            output, ours = self._run(changed).detach(), self._evaluate(found, changed).detach()
            finite = output.isfinite()
            if not relative(ours[finite], output[finite]) < SAME_ON_REAL:
                raise self._refused(f"with {words} it computes something else")
            if not bool(changed.u.isfinite().all()) and bool((ours.isfinite() & ~finite).any()):
                raise self._refused(f"with {words} it gives numbers that are not finite, and the call does not")

    def _of_given(self, found: Identification) -> Inputs:
        """As many samples of u as run quickly, but at least self.B."""
        sizes = found.sizes
        quick = QUICK // (sizes.I * sizes.J * sizes.D)
        return self.given.batch(max(self.B, min(self.given.u.shape[0], quick))).double()

    def _real_difference(self, found: Identification, real: Inputs, output: Tensor) -> float:
        difference = relative(self._evaluate(found, real).detach(), output.detach())
        if not difference < SAME_ON_REAL:
            self.nearest = difference, found
            raise self._refused("with its parameters and on u it computes a different result than on random numbers")
        return difference

    def _of_one_sample(self, found: Identification, real: Inputs) -> None:
        one = real.batch(1)
        try:
            output = self.probe(one)
        except Exception as error:
            self.single = False
            self.notes.append(f"the layer fails on a single sample, with {type(error).__name__}")
            return
        ours = self._evaluate(found, one)
        if ours.shape != output.shape:
            self.single = False
            self.notes.append(
                f"for a single sample the layer gives {checks.shape_of(output)}, the call {checks.shape_of(ours)}"
            )
        elif bool(output.isfinite().all()):
            self._real_difference(found, one, output)
