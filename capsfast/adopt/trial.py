"""Runs a layer and calls of capsfast on the same numbers."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from .identification import Identification
from .inputs import Draw, Inputs
from .orders import follow, steps_from
from .probe import Probe, Run

OP = "capsfast.identify"
# Largest relative differences that count as equal. The second is for the layer's own parameters and u, where saturation
# costs digits.
SAME, SAME_ON_REAL = 1e-10, 1e-8
VOTE_LENGTH = 1.5
# A tensor with no larger number counts as 0.
TINY = 1e-30


class NotReproduced(ValueError):  # noqa: N818
    """No options of capsfast compute what the layer computes.

    Attributes:
        reason: the reason in words, without the name of the layer.
        nearest: the call that came nearest, None if no call could be tried.
        difference: the relative difference of its values or gradients from the layer's; None without a nearest call.
    """

    def __init__(
        self, op: str, layer: str, reason: str, nearest: Identification | None = None, difference: float | None = None
    ) -> None:
        self.reason, self.nearest, self.difference = reason, nearest, difference
        text = f"{op}: {layer} is not reproduced: {reason}"
        if nearest is not None:
            call = nearest.code().replace("\n", "; ")
            text += f". The nearest call differs by {difference:.1e} (relative): {call}"
        super().__init__(text)


class Trial:
    """The probe of a layer, its inputs, and the nearest call so far.

    Attributes:
        given: u and the further arguments of the caller. inputs: a few samples, in float64.
        fixed: whether the layer takes only the number of samples in u.
    """

    def __init__(self, layer: nn.Module, given: Inputs, run: Run | None, output: Run | None) -> None:
        self.name = type(layer).__name__
        self.nearest: tuple[float, Identification] | None = None
        self.draw = Draw(given.u.device)
        real, self.probe = self._copied(layer, given, run, output)
        self.fixed = real.u.shape[0] == given.u.shape[0]
        self.given = replace(given, sized=real.sized)
        self.inputs = real.double()
        self.B = self.inputs.u.shape[0]

    def _copied(self, layer: nn.Module, given: Inputs, run: Run | None, output: Run | None) -> tuple[Inputs, Probe]:
        """A few samples of u and a probe that ran on them; all samples if the layer takes no other number."""
        failed: Exception | None = None
        for inputs in (given.few(), replace(given, sized=True).few(), given):
            try:
                return inputs, Probe(layer, run, output, inputs)
            except Exception as error:  # noqa: PERF203
                failed = error
        raise self.refused(f"a float64 copy of it fails on u, with {type(failed).__name__}: {failed}") from failed

    def refused(self, reason: str) -> NotReproduced:
        difference, nearest = self.nearest or (None, None)
        return NotReproduced(OP, self.name, reason, nearest, difference)

    def run(self, inputs: Inputs) -> Tensor:
        try:
            return self.probe(inputs)
        except Exception as error:
            raise self.refused(f"it fails on random numbers, with {type(error).__name__}: {error}") from error

    def draw_again(self, names: Iterable[str]) -> None:
        """Sets these tensors of the layer to random numbers, no two alike."""
        self.probe.set({name: self.draw(self.probe.true[name], 0.3) for name in names})

    def votes(self, candidate: Identification, u: Tensor) -> Tensor:
        """The votes ``[B, I, J, D]`` if the candidate is right about the axes."""
        (u, *weights), _ = candidate.arguments_of_call(
            {name: value.detach() for name, value in self.probe.tensors().items()}, u
        )
        for weight in weights:
            u = torch.einsum("ijdk,bik->bijd", weight.expand(u.shape[1], -1, -1, -1), u)
        return u.expand(-1, -1, candidate.sizes.J, -1)

    def moderate(self, candidate: Identification) -> Inputs:
        """The inputs, scaled so that the coupling is neither equal nor saturated."""
        length = self.votes(candidate, self.inputs.u[:1]).square().sum(-1).mean().sqrt()
        return self.inputs.scaled(VOTE_LENGTH / float(length))

    def evaluate(self, candidate: Identification, inputs: Inputs) -> Tensor:
        return candidate(self.probe.tensors(), inputs.u, *inputs.others, backend=backend_for(inputs))

    def difference(self, candidate: Identification, inputs: Inputs, output: Tensor) -> float:
        difference = relative(self.evaluate(candidate, inputs), output)
        if self.nearest is None or difference < self.nearest[0]:
            self.nearest = (difference, candidate)
        return difference

    def gradient_difference(self, candidate: Identification, inputs: Inputs) -> float:
        inputs = replace(inputs, u=inputs.u.detach().requires_grad_())
        # A hook such as torch.nn.utils.weight_norm computes a tensor from parameters. The probe has no hooks, so this
        # tensor is a leaf there.
        read = (self.probe.tensor(name) for name in candidate.names)
        computed = [tensor.requires_grad_() for tensor in read if tensor.is_leaf and tensor.is_floating_point()]
        parameters = [parameter for parameter in self.probe.layer.parameters() if parameter.requires_grad]
        leaves = [*dict.fromkeys([inputs.u, *parameters, *computed])]
        own = self.probe.results(inputs, candidate.entries)
        ours = candidate.results(self.probe.tensors(), inputs.u, *inputs.others, backend=backend_for(inputs))
        directions = list(map(self.draw, own))
        gradients = []
        for results in (own, ours):
            # A coupling may have none: it is detached, or there is one iteration.
            ends = [(tensor, way) for tensor, way in zip(results, directions, strict=True) if tensor.requires_grad]
            outputs, ways = zip(*ends, strict=True)
            gradients.append(torch.autograd.grad(outputs, leaves, ways, allow_unused=True, materialize_grads=True))
        wanted, got = gradients
        return max(relative(of_layer, right) for of_layer, right in zip(got, wanted, strict=True))


def backend_for(inputs: Inputs) -> str | None:
    return None if inputs.u.device.type == "cpu" else "reference"


def capsules(candidate: Identification, output: Tensor) -> Tensor:
    """The output of a layer as ``[B, J, D]``."""
    return follow(output, steps_from(candidate.output_order, "BJD", "", candidate.sizes))


def relative(one: Tensor, other: Tensor) -> float:
    """The largest difference over the largest number in ``other``; infinite if a number is not finite."""
    if one.shape != other.shape:
        return float("inf")
    if one.numel() == 0:
        return 0.0
    one, other = one.detach().double(), other.detach().double()
    difference = float((one - other).abs().max() / other.abs().max().clamp_min(TINY))
    return difference if difference == difference else float("inf")
