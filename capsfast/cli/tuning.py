"""``python -m capsfast tune``: measures tile sizes of the Triton kernels on this GPU."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from .. import toolchain
from ..bench.cases import DTYPES
from ..files import check_replaceable
from ..options import Options, PassOptions
from .common import on_command_line
from .endings import one_line


def tune(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(help="Table, created or extended; set CAPSFAST_TRITON_TABLE to it.")],
    batch: Annotated[int, typer.Option("--B", help="Batch size.", min=1)] = 128,
    in_caps: Annotated[int, typer.Option("--I", help="Number of input capsules.", min=1)] = 1152,
    out_caps: Annotated[int, typer.Option("--J", help="Number of output capsules.", min=1)] = 10,
    out_dim: Annotated[int, typer.Option("--D", help="Dimension of the output capsules.", min=1)] = 16,
    in_dim: Annotated[int, typer.Option("--K", help="Dimension of the input capsules.", min=1)] = 8,
    iterations: Annotated[int, typer.Option("--r", help="Number of routing iterations.", min=1)] = 3,
    dtype: Annotated[str, typer.Option(help="Dtype of the layer: float32, bfloat16 or float16.")] = "float32",
    shared: Annotated[bool, typer.Option(help="All input capsules share one weight.")] = False,
    em: Annotated[bool, typer.Option("--em", help="Measure an iteration of EM routing, not dynamic routing.")] = False,
) -> None:
    """Find the fastest tile sizes of the Triton kernels for one layer on this GPU."""
    if em and on_command_line(context, "iterations"):
        raise typer.BadParameter("--em measures one iteration; leave out --r")
    if toolchain.why_no_triton() or not torch.cuda.is_available():
        raise typer.BadParameter(f"tune needs Triton and a GPU: {toolchain.why_no_triton() or 'torch sees no GPU'}")
    if dtype not in DTYPES or dtype == "float64":
        raise typer.BadParameter(f"--dtype must be float32, bfloat16 or float16, got {dtype!r}")
    from ..triton import tune as tuning

    console = Console()
    draw = {"device": "cuda", "dtype": DTYPES[dtype]}
    u = torch.randn(batch, in_caps, in_dim, **draw)  # type: ignore[call-overload]
    weight = 0.1 * torch.randn(1 if shared else in_caps, out_caps, out_dim, in_dim, **draw)  # type: ignore[call-overload]
    routing = Options(iterations, "out", "full", False, "paper", 1e-8)
    options = PassOptions("out", False, True) if em else routing
    with one_line("tune"):
        check_replaceable(out)
        tuning.write(out, tuning.tune(u, weight, options, say=console.print))
    console.print(f"{out} written; CAPSFAST_TRITON_TABLE={out} makes capsfast use it")
