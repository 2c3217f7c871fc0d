"""Compares every contender with float64 before it is timed, so that only correct results are timed."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import layers
from .cases import Case
from .contenders import Forward, einsum
from .inputs import InputSet

# Largest size of the votes in the float64 reference; it decides how many samples are checked.
TRUTH_BYTES = 64 * 2**20
# Largest number of entries in the inputs. The float64 reference takes 8 bytes for each, and 8 for its gradient.
TRUTH_INPUTS = 2**28
# The bound of an error: a multiple of the eager einsum's error in the same dtype, plus a multiple of the dtype's
# rounding. The gate finds wrong results; the tests check the accuracy of the backends.
TIMES_EINSUM = 4.0
ROUNDINGS = 8.0


@dataclass(frozen=True)
class Verdict:
    """errors: relative L2 error of each output and gradient, by name. reason: "" if passed."""

    errors: dict[str, float]
    reason: str


def relative_error(found: Tensor, truth: Tensor) -> float:
    """The L2 norm of the difference to float64 ``truth``, relative to the truth unless that is 0."""
    difference = (found.detach().to(truth.device, torch.float64) - truth).norm()
    return float(difference) / (float(truth.norm()) or 1.0)


def _results(case: Case, forward: Forward, leaves: Sequence[Tensor], dout: Sequence[Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients by name."""
    with torch.set_grad_enabled(case.backward):
        found = forward(*leaves)
    outputs = (found,) if isinstance(found, Tensor) else tuple(found)
    results = {name: value.detach() for name, value in zip(case.outputs, outputs, strict=True)}
    if case.backward:
        # An unused parameter gets a gradient of zeros.
        gradients = torch.autograd.grad(outputs, list(leaves), list(dout), allow_unused=True, materialize_grads=True)
        results |= {f"d{name}": gradient for name, gradient in zip(case.shapes, gradients, strict=True)}
    return results


class Gate:
    """Checks contenders on one case.

    Samples are routed independently, so the float64 reference runs on some samples only, spread over the batch. The
    gradient of the outputs is zero for all other samples. Hence only the chosen samples contribute to the gradients of
    weight and parameters, and the input gradients of all other samples must be exactly zero.

    If the inputs exceed TRUTH_INPUTS, only as many input capsules as fit are checked: ``self.case``. If the votes of an
    image exceed TRUTH_BYTES, the reference runs on the far corner of the image, and the gradient of the outputs is zero
    for all other windows.
    """

    def __init__(self, case: Case, inputs: InputSet) -> None:
        numbers = case.input_bytes // case.torch_dtype.itemsize
        if numbers > TRUTH_INPUTS:
            case = dataclasses.replace(case, I=max(1, case.I * TRUTH_INPUTS // numbers))
        self.case = case
        # The slices keep the first case.I input capsules of every input.
        self.leaves = [
            tensor.detach()[tuple(slice(size) for size in shape)].requires_grad_(case.backward)
            for tensor, shape in zip(inputs.tensors, case.shapes.values(), strict=True)
        ]

        def truth_bytes(part: Case) -> int:
            """The size of the votes of a sample in float64."""
            return part.votes_bytes // (part.B * part.torch_dtype.itemsize) * 8

        self.part = case
        while self.part.size > layers.KERNEL and truth_bytes(self.part) > TRUTH_BYTES:
            self.part = dataclasses.replace(self.part, size=self.part.size - 1)
        count = min(case.B, max(1, TRUTH_BYTES // truth_bytes(self.part)))
        self.chosen = torch.linspace(0, case.B - 1, count).round().long().to(inputs.dout[0].device)
        dout = [
            self._corner(name, gradient)[self.chosen] for name, gradient in zip(case.outputs, inputs.dout, strict=True)
        ]
        self.dout = [torch.zeros_like(gradient) for gradient in inputs.dout]
        for name, gradient, there in zip(case.outputs, self.dout, dout, strict=True):
            self._corner(name, gradient).index_copy_(0, self.chosen, there)

        # The weight and a module's parameters have no axis of samples.
        small = [
            self._corner(name, leaf.detach())[self.chosen] if name in case.batched else leaf.detach()
            for name, leaf in zip(case.shapes, self.leaves, strict=True)
        ]

        def reference(dtype: torch.dtype) -> dict[str, Tensor]:
            leaves = [tensor.to(dtype).detach().requires_grad_(case.backward) for tensor in small]
            return _results(case, einsum(case), leaves, [gradient.to(dtype) for gradient in dout])

        self.truth, plain = reference(torch.float64), reference(case.torch_dtype)
        rounding = torch.finfo(case.torch_dtype).eps
        self.bounds = {
            name: TIMES_EINSUM * relative_error(plain[name], truth) + ROUNDINGS * rounding
            for name, truth in self.truth.items()
        }

    def _corner(self, name: str, value: Tensor) -> Tensor:
        """A view of the part of an image that the reference computes; all of a value without an image."""
        sizes = self.part.grid if name in self.case.outputs else (self.part.size,) * len(self.part.grid)
        corner: tuple[Any, ...] = (..., *(slice(-size, None) for size in sizes))
        return value[corner]

    def check(self, forward: Forward) -> Verdict:
        """Runs ``forward`` on the whole case once."""
        errors: dict[str, float] = {}
        reasons = []
        of_samples = [f"d{name}" for name in self.case.batched]
        for name, result in _results(self.case, forward, self.leaves, self.dout).items():
            if not bool(result.isfinite().all()):
                reasons.append(f"{name} is not finite")
            if name in of_samples or name in self.case.outputs:
                other, result = result.clone(), self._corner(name, result)[self.chosen]
                self._corner(name, other).index_fill_(0, self.chosen, 0)
                if name in of_samples and bool(other.any()):
                    reasons.append(f"{name} is not zero where the gradient of {' or '.join(self.case.outputs)} is")
            error = relative_error(result, self.truth[name])
            # "not <=" so that NaN fails.
            if not error <= self.bounds[name]:
                reasons.append(f"{name} has relative error {error:.1e}, bound {self.bounds[name]:.1e}")
            errors[name] = error if math.isfinite(error) else -1.0
        return Verdict(errors, "; ".join(reasons))
