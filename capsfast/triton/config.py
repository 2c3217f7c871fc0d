"""Tile sizes, in one place, with the reason beside each number.

The numbers follow from the registers and spills that the compiler reports (tests/all/test_triton_compile.py checks
these), not from measurements on a GPU.
"""

import functools
import warnings
from typing import NamedTuple

import triton

# Rows of a tile: the M of one mma instruction. A row is a sample, or a row of a pose matrix. Smaller batches are
# padded. For votes with positions, 16 rows fill whole sectors of memory. With 32 rows the outputs would need row_norm
# sooner, and row_norm reads all votes again.
ROWS = 16
RELEASE = tuple(map(int, triton.__version__.split(".")[:2]))


def refuses_k8() -> bool:
    """Whether tl.dot() refuses K = 8 in float32. Triton 3.6 and 3.7 do, in the front end alone: kernels/products.py
    lifts the rule, unless a release keeps it elsewhere."""
    return RELEASE < (3, 8) and not triton.knobs.runtime.interpret


def _smallest_k() -> int:
    if refuses_k8():
        try:
            from triton.backends.nvidia.compiler import min_dot_size  # noqa: F401
        except ImportError:
            warnings.warn(
                f"capsfast: Triton {triton.__version__} keeps its smallest K elsewhere than 3.6 and 3.7 do; float32 "
                "products with K = 8 are padded to 16, which takes up to half as many instructions again",
                RuntimeWarning,
                stacklevel=2,
            )
            return 16
    return 8


# The K of one matrix instruction, which is the smallest K of a product, by bytes of an element.
SMALLEST_K = {4: _smallest_k(), 2: 16}
# Kernels take a larger K in steps of this size, because the tiles of W for one step have to fit in registers.
LARGEST_K = 32
# An output whose dot products cross warps costs as much as this many columns, see _of_product().
EXCHANGE = 16
# In the gradient pass a tile costs as much as this many columns of a warp, because each tile loads u and adds to du.
# Tiles wider than 32 columns save nothing: registers have no room for their V and ds.
TURN = 8
# Warps of the pass loops that a multiprocessor holds at once: a thread takes nearly all 255 registers.
RESIDENT_WARPS = 8
# Bytes of shared memory that a multiprocessor has at least: 8.6, 8.9 and 12.0 have 100 KiB, 8.0 164 KiB, 9.0 228 KiB.
SHARED = 100 * 1024
# Bytes of shared memory that a program needs for conversions of layout, with 1 KiB for the driver.
CONVERSIONS = 4 * 1024


class Choice(NamedTuple):
    """How one kernel is cut into programs and warps.

    columns: the most padded columns (j, d) that a warp may hold. warps: the most warps that share the columns of a row.
    chunk: the most input capsules of a program; 0 makes only as many programs as the device runs at once.
    down: warps of a program, 16 rows each, if a warp holds whole rows.
    kept: whether accumulate reads V once, instead of again for every input capsule.
    """

    columns: int
    warps: int
    chunk: int = 0
    down: int = 1
    kept: bool = False


TABLE = {
    # 160 columns of 16 rows take 80 registers for the sums and 80 for the votes. Keeping V as well spills 40 bytes a
    # lane; reading V again for every input capsule takes 504 instructions in place of 468.
    # Two warps, one below the other, read W once for 32 samples. With four warps the compiler would choose the
    # instructions that four warps execute together, and these warps wait for each other.
    "accumulate": Choice(160, 8, down=2, kept=True),
    "accumulate_gradient": Choice(160, 8, down=2),
    # Runs after accumulate_gradient and takes one tile after the other. With tiles of 32 columns a warp keeps V and ds
    # of three iterations in 80 registers over all input capsules of a chunk. Otherwise it would load V and ds for every
    # input capsule, 100 KiB for 32 samples. Later tiles add to du of the chunk, later batch tiles add to dW; both
    # should stay in L2 (not measured).
    "gradient": Choice(48, 8, chunk=8, down=2),
    # Keeps V and ds of a section, but no sums. With at most 128 registers a multiprocessor holds 16 warps (see
    # KernelCall.split()); wider sections would take fewer instructions, but up to 182 registers.
    "row_norm": Choice(64, 8, down=2),
    # A pass with precision, center or second moments also keeps second sums, or reads two more vectors.
    "accumulate quadratic": Choice(80, 8, down=2),
    "accumulate_gradient quadratic": Choice(80, 8, down=2),
    "gradient quadratic": Choice(48, 8, chunk=8, down=2),
    # Given votes lie in registers in memory order: a warp has 16 columns of a tile. For 80 columns the sums, the votes
    # and V take 40 registers each.
    "accumulate votes": Choice(80, 8, kept=True),
    # Holds ds as well.
    "accumulate_gradient votes": Choice(64, 8),
    "gradient votes": Choice(40, 8, chunk=8),
    "row_norm votes": Choice(64, 8),
    "accumulate votes quadratic": Choice(48, 8, kept=True),
    "accumulate_gradient votes quadratic": Choice(40, 8),
    "gradient votes quadratic": Choice(32, 8, chunk=8),
}


