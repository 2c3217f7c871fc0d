"""The number and kinds of instructions of the CUDA kernels for an input capsule of the canonical layer.

So the cost of a new kernel or compiler in instructions is visible without a GPU.
"""

import warnings
from pathlib import Path

import pytest

from ..support import listing, sass
from ..support.sass import PASSES

PAGE = Path(__file__).parents[2] / "docs" / "cuda-kernels.md"

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
    code = listing.Code(LISTING)
    (loop,) = code.loops
    assert (loop.header, loop.latches) == (0x20, (0xC0,))
    assert [x.at for x in code.within(loop.blocks)] == list(range(0x20, 0xD0, 0x10))
    assert [x.at for x in code.turn(loop).instructions] == [0x20, 0x30, 0x40, 0x80, 0x90, 0xA0, 0xB0, 0xC0]
    assert [x.at for x in code.turn(loop, most_work=False).instructions] == [0x20, 0x30, 0x40, 0x80, 0x90, 0xC0]
    assert code.turn(loop).counts()["HMMA.1688.F32.TF32"] == 1
    assert [code.instructions[n].bytes() for n in (1, 2, 6, 11)] == [16, 16, 4, 8]
    assert code.innermost("HMMA", 1) == [loop] and code.innermost("HMMA", 2) == []
    assert list(code.dominators(0xC0)) == [0xC0, 0x90, 0x20, 0x00]


def test_the_page_has_the_table() -> None:
    """``python -m tests.support.sass`` prints it. The numbers are a record, not a limit."""
    text = PAGE.read_text(encoding="utf-8")
    rows = text[text.index(sass.BEGIN) : text.index(sass.END)].splitlines()[1:]
    assert [row.split("|")[1].strip() for row in rows[2:]] == [
        f"{name}, {products}" for name in PASSES for products in ("exact", "single")
    ]
    assert {row.count("|") for row in rows} == {9}
    assert all(int(number) >= 0 for row in rows[2:] for number in row.split("|")[2:-1])


@pytest.fixture(scope="module")
def _readable() -> None:
    reason = sass.why_not(sass.ARCHITECTURE)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.usefixtures("_readable")
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "single"])
def test_what_is_computed_is_counted(exact: bool) -> None:
    """Otherwise the wrong loop, or a way without the work, was found. Slow instructions in a loop are a warning."""
    found = {name: count(exact) for name, count in PASSES.items()}
    product = sass.TILES * (3 if exact else 1)
    accumulating = ("first pass", "forward pass", "backward pass")
    assert [found[name].counts["HMMA"] for name in accumulating] == [product] * 3
    # Products for votes and dweight, and for du, whose rows have the high and low part of a weight.
    assert found["gradients"].counts["HMMA"] == 2 * product + (4 if exact else 2) * sass.TILES
    # Poses are two loads. V is read once, and ds once.
    assert [found[name].counts["LDG"] for name in accumulating] == [2, 2 + sass.TILES, 2 + 2 * sass.TILES]
    for name in accumulating:
        slow = sorted({x.kind for x in found[name].hot} & {"LD", "ST", "LDL", "STL", "ATOM", "CALL", "BAR"})
        if slow:
            warnings.warn(f"{name}: {', '.join(slow)} in the loop over input capsules", stacklevel=1)
