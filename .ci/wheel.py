"""Uses the capsfast of an installed wheel: what a user's first calls need is there, and the kind of wheel is right.

Run in an environment where the wheel is installed, or with the folder where it was unpacked in PYTHONPATH.
"""

from importlib import metadata
from pathlib import Path

import torch

import capsfast
from capsfast import models
from capsfast.environment import native

HERE = Path(capsfast.__file__).parent
assert not HERE.samefile(Path(__file__).parents[1] / "capsfast"), f"{HERE} is the checkout, not a wheel"
assert "mnist" in models.EfficientCapsNet._shipped()
installed = metadata.PathDistribution(next(HERE.parent.glob("capsfast-*.dist-info")))
for_any = "Tag: py3-none-any" in (installed.read_text("WHEEL") or "")
assert for_any == (native.extension is None), f"{HERE} has {'an' if for_any else 'no'} extension: {native.why_absent}"
u, weight = torch.randn(3, 7, 8), 0.1 * torch.randn(7, 5, 16, 8)
wanted = capsfast.dynamic_routing(u, weight, backend="reference")
if native.extension is None:
    assert "the wheel for any platform" in native.why_absent, native.why_absent
    kernels = f"no compiled part: {native.why_absent}"
else:
    torch.testing.assert_close(capsfast.dynamic_routing(u, weight, backend="cpp"), wanted)
    has_cuda = torch._C._dispatch_has_kernel_for_dispatch_key("capsfast::dynamic_routing", "CUDA")
    info = native.extension.build_info()
    assert has_cuda == bool(info["cuda"])
    kernels = f"CUDA kernels for {info['cuda_architectures']}" if has_cuda else "no CUDA kernels"
print(f"capsfast {installed.version}, torch {torch.__version__}, {kernels}")
