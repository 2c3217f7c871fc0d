"""Runs a layer and calls of capsfast on the same numbers."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from .identification import Identification
from .inputs import Draw, Inputs
from .orders import follow, steps_from
from .probe import Probe, Run
from .refusal import NotReproduced

OP = "capsfast.identify"
# Largest relative differences that count as equal; the second for own parameters and u: saturation costs digits.
SAME, SAME_ON_REAL = 1e-10, 1e-8
VOTE_LENGTH = 1.5
# A tensor with no larger number counts as 0.
TINY = 1e-30


class Trial:
    """The probe of a layer, its inputs, and the nearest call so far.

    Attributes:
        fixed: whether the layer takes only the number of samples in u.
        notes: observations in words. doubts: observations of differences between layer and call.
        single: whether layer and call agree for one sample.
    """

    def __init__(self, layer: nn.Module, real: Inputs, run: Run | None, output: Run | None) -> None:
        self.name = type(layer).__name__
        self.nearest: tuple[float, Identification] | None = None
        self.notes: list[str] = []
        self.doubts: list[str] = []
        self.single = True
        self.draw = Draw(real.u.device)
        self.real, self.probe = self._copied(layer, real, run, output)
        self.fixed = self.real.u.shape[0] == real.u.shape[0]
        self.given = replace(real, sized=self.real.sized)
        self.inputs = self.real.double()
        self.B = self.inputs.u.shape[0]

    def _copied(self, layer: nn.Module, real: Inputs, run: Run | None, output: Run | None) -> tuple[Inputs, Probe]:
        """A few samples of u and a probe that ran on them; all samples if the layer takes no other number."""
        failed: Exception | None = None
        for inputs in (real.few(), replace(real, sized=True).few(), real):
            try:
                return inputs, Probe(layer, run, output, inputs)
            except Exception as error:  # noqa: PERF203
                failed = error
        raise self._refused(f"a float64 copy of it fails on u, with {type(failed).__name__}: {failed}") from failed

    def _refused(self, reason: str) -> NotReproduced:
        difference, nearest = self.nearest or (None, None)
        return NotReproduced(OP, self.name, reason, nearest, difference)

    def _run(self, inputs: Inputs) -> Tensor:
        try:
            return self.probe(inputs)
        except Exception as error:
            raise self._refused(f"it fails on random numbers, with {type(error).__name__}: {error}") from error

    def _random(self) -> None:
        """Sets random numbers, no two alike, wherever the layer allows it."""
        values = {name: self.draw(value, 0.3) for name, value in self.probe.true.items()}
        self.probe.set(values)
        self.inputs = self.inputs.random(self.draw)

    def _random_again(self, names: list[str]) -> None:
        self.probe.set({name: self.draw(self.probe.true[name], 0.3) for name in names})

    def _product(self, candidate: Identification, u: Tensor) -> tuple[Tensor, Tensor | None]:
        tensors, _ = candidate.arguments_of_call(
            {name: value.detach() for name, value in self.probe.tensors().items()}, u
        )
        return tensors[0], tensors[1] if len(tensors) > 1 else None

    def _vote_length(self, candidate: Identification, u: Tensor) -> float:
        u, weight = self._product(candidate, u[:1])
        if weight is not None:
            weight = weight.expand(u.shape[1], -1, -1, -1)
            u = torch.einsum("ijdk,bik->bijd", weight, u)
        return float(u.square().sum(-1).mean().sqrt())

    def _moderate(self, candidate: Identification) -> Inputs:
        return self.inputs.scaled(VOTE_LENGTH / self._vote_length(candidate, self.inputs.u))

    def _evaluate(self, candidate: Identification, inputs: Inputs) -> Tensor:
        return candidate(self.probe.tensors(), inputs.u, *inputs.others, backend=self._backend(inputs))

    def _backend(self, inputs: Inputs) -> str | None:
        return None if inputs.u.device.type == "cpu" else "reference"

    def _difference(self, candidate: Identification, inputs: Inputs, output: Tensor) -> float:
        difference = relative(self._evaluate(candidate, inputs).detach(), output.detach())
        if self.nearest is None or difference < self.nearest[0]:
            self.nearest = (difference, candidate)
        return difference

    def _gradient_difference(self, candidate: Identification, inputs: Inputs) -> float:
        inputs = replace(inputs, u=inputs.u.detach().requires_grad_())
        leaves = [inputs.u, *self.probe.leaves(candidate.names)]
        theirs = self._run(inputs)
        direction = self.draw(theirs)
        wanted = _gradients(theirs, leaves, direction)
        got = _gradients(self._evaluate(candidate, inputs), leaves, direction)
        return max(relative(mine, right) for mine, right in zip(got, wanted, strict=True))


def capsules(candidate: Identification, output: Tensor) -> Tensor:
    """The output of a layer as ``[B, J, D]``."""
    return follow(output, steps_from(candidate.output_order, "BJD", candidate.sizes._asdict()))


def relative(one: Tensor, other: Tensor) -> float:
    """The largest difference over the largest number in ``other``; infinite if a number is not finite."""
    if one.shape != other.shape:
        return float("inf")
    if one.numel() == 0:
        return 0.0
    one, other = one.detach().double(), other.detach().double()
    found = float((one - other).abs().max() / other.abs().max().clamp_min(TINY))
    return found if found == found else float("inf")


def _gradients(output: Tensor, leaves: list[Tensor], direction: Tensor) -> list[Tensor]:
    if not output.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad((output * direction).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if each is None else each for each, leaf in zip(found, leaves, strict=True)]