class Tiles(NamedTuple):
    """How a kernel cuts samples and outputs; kernels/tiles.py has the symbols. ``sections`` of NT tiles cover all j."""

    BB: int
    JT: int
    DP: int
    LANES: int
    KP: int
    NT: int
    sections: int
    warps: int
    stages: int

    @property
    def width(self) -> int:
        return self.JT * self.DP

    @property
    def columns(self) -> int:
        """Columns that a warp holds."""
        return self.NT * self.width * self.BB // (ROWS * self.warps)


class LayerSizes(NamedTuple):
    """The layer for which tiles are chosen. K is 0 if votes are given.

    poses: P, the rows of a pose matrix. D is the length of one such row.
    """

    J: int
    D: int
    K: int
    itemsize: int
    poses: int = 1


def power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def fours(D: int) -> int:
    """How many fours of numbers (16 bytes each) a vector takes in memory, see kernels/strips.py."""
    return -(-D // 4)


@functools.cache
def tiles(kernel: str, layer: LayerSizes, choice: Choice, shared: int = SHARED) -> Tiles:
    """Chooses the fewest warps whose registers hold all outputs. If even choice.warps cannot hold them, cuts the
    outputs into sections that do not depend on each other. shared: bytes of a multiprocessor."""
    J, D, K, itemsize, poses = layer
    apart = kernel in ("gradient", "row_norm")  # these kernels need not hold all outputs at once
    rows = max(ROWS, power_of_two(poses))
    # choice.columns counts columns of the 16 rows of one mma. With a larger K a warp also holds more of u and W.
    KP = min(max(power_of_two(K), SMALLEST_K[itemsize]), LARGEST_K)
    held = choice.columns * ROWS // rows
    if kernel == "row_norm" and KP * itemsize > 32:
        held //= 2  # for 16 resident warps
    elif not apart and KP * itemsize > 64:
        # 96 columns spill 24 bytes a lane. 160 would take a seventh fewer instructions, but spill 368 bytes, and the
        # spilled registers of eight warps do not fit in L1 beside the pipeline.
        held = held * 3 // 5
    # Where a kernel need not hold all outputs at once, a tile of long outputs may have twice as many columns.
    turn, room = (TURN, 2 * held) if kernel == "gradient" else (0, choice.columns if apart else held)
    widths = [across for across in (1, 2, 4, 8, 16) if across <= choice.warps]
    if K == 0:
        cuts = [_of_votes(J, D, across) for across in widths]
        fitting = [cut for cut in cuts if cut.columns <= held]
        fitting += [cut for cut in cuts if kernel == "row_norm" and cut.width <= held * cut.warps]
    else:
        # A warp has whole rows or, if rows are too long, the columns of whole outputs.
        cuts = [_of_product(J, D, across, turn, room) for across in widths]
        fitting = [cut for cut in cuts if not apart and cut.columns <= room]
        fitting += [cut for cut in cuts if cut.width <= room * cut.warps]
    cut = (fitting or cuts[-1:])[0]
    sections = -(-cut.NT // max(1, held * cut.warps // cut.width))
    cut = cut._replace(NT=-(-cut.NT // sections), sections=sections)
    if K == 0:
        return cut._replace(stages=3 if kernel != "gradient" else 1)
    # Warps one below the other share the weight. The compiler arranges warps so for tiles of up to 32 columns.
    BB = max(rows, ROWS * (choice.down if cut.warps == 1 and cut.width <= 32 else 1))
    # Bytes that Triton's pipeline keeps in shared memory: u and all tiles of W, for at most two steps of K.
    pipeline = (cut.NT * cut.width + BB) * KP * min(2, -(-K // KP)) * itemsize
    warps = cut.warps * BB // ROWS
    # Loads are pipelined if as many programs as registers allow have room for it.
    room = shared // max(1, RESIDENT_WARPS // warps) - CONVERSIONS
    return cut._replace(BB=BB, KP=KP, warps=warps, stages=2 if pipeline <= room else 1)


def _of_votes(J: int, D: int, warps: int) -> Tiles:
    """Tiles of given votes: a tile has 16 columns per warp, more if D is larger."""
    DP = power_of_two(D)
    JT = max(16 * warps, DP) // DP
    return Tiles(ROWS, JT, DP, 0, 1, -(-J // JT), 1, warps, 1)


def _of_product(J: int, D: int, across: int, turn: int, room: int) -> Tiles:
    """The tiles with the fewest columns of padding for ``across`` warps side by side. turn: TURN or 0; room: the most
    columns of a tile that a warp should have.

    An output with more than four lanes is spread over warps. Its dot products go through shared memory, which costs as
    much as EXCHANGE more columns (counted in instructions of compiled kernels, J from 3 to 100, D of 16 and 64).
    """
    widths = []
    for log in range(3 + across.bit_length() - 1):
        LANES = 1 << log
        # A warp has 4 DP / LANES columns of a row, over which the product of dvotes and the weight is summed.
        DP = max(power_of_two(D), SMALLEST_K[4] * LANES // 4)
        JT = 4 * across // LANES
        NT = -(-J // JT)
        # Among cuts with equal padding, the tile nearest to 32 columns a warp wins.
        columns = NT * JT * (DP + (EXCHANGE if LANES > 4 else 0))
        columns += NT * turn * across * max(1, JT * DP // (32 * across))
        wide = room * across < JT * DP
        cut = Tiles(ROWS, JT, DP, LANES, 0, NT, 1, across, 1)
        widths.append((wide, columns, abs(JT * DP - 32 * across), DP, LANES, cut))
    return min(widths)[-1]
