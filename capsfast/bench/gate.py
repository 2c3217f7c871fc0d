"""No timing without a correct result: every contender is held against float64 first."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Case
from .contenders import Forward, einsum
from .inputs import InputSet

# Votes of the float64 reference on the samples it is run on.
TRUTH_BYTES = 64 * 2**20
# Numbers of the inputs, of which the float64 reference takes 8 bytes each and as many for their gradients.
TRUTH_INPUTS = 2**28
# Against the error of the eager einsum in the same dtype, and in units of the dtype's rounding. The
# gate is to find wrong results; the accuracy bounds of the backends are the business of the tests.
TIMES_EINSUM = 4.0
ROUNDINGS = 8.0


@dataclass(frozen=True)
class Verdict:
    """errors, bounds: relative L2 error of each output and gradient, by name. reason: "" if passed."""

    errors: dict[str, float]
    bounds: dict[str, float]
    reason: str


def _error(found: Tensor, truth: Tensor) -> float:
    truth = truth.double()
    difference = (found.detach().to(truth.device, torch.float64) - truth).norm()
    return float(difference / truth.norm().clamp_min(1e-300))


def _reference(case: Case, tensors: Sequence[Tensor], dout: Sequence[Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients of the einsum reference for ``tensors``."""
    leaves = [tensor.detach().requires_grad_(case.backward) for tensor in tensors]
    return _named(case, einsum(case)(*leaves), leaves, dout)


def _named(
    case: Case, found: Tensor | tuple[Tensor, ...], leaves: Sequence[Tensor], dout: Sequence[Tensor]
) -> dict[str, Tensor]:
    outputs = (found,) if isinstance(found, Tensor) else tuple(found)
    results = {name: value.detach() for name, value in zip(case.outputs, outputs, strict=True)}
    if case.backward:
        # A parameter that nothing depends on has a gradient of zeros.
        gradients = torch.autograd.grad(outputs, list(leaves), list(dout), allow_unused=True, materialize_grads=True)
        results |= {f"d{name}": gradient for name, gradient in zip(case.shapes, gradients, strict=True)}
    return results


def _that_fits(case: Case) -> Case:
    numbers = case.input_bytes // case.torch_dtype.itemsize
    if numbers <= TRUTH_INPUTS:
        return case
    return dataclasses.replace(case, I=max(1, case.I * TRUTH_INPUTS // numbers))


def _first_capsules(case: Case, inputs: InputSet) -> InputSet:
    """The inputs without what is beyond the sizes of ``case``: every input has all input capsules on one axis."""
    tensors = []
    for tensor, shape in zip(inputs.tensors, case.shapes.values(), strict=True):
        short = tensor.detach()[tuple(slice(size) for size in shape)]
        tensors.append(tensor if tensor.shape == short.shape else short.requires_grad_(case.backward))
    return InputSet(tuple(tensors), inputs.dout)


class Gate:
    """Checks contenders on one case.

    Routing is independent per sample, so the float64 reference runs on some samples only, spread over
    the batch, and on the CPU. The gradient of the outputs is zero for all others, which makes the
    gradient of weight and parameters that of the chosen samples and all other input gradients exactly zero.

    Of inputs larger than TRUTH_INPUTS the first input capsules are checked, as many as fit.
    """

    def __init__(self, case: Case, inputs: InputSet) -> None:
        self.case = case = _that_fits(case)
        self.inputs = inputs = _first_capsules(case, inputs)
        sample_bytes = case.I * case.J * case.D * 8
        count = min(case.B, max(1, TRUTH_BYTES // sample_bytes))
        self.chosen = torch.linspace(0, case.B - 1, count).round().long()
        device = inputs.dout[0].device
        on_device = self.chosen.to(device)
        self.dout = tuple(torch.zeros_like(each) for each in inputs.dout)
        for zeros, each in zip(self.dout, inputs.dout, strict=True):
            zeros[on_device] = each[on_device]

        # The weight and a routing's parameters have no axis of samples.
        small = [
            (tensor.detach()[on_device] if name in case.batched else tensor.detach()).cpu()
            for name, tensor in zip(case.shapes, inputs.tensors, strict=True)
        ]
        dout = [each[on_device].cpu() for each in inputs.dout]
        self.truth = _reference(case, [tensor.double() for tensor in small], [each.double() for each in dout])
        plain = _reference(case, small, dout)
        rounding = torch.finfo(case.torch_dtype).eps
        self.bounds = {
            name: TIMES_EINSUM * _error(plain[name], truth) + ROUNDINGS * rounding for name, truth in self.truth.items()
        }

    def _compare(self, results: dict[str, Tensor]) -> Verdict:
        errors: dict[str, float] = {}
        reasons = []
        chosen = self.chosen.to(self.dout[0].device)
        of_samples = [f"d{name}" for name in self.case.batched]
        outputs = " or ".join(self.case.outputs)
        for name, found in results.items():
            if not bool(found.isfinite().all()):
                reasons.append(f"{name} is not finite")
            if name in self.case.outputs or name in of_samples:
                if name in of_samples:
                    others = torch.ones(self.case.B, dtype=torch.bool, device=found.device)
                    others[chosen] = False
                    if bool(found[others].any()):
                        reasons.append(f"{name} is not zero where the gradient of {outputs} is")
                found = found[chosen]
            errors[name] = _error(found, self.truth[name])
            # Written so that NaN fails.
            if not errors[name] <= self.bounds[name]:
                reasons.append(f"{name} has relative error {errors[name]:.1e}, bound {self.bounds[name]:.1e}")
        return Verdict({n: e if math.isfinite(e) else -1.0 for n, e in errors.items()}, self.bounds, "; ".join(reasons))

    def check(self, forward: Forward) -> Verdict:
        """Runs ``forward`` on the whole case once."""
        tensors = self.inputs.tensors
        with torch.set_grad_enabled(self.case.backward):
            results = _named(self.case, forward(*tensors), tensors, self.dout)
        return self._compare(results)
