"""The CPU kernels on AArch64: compiled for it without torch, run by qemu, compared with plain torch in float64."""

import platform
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from ..support import plain

ROOT = Path(__file__).parents[2]
NATIVE = platform.machine() in ("aarch64", "arm64")
PREFIX = "" if NATIVE else "aarch64-linux-gnu-"
EMULATOR = [] if NATIVE else ["qemu-aarch64-static"]
ITERATIONS = 3
KERNELS = ("routing", "rows", "small_batch")
SOURCES = (
    *(f"csrc/ops/cpu/{kernels}_portable.cpp" for kernels in KERNELS),
    "csrc/ops/cpu/plan.cpp",
    "tests/support/aarch64.cpp",
)

for tool in (f"{PREFIX}g++", *EMULATOR):
    if shutil.which(tool) is None:
        pytest.skip(
            f"{tool} is not installed (apt-get install g++-aarch64-linux-gnu qemu-user-static)", allow_module_level=True
        )


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("aarch64")

    def compiled(source: str) -> Path:
        made = folder / Path(source).with_suffix(".o").name
        flags = ["-O3", "-std=c++17", "-Wno-psabi", "-Icsrc"]
        subprocess.run([f"{PREFIX}g++", *flags, "-c", source, "-o", made], cwd=ROOT, check=True)
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, SOURCES))
    subprocess.run([f"{PREFIX}g++", "-static", *objects, "-o", folder / "run"], check=True)
    return folder / "run"


def right(u: Tensor, weight: Tensor, V: Tensor, ds: Tensor) -> Iterator[Tensor]:
    """The numbers of every pass; V and ds are [r, B, J, D]. Autograd gives the gradients of V and of the votes."""
    leaves = [each.requires_grad_() for each in (u, weight, V)]
    x = plain.votes(u, weight)
    loss = (x.sum(1) / x.shape[2] * ds[0]).sum()
    for t in range(1, len(V)):
        c = (x * V[t, :, None]).sum(-1).softmax(2)
        weighted = (c[..., None] * x).sum(1)
        loss = loss + (weighted * ds[t]).sum()
    du, dweight, dV = torch.autograd.grad(loss, leaves)
    yield from (x.sum(1), weighted, dV[-1], du, dweight)


# All and some rows of a block, all and some lanes; K that the kernels have as a constant, and others; J whose votes are
# held, and whose votes are not.
@pytest.mark.parametrize(
    "sizes", [(16, 9, 10, 16, 8), (19, 5, 3, 5, 4), (37, 3, 2, 16, 11), (5, 4, 7, 6, 16), (17, 2, 200, 16, 3)], ids=str
)
def test_passes_are_right(program: Path, sizes: tuple[int, ...]) -> None:
    B, I, J, D, K = sizes
    shapes = (B, I, K), (I, J, D, K), (ITERATIONS, B, J, D), (ITERATIONS, B, J, D)
    given = [torch.rand(shape).double() - 0.5 for shape in shapes]  # numbers that both types have
    data = b"".join(value.numpy().tobytes() for value in (torch.tensor([*sizes, ITERATIONS]), *given))
    ran = subprocess.run([*EMULATOR, program], input=data, capture_output=True, check=True)
    wanted = [tensor.detach() for tensor in right(*given)]
    numbers = torch.from_numpy(numpy.frombuffer(ran.stdout).copy()).split(
        [wanted_one.numel() for wanted_one in wanted] * 4
    )
    for n, found in enumerate(numbers):
        want = wanted[n % 5].flatten()
        bound = 2e-6 if n // 5 % 2 == 0 else 5e-15
        assert (found - want).abs().max() <= bound * want.abs().max(), (n // 5, n % 5)
