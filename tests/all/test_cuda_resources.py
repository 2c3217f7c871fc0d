"""Registers, stack and shared memory of each compiled CUDA kernel, by architecture."""

import re
import shutil
import subprocess
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

from ..support.sass import Kernel, built_for, why_not
from ..support.sass import kernels as read

MOST_REGISTERS = 255
STATIC_SHARED = 48 * 1024
GENERAL = ("accumulate_kernel", "row_norm_kernel", "gradient_kernel")
SIZES = ((12, 1), (20, 1), (20, 2), (24, 1))
SIZES_WITH_OPTIONS = ((20, 1), (24, 2))
# Bytes a thread. With 24 tiles, two steps or options some numbers of a loop lie in memory.
MUCH_STACK = 64


@pytest.fixture(scope="module")
def kernels() -> tuple[Kernel, ...]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    return read()


def rows_kernels() -> list[str]:
    """Labels of the kernels of the rows family."""
    all_traits = [
        f"Rows<{tiles}, {steps}, {exact}, plain>" for tiles, steps in SIZES for exact in ("true", "false")
    ] + [f"Rows<{tiles}, {steps}, true, {options}>" for tiles, steps in SIZES_WITH_OPTIONS for options in ("any", "in")]
    accumulate = [f"accumulate_kernel<{traits}, {way}>" for traits in all_traits for way in ("forward", "backward")]
    return accumulate + [f"gradient_kernel<{traits}>" for traits in all_traits]


def test_every_kernel_is_there_for_every_architecture(kernels: tuple[Kernel, ...]) -> None:
    for architecture in built_for():
        here = [kernel for kernel in kernels if kernel.architecture == architecture]
        assert Counter(kernel.label for kernel in here if kernel.traits) == Counter(rows_kernels())
        names = Counter(kernel.name for kernel in here if not kernel.traits)
        for general in GENERAL:
            assert names[general] == 4 * 2


def test_spills_are_a_warning(kernels: tuple[Kernel, ...]) -> None:
    for kernel in kernels:
        if kernel.stack > MUCH_STACK and kernel.traits:
            warnings.warn(f"{kernel.label} on {kernel.architecture}: {kernel.stack} bytes of stack", stacklevel=1)


def test_kernels_stay_within_what_a_multiprocessor_has(kernels: tuple[Kernel, ...]) -> None:
    assert kernels
    for kernel in kernels:
        assert kernel.registers <= MOST_REGISTERS, kernel
        assert kernel.shared <= STATIC_SHARED, kernel


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("name", ["f16", "rows_12_24"])
def test_a_t4_gets_the_general_kernels_and_empty_ones(name: str, tmp_path: Path) -> None:
    include = Path(torch.__file__).parent / "include"
    source = Path(__file__).parents[2] / "csrc" / "ops" / "cuda" / "instantiations" / f"{name}.cu"
    flags = ["-std=c++17", "-O1", f"-I{include}", "-arch=sm_75", "-cubin", "-Xptxas", "-v", "-o", str(tmp_path / "out")]
    ran = subprocess.run(["nvcc", *flags, str(source)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    registers = [int(found) for found in re.findall(r"Used (\d+) registers", ran.stderr)]
    assert registers and (max(registers) < 16) == name.startswith("rows"), registers
