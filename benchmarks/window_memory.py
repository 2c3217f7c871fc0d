"""Peak memory of a convolutional layer of matrix capsules with EM routing, beyond inputs, parameters and gradients.

``python benchmarks/window_memory.py`` measures the shape of docs/convolutional-capsules.md in this process, which must
be fresh: what another call has left to the C library would hide growth.
"""

import torch

from capsfast.bench.memory import _reset_peak, _resident
from capsfast.nn import ConvCaps2d

MIB = 2**20


def main() -> None:
    layer = ConvCaps2d(32, 32, 16, 16, kernel_size=3, routing="em", pose_rows=4)

    def image(B: int, H: int, W: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(B, 32, 16, H, W, requires_grad=True), torch.rand(B, 32, H, W, requires_grad=True)

    def backward(found: tuple[torch.Tensor, ...]) -> None:
        torch.autograd.backward(found, [torch.ones_like(each) for each in found])

    backward(layer(*image(1, 5, 5)))  # loads the code
    layer.zero_grad()
    inputs = image(8, 20, 18)
    _reset_peak()
    before = _resident()["VmRSS"]
    found = layer(*inputs)
    print(f"forward {(_resident()['VmHWM'] - before) / MIB:.0f} MiB")
    backward(found)
    gradients = sum(leaf.numel() * leaf.itemsize for leaf in (*inputs, *layer.parameters()))
    print(f"forward and backward {(_resident()['VmHWM'] - before - gradients) / MIB:.0f} MiB")


if __name__ == "__main__":
    main()
