"""How near the CPU kernels come to the machine: python benchmarks/roofline.py --help.

FLOPs are those of the launch plan: what the kernels execute, recomputed votes included. The machine's
rates are measured in the same run: float32 multiply-adds on registers, a matrix product, a copy.
"""

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import capsfast
from capsfast import native
from capsfast.bench.limits import limits
from capsfast.bench.timing import interleave

# B, I, J, D, K, r: the canonical layer by iterations and batch, a wide one, a long one.
LAYERS = (
    (128, 1152, 10, 16, 8, 1),
    (128, 1152, 10, 16, 8, 2),
    (128, 1152, 10, 16, 8, 3),
    (16, 1152, 10, 16, 8, 3),
    (1, 1152, 10, 16, 8, 3),
    (64, 256, 320, 16, 8, 3),
    (32, 18432, 10, 16, 8, 3),
)


def main(
    threads: Annotated[int | None, typer.Option(help="Torch threads; default torch's own choice.")] = None,
    seconds: Annotated[float, typer.Option(help="Timing of each layer.")] = 1.0,
) -> None:
    """Prints a table: time, rate and share of the machine's rate, forward and backward."""
    if native.extension is None:
        raise SystemExit(native.why_absent)
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    machine = limits(cpu)
    peak = sorted(native.extension.peak_flops() for _ in range(5))[2]
    console = Console()
    console.print(
        f"{torch.get_num_threads()} threads, {native.extension.build_info()['instruction_set']}: "
        f"multiply-adds {peak / 1e9:.0f} GFLOP/s, "
        f"matrix product {machine['matmul_flops_per_second'] / 1e9:.0f} GFLOP/s, "
        f"copy {machine['copy_bytes_per_second'] / 1e9:.1f} GB/s",
        soft_wrap=True,
    )
    table = Table("B, I, J, D, K, r", "layout", "direction", "ms", "GFLOP", "GFLOP/s", "of the multiply-adds")
    for B, I, J, D, K, r in LAYERS:
        plan = native.extension.launch_plan(B, I, J, D, K, r)
        u = torch.randn(B, I, K).mul_(0.3).requires_grad_()
        weight = torch.randn(I, J, D, K).mul_(0.1).requires_grad_()
        dv = torch.randn(B, J, D)
        with torch.no_grad():
            saved = torch.ops.capsfast.dynamic_routing(
                u, weight, None, None, None, None, r, "out", "full", False, "paper", 1e-8, False, False
            )

        def forward(n: int, u: torch.Tensor = u, weight: torch.Tensor = weight, r: int = r) -> None:
            with torch.no_grad():
                capsfast.dynamic_routing(u, weight, r, backend="cpp")

        def backward(
            n: int, u: torch.Tensor = u, weight: torch.Tensor = weight, r: int = r, dv: torch.Tensor = dv, saved=saved
        ) -> None:
            _, c, s, norm = saved
            options = (r, "out", "full", False, "paper", 1e-8, False, True, True, False, False)
            with torch.no_grad():
                torch.ops.capsfast.dynamic_routing_backward(
                    dv, None, u, weight, None, None, None, None, c, s, norm, *options
                )

        timings = interleave({"forward": forward, "backward": backward}, cpu, seconds=seconds)
        for direction, timing in timings.items():
            flops = plan[f"{direction}_flops"]
            rate = flops / timing.median
            table.add_row(
                f"{B}, {I}, {J}, {D}, {K}, {r}",
                plan["layout"],
                direction,
                f"{timing.median * 1e3:.2f}",
                f"{flops / 1e9:.2f}",
                f"{rate / 1e9:.0f}",
                f"{rate / peak:.0%}",
            )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
