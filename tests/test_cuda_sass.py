"""How many instructions the CUDA kernels execute for an input capsule of the canonical layer, and which.

What a change of the kernels or of the compiler costs in instructions takes no GPU to see.
"""

from pathlib import Path

import pytest

from .support import listing, sass
from .support.sass import PASSES, Executed

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "cuda-kernels.md"
# A warp's instructions for 16 samples and one input capsule: a few more than they are, as compilers differ.
MOST = {
    ("first pass", True): 145,
    ("first pass", False): 70,
    ("forward pass", True): 400,
    ("forward pass", False): 320,
    ("backward pass", True): 540,
    ("backward pass", False): 460,
    ("gradients", True): 2350,
    ("gradients", False): 1900,
}
SIZES = (12, 20)


# A loop over something, with a way for numbers that are far apart, and the address of each instruction.
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


@pytest.fixture(scope="module")
def _readable() -> None:
    reason = sass.why_not(sass.ARCHITECTURE)
    if reason is not None:
        pytest.skip(reason)


def executed(name: str, exact: bool, tiles: int = sass.TILES) -> Executed:
    return PASSES[name](exact, tiles)


@pytest.mark.usefixtures("_readable")
@pytest.mark.parametrize(("name", "exact"), MOST)
def test_a_capsule_takes_few_instructions(name: str, exact: bool) -> None:
    found = executed(name, exact)
    assert found.instructions <= MOST[name, exact], found.counts.most_common()


@pytest.mark.usefixtures("_readable")
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "single"])
@pytest.mark.parametrize("tiles", SIZES)
def test_what_is_computed_is_counted(tiles: int, exact: bool) -> None:
    """So that no limit holds because the loop that it is for was not found, or a way around its work."""

    def kinds(name: str, *which: str) -> list[int]:
        counts = executed(name, exact, tiles).counts
        return [listing.count_kind(counts, kind) for kind in which]

    product = tiles * (3 if exact else 1)
    assert kinds("first pass", "HMMA", "LDG") == [product, 0]
    # V is read once, ds once more.
    assert kinds("forward pass", "HMMA", "LDG") == [product, tiles]
    assert kinds("backward pass", "HMMA", "LDG") == [product, 2 * tiles]
    # Votes, du and dweight; ds of iteration 0, then V and ds for the dots and for the sums.
    assert kinds("gradients", "HMMA", "LDG") == [3 * product, tiles * (1 + 4 * (sass.ITERATIONS - 1))]
    # Where products are exact dvotes are split by a multiply-add, once for du and once for dweight.
    split = 2 if exact else 0
    for name, sums in (("forward pass", 2), ("backward pass", 3), ("gradients", 1 + 4 * (sass.ITERATIONS - 1) + split)):
        assert 4 * tiles * sums <= kinds(name, "FFMA")[0] <= 4 * tiles * sums + 40
    # dvotes are turned around, dweight is left for others to add up; du is written.
    stores, written = kinds("gradients", "STS", "STG")
    assert 4 * tiles + tiles <= stores <= 4 * tiles + 2 * tiles
    assert written == 2


@pytest.mark.usefixtures("_readable")
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "single"])
@pytest.mark.parametrize("tiles", SIZES)
@pytest.mark.parametrize("name", PASSES)
def test_loops_have_no_slow_instructions(name: str, tiles: int, exact: bool) -> None:
    hot = executed(name, exact, tiles).hot
    # Instructions that find out at run time which kind of memory they access, and local memory. Between its loops over
    # iterations and tiles a gradient pass may fetch some numbers that these loops do not need.
    assert [x for x in hot if x.kind in ("LD", "ST", "ATOM", "RED", "CALL")] == []
    local = [x for x in hot if x.kind in ("LDL", "STL")]
    assert len(local) <= (12 if name == "gradients" else 0), local
    assert [x for x in hot if x.kind == "LDG" and x.bytes() != 16] == []
    if name != "gradients":
        # No warp waits for another, and no number of a weight or a pose is read by itself.
        assert [x for x in hot if x.kind in ("BAR", "UCGABAR_ARV", "UCGABAR_WAIT", "MEMBAR")] == []
        assert [x for x in hot if x.kind == "LDS" and x.bytes() < 8] == []


@pytest.mark.usefixtures("_readable")
def test_the_table_of_the_docs_is_what_was_built() -> None:
    """``python -m tests.support.sass`` prints it. Another release of the compiler may come to other numbers."""
    text = PAGE.read_text(encoding="utf-8")
    found = text[text.index(sass.BEGIN) : text.index(sass.END) + len(sass.END)]
    if sass.release() not in found:
        pytest.skip(f"the table is not of {sass.release()}")
    assert found == sass.table()
