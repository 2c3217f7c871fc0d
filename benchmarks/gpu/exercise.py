"""A step: calls for compute-sanitizer and ncu to watch: python -m gpu.exercise --help."""

import argparse

import torch

import capsfast
from capsfast.bench.cases import Case
from capsfast.bench.contenders import OURS, contender
from capsfast.bench.inputs import input_set, step

from .common import fused_backends
from .layers import BATCHES, layers

# B, I, J, D, K: one sample, a padded tile, input capsules enough for clusters of blocks and votes of a sample that fit
# no shared memory, many outputs.
SHAPES = ((1, 33, 10, 16, 8), (17, 21, 5, 7, 3), (2, 6000, 10, 16, 8), (33, 9, 300, 4, 4))
# Every tensor and both softmaxes between them.
OPTIONS: tuple[dict[str, object], ...] = (
    {},
    {"softmax": "in", "leaky": True, "num_iterations": 2},
    {"gradient": "last", "num_iterations": 1},
)


def watch(name: str, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, options: dict) -> None:
    """Forward and backward of both ops. Inputs are copied there, which a tool that follows initialised memory sees."""
    B, I, J, D, K = shape
    u, weight = torch.randn(B, I, K), 0.3 * torch.randn(I, J, D, K)
    votes = torch.einsum("ijdk,bik->bijd", weight, u)
    for op, tensors in (("dynamic_routing", (u, weight)), ("route_votes", (votes,))):
        leaves = [tensor.to(dtype).to(device).requires_grad_() for tensor in tensors]
        more = {}
        if options:
            more = {
                "mask": (torch.rand(B, I) > 0.3).to(device),
                "out_mask": (torch.rand(B, J) > 0.3).to(device),
                "logits": torch.randn(I, J).to(dtype).to(device).requires_grad_(),
                "bias": torch.randn(J, D).to(dtype).to(device).requires_grad_(),
            }
        v, c = getattr(capsfast, op)(*leaves, **more, **options, return_coupling=True, backend=name)
        leaves += [each for each in more.values() if each.requires_grad]
        dv, dc = torch.randn(B, J, D).to(dtype).to(device), torch.randn(B, I, J).to(dtype).to(device)
        torch.autograd.grad([v, c], leaves, [dv, dc], allow_unused=True)


def sanitize(names: list[str], device: torch.device, shapes: tuple[tuple[int, ...], ...]) -> None:
    for name in names:
        for shape in shapes:
            for options in OPTIONS:
                for dtype in (torch.float32, torch.bfloat16):
                    watch(name, device, shape, dtype, options)
            print(f"{name} {'x'.join(map(str, shape))}", flush=True)
    if device.type == "cuda":
        torch.cuda.synchronize()


# The canonical layer in float32, in bfloat16 as well, and with every batch size.
PROFILED = {"canonical": 1, "dtypes": 2, "layers": 2 * len(BATCHES)}


def profile(names: list[str], device: torch.device, cases: list[Case]) -> None:
    """Between the marks for ncu, one forward and one backward of each backend on each case."""
    marks = torch.cuda.profiler if device.type == "cuda" else None
    for name in names:
        for case in cases:
            inputs = input_set(case, device)
            both = step(contender(OURS + name).make(case), case, [inputs])
            both(0)  # compiles and loads
            if marks:
                torch.cuda.synchronize()
                marks.start()
            both(0)
            if marks:
                torch.cuda.synchronize()
                marks.stop()
            print(f"{name}: {case.name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the fused kernels, for another program to watch.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", action="append", help="default: all fused ones")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    parser.add_argument(
        "--profile", nargs="?", const="canonical", choices=tuple(PROFILED), help="layers once each, marked for ncu"
    )
    asked = parser.parse_args()
    device = torch.device(asked.device)
    # First what compiles nothing: a tool may run out of time.
    names = asked.backend or sorted(fused_backends(asked.device), key=lambda name: name != "cuda")
    torch.manual_seed(0)
    if asked.profile:
        batches = BATCHES if asked.profile == "layers" else BATCHES[:1]
        profile(names, device, layers(batches, device.type == "cpu")[: PROFILED[asked.profile]])
    else:
        sanitize(names, device, SHAPES[: asked.shapes])


if __name__ == "__main__":
    main()
