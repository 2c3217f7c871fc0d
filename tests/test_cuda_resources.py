"""What the compiler made of the CUDA kernels: registers, stack and shared memory of each, by architecture."""

import os
import re
import shutil
import site
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from capsfast import native

SPECIALISED = ("tile", "votes")
# Registers a thread, by what the name of a kernel begins with: what twelve warps of a multiprocessor may have, or 255.
MOST_REGISTERS = {"tile": 168, "": 255}
STATIC_SHARED = 48 * 1024


class Kernel(NamedTuple):
    architecture: str
    name: str
    registers: int
    stack: int
    shared: int


def cuobjdump() -> str | None:
    """From the toolkit, or from Triton, which brings one along."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    triton = [Path(folder, "triton/backends/nvidia/bin") for folder in site.getsitepackages()]
    return shutil.which("cuobjdump", path=os.pathsep.join([f"{home}/bin", *map(str, triton), os.environ["PATH"]]))


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    if native.extension is None or not native.extension.build_info()["cuda"]:
        pytest.skip("the extension was built without CUDA kernels")
    tool = cuobjdump()
    if tool is None:
        pytest.skip("no cuobjdump (it comes with CUDA toolkits and with Triton)")
    listed = subprocess.run(
        [tool, "--dump-resource-usage", str(native.extension.__file__)], capture_output=True, text=True, check=True
    ).stdout
    found, architecture = [], ""
    for part in re.split(r"\n(?= Function|.*arch = )", listed):
        arch = re.search(r"arch = (sm_\w+)", part)
        architecture = arch[1] if arch else architecture
        usage = re.search(r"Function (\w+):\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)", part)
        if usage:
            # _ZN8capsfast4cuda11tile_kernelIfLi8ELi16ELb1ELb0EEEvNS0_10TilePassesIXT2_EEE
            name = re.search(r"4cuda\d+([a-z_]+?_kernel)", usage[1])
            assert name is not None, usage[1]
            found.append(Kernel(architecture, name[1], *map(int, usage.groups()[1:])))
    return found


def test_every_kernel_is_there_for_every_architecture(kernels: list[Kernel]) -> None:
    assert native.extension is not None
    names = native.extension.build_info()["cuda_architectures"].replace("+PTX", "").replace(".", "").split()
    for name in names:
        here = [kernel.name for kernel in kernels if kernel.architecture == f"sm_{name}"]
        # Three types, K and D each; forward and backward, one row tile or two.
        assert here.count("tile_kernel") == 3 * 3 * 3 * 4
        assert here.count("tile_final_kernel") == 3 * 3 * 3
        # Three types; elements and exchanges of VotesTraits.
        assert here.count("votes_forward_kernel") == here.count("votes_backward_kernel") == 3 * 4
        for general in ("reduce_kernel", "rows_kernel", "final_kernel"):
            assert here.count(general) == 4 * 2


def test_specialised_kernels_keep_everything_in_registers(kernels: list[Kernel]) -> None:
    spilling = [kernel for kernel in kernels if kernel.name.startswith(SPECIALISED) and kernel.stack > 0]
    assert spilling == []


def test_kernels_stay_within_what_a_multiprocessor_has(kernels: list[Kernel]) -> None:
    assert kernels
    for kernel in kernels:
        most = next(most for start, most in MOST_REGISTERS.items() if kernel.name.startswith(start))
        assert kernel.registers <= most, kernel
        assert kernel.shared <= STATIC_SHARED, kernel
