"""Compares every contender with float64 before it is timed, so that only correct results are timed."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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

    If the inputs exceed TRUTH_INPUTS, only as many input capsules as fit are checked: ``self.case``.
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
        count = min(case.B, max(1, TRUTH_BYTES // (case.I * case.J * case.D * 8)))
        self.chosen = torch.linspace(0, case.B - 1, count).round().long().to(inputs.dout[0].device)
        self.dout = [
            torch.zeros_like(gradient).index_copy_(0, self.chosen, gradient[self.chosen]) for gradient in inputs.dout
        ]

        # The weight and a routing's parameters have no axis of samples.
        small = [
            (leaf.detach()[self.chosen] if name in case.batched else leaf.detach())
            for name, leaf in zip(case.shapes, self.leaves, strict=True)
        ]
        dout = [gradient[self.chosen] for gradient in inputs.dout]

        def reference(dtype: torch.dtype) -> dict[str, Tensor]:
            leaves = [tensor.to(dtype).detach().requires_grad_(case.backward) for tensor in small]
            return _results(case, einsum(case), leaves, [gradient.to(dtype) for gradient in dout])

        self.truth, plain = reference(torch.float64), reference(case.torch_dtype)
        rounding = torch.finfo(case.torch_dtype).eps
        self.bounds = {
            name: TIMES_EINSUM * relative_error(plain[name], truth) + ROUNDINGS * rounding
            for name, truth in self.truth.items()
        }

    def check(self, forward: Forward) -> Verdict:
        """Runs ``forward`` on the whole case once."""
        errors: dict[str, float] = {}
        reasons = []
        of_samples = [f"d{name}" for name in self.case.batched]
        for name, result in _results(self.case, forward, self.leaves, self.dout).items():
            if not bool(result.isfinite().all()):
                reasons.append(f"{name} is not finite")
            if name in of_samples and bool(result.index_fill(0, self.chosen, 0).any()):
                reasons.append(f"{name} is not zero where the gradient of {' or '.join(self.case.outputs)} is")
            if name in of_samples or name in self.case.outputs:
                result = result[self.chosen]
            error = relative_error(result, self.truth[name])
            # "not <=" so that NaN fails.
            if not error <= self.bounds[name]:
                reasons.append(f"{name} has relative error {error:.1e}, bound {self.bounds[name]:.1e}")
            errors[name] = error if math.isfinite(error) else -1.0
        return Verdict(errors, "; ".join(reasons))
