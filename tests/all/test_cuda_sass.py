"""The machine code of the CUDA kernels: which were compiled, what spills, and the instructions for an input capsule.

So the cost of a new kernel or compiler in instructions is visible without a GPU.
"""

import re
import shutil
import subprocess
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

from ..support import sass

GENERAL = ("accumulate_kernel", "row_norm_kernel", "gradient_kernel")
SIZES = ((12, 1), (20, 1), (20, 2), (24, 1))
# Bytes a thread. With 24 tiles or two steps some numbers of a loop lie in memory.
MUCH_STACK = 64

# A loop with a branch for numbers that are far apart; each instruction has its address.
LISTING = """
        /*0000*/                   S2R R3, SR_TID.X ;                          /* 0x0000000000037919 */
        /*0010*/                   LDS.128 R4, [R3] ;                          /* 0x0000000000037919 */
        /*0020*/                   LDG.E.128 R8, desc[UR4][R2.64+0x10] ;       /* 0x0000000000037919 */
        /*0030*/                   BSSY B0, 0x90 ;                             /* 0x0000000000037919 */
        /*0040*/              @!P0 BRA 0x80 ;                                  /* 0x0000000000037919 */
        /*0050*/                   SHFL.BFLY PT, R4, R5, 0x1, 0x1f ;           /* 0x0000000000037919 */
        /*0060*/                   STL [R1], R4 ;                              /* 0x0000000000037919 */
        /*0070*/              @!P2 BSYNC B0 ;                                  /* 0x0000000000037919 */
        /*0080*/                   BSYNC B0 ;                                  /* 0x0000000000037919 */
        /*0090*/               @P1 BRA 0xc0 ;                                  /* 0x0000000000037919 */
        /*00a0*/                   HMMA.1688.F32.TF32 R4, R60.reuse, R8, RZ ;  /* 0x0000000000037919 */
        /*00b0*/              @!PT STS.64 [R3+0x280], R64 ;                    /* 0x0000000000037919 */
        /*00c0*/                   BRA.U UP0, 0x20 ;                           /* 0x0000000000037919 */
        /*00d0*/                   EXIT ;                                      /* 0x0000000000037919 */
"""


def test_a_turn_of_a_loop_is_the_shortest_that_does_all_work() -> None:
    code = sass.Code(LISTING)
    (loop,) = code.loops
    assert (loop.header, loop.latches) == (0x20, {0xC0})
    assert [x.at for x in code.within(loop.blocks)] == list(range(0x20, 0xD0, 0x10))
    assert [x.at for x in code.turn(loop)] == [0x20, 0x30, 0x40, 0x80, 0x90, 0xA0, 0xB0, 0xC0]
    assert [code.instructions[n].work() for n in (1, 2, 6, 10, 11)] == [16, 16, 0, 1, 8]
    assert code.innermost(1) == [loop] and code.innermost(2) == []


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "single"])
def test_what_is_computed_is_counted(exact: bool) -> None:
    """Otherwise the wrong loop, or a way without the work, was found. Slow instructions in a loop are a warning."""
    if reason := sass.why_not(sass.ARCHITECTURE):
        pytest.skip(reason)
    found = {name: count(exact) for name, count in sass.PASSES.items()}
    product = sass.TILES * (3 if exact else 1)
    accumulating = ("first pass", "forward pass", "backward pass")
    assert [found[name].counts["HMMA"] for name in accumulating] == [product] * 3
    # Products for votes, dweight and du.
    assert found["gradients"].counts["HMMA"] == 3 * product
    # Poses are two loads. V is read once, and ds once.
    assert [found[name].counts["LDG"] for name in accumulating] == [2, 2 + sass.TILES, 2 + 2 * sass.TILES]
    for name in accumulating:
        slow = sorted({x.kind for x in found[name].hot} & {"LD", "ST", "LDL", "STL", "ATOM", "CALL", "BAR"})
        if slow:
            warnings.warn(f"{name}: {', '.join(slow)} in the loop over input capsules", stacklevel=1)


def rows_kernels() -> list[str]:
    """Labels of the kernels of the rows family."""
    all_traits = [f"Rows<{tiles}, {steps}, {exact}>" for tiles, steps in SIZES for exact in ("true", "false")]
    accumulate = [f"accumulate_kernel<{traits}, {way}>" for traits in all_traits for way in ("forward", "backward")]
    return accumulate + [f"gradient_kernel<{traits}>" for traits in all_traits]


def test_every_kernel_is_there_for_every_architecture() -> None:
    if reason := sass.why_not():
        pytest.skip(reason)
    for architecture in sass.built_for():
        here = [kernel for kernel in sass.kernels() if kernel.architecture == architecture]
        assert Counter(kernel.label for kernel in here if kernel.traits) == Counter(rows_kernels())
        names = Counter(kernel.name for kernel in here if not kernel.traits)
        for general in GENERAL:
            assert names[general] == 4 * 2
        for kernel in here:
            if kernel.stack > MUCH_STACK and kernel.traits:
                warnings.warn(f"{kernel.label} on {architecture}: {kernel.stack} bytes of stack", stacklevel=1)


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
