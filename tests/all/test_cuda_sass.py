"""The number and kinds of instructions of the CUDA kernels for an input capsule of the canonical layer.

So the cost of a new kernel or compiler in instructions is visible without a GPU.
"""

from pathlib import Path

import pytest

from ..support import listing, sass
from ..support.sass import PASSES, Executed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cuda-kernels.md"
# Limits for a warp's instructions for 16 samples and one input capsule, with a margin for other compilers.
MOST = {
    ("first pass", True): 112,
    ("first pass", False): 46,
    ("forward pass", True): 365,
    ("forward pass", False): 305,
    ("backward pass", True): 500,
    ("backward pass", False): 440,
    ("gradients", True): 2000,
    ("gradients", False): 1510,
}
SIZES = (12, 20)


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
    """Otherwise a limit could hold because the wrong loop, or a way without the work, was found."""

    def kinds(name: str, *which: str) -> list[int]:
        counts = executed(name, exact, tiles).counts
        return [listing.count_kind(counts, kind) for kind in which]

    product = tiles * (3 if exact else 1)
    assert kinds("first pass", "HMMA", "LDG") == [product, 0]
    # V is read once, and ds once.
    assert kinds("forward pass", "HMMA", "LDG") == [product, tiles]
    assert kinds("backward pass", "HMMA", "LDG") == [product, 2 * tiles]
    # Products for votes and dweight, and for du, whose rows have the high and low part of a weight. Loads: ds of
    # iteration 0, then V and ds for the dot products and again for the sums, except the part of ds that is kept.
    later = sass.ITERATIONS - 1
    kept = min(tiles, (51 if exact else 48) - 2 * tiles)
    loads = tiles + (4 * tiles - kept) * later
    assert kinds("gradients", "HMMA", "LDG") == [2 * product + (4 if exact else 2) * tiles, loads]
    for name, sums in (("forward pass", 2), ("backward pass", 3), ("gradients", 4 * later)):
        assert 4 * tiles * sums <= kinds(name, "FFMA")[0] <= 4 * tiles * sums + 40
    # Exact products split dvotes, once for du and once for dweight: cut off bits, and subtract.
    split = 8 * tiles if exact else 0
    assert split <= kinds("gradients", "FADD")[0] <= split + 80
    # dvotes are transposed, dweight is left for other threads to add up, du is written. Votes and du read weights.
    stores, written, reads = kinds("gradients", "STS", "STG", "LDS")
    assert stores == tiles + tiles // 2
    assert written == 2
    assert reads == (tiles if exact else tiles // 2) + 2 * tiles + 3


@pytest.mark.usefixtures("_readable")
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "single"])
@pytest.mark.parametrize("tiles", SIZES)
@pytest.mark.parametrize("name", PASSES)
def test_loops_have_no_slow_instructions(name: str, tiles: int, exact: bool) -> None:
    hot = executed(name, exact, tiles).hot
    # No generic accesses, and no local memory. A gradient pass may fetch a few numbers that its loops do not need.
    assert [x for x in hot if x.kind in ("LD", "ST", "ATOM", "RED", "CALL")] == []
    local = [x for x in hot if x.kind in ("LDL", "STL")]
    assert len(local) <= (8 if name == "gradients" else 0), local
    assert [x for x in hot if x.kind == "LDG" and x.bytes() != 16] == []
    # No single number of a weight or a pose is read.
    assert [x for x in hot if x.kind in ("LDS", "STS") and x.bytes() < 8] == []
    if name != "gradients":
        # No warp waits for another.
        assert [x for x in hot if x.kind in ("BAR", "UCGABAR_ARV", "UCGABAR_WAIT", "MEMBAR")] == []


@pytest.mark.usefixtures("_readable")
def test_the_table_of_the_docs_is_what_was_built() -> None:
    """``python -m tests.support.sass`` prints it. Another release of the compiler may give other numbers."""
    text = PAGE.read_text(encoding="utf-8")
    found = text[text.index(sass.BEGIN) : text.index(sass.END) + len(sass.END)]
    if sass.release() not in found:
        pytest.skip(f"the table is not of {sass.release()}")
    assert found == sass.table()
