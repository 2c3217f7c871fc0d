"""Tile sizes, in one place, with the reason beside each number.

The numbers follow from the registers and spills that the compiler reports (tests/all/test_triton_compile.py checks
these), not from measurements on a GPU.
"""

import functools
from typing import NamedTuple

import triton

# Rows of a tile: the M of one mma instruction. They are samples, or the rows of pose matrices. Smaller batches are
# padded. Of votes with positions, 16 are whole sectors of memory; with 32 the outputs would sooner need row_norm,
# which reads all votes again.
ROWS = 16
# The fewest that tl.dot sums over, by bytes of an element. Triton up to 3.8 requires 16 of all dtypes, later ones 32
# bytes.
SMALLEST_K = {4: 8 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 16, 2: 16}
# A larger K is taken in steps of this size, as the tiles of W of a step have to fit the registers.
LARGEST_K = 32
# Columns that an output is worth whose dot products cross warps, see _cut().
EXCHANGE = 16
# Columns of a warp that one tile fewer is worth in the gradient pass, as each loads u and adds to du. Only up to 32: of
# wider ones V and ds find no room.
TURN = 8
# Loads are pipelined if the tiles that are loaded ahead take no more bytes of shared memory than this. A program may
# have 99 KiB on every GPU from 8.0 on (that much on 8.6, 8.9 and 12.0); changes of layout need some of it.
SHARED = 64 * 1024


class Choice(NamedTuple):
    """How one kernel is cut.

    columns: how many padded columns (j, d) a warp may hold. warps: the most that share the columns of a row.
    chunk: the most input capsules of a program, or 0 for no more programs than the device runs at once.
    down: warps of a program, 16 rows each, if a warp holds whole rows.
    kept: whether accumulate reads V once, else for every input capsule.
    """

    columns: int
    warps: int
    chunk: int = 0
    down: int = 1
    kept: bool = False


TABLE = {
    # 160 columns of 16 rows are 80 registers each for the sums and the votes. V beside them takes 64 bytes of spilled
    # registers a lane, where reading V again for every input capsule takes 320 bytes from L1 (not measured).
    # Two warps, one below the other, read W once for 32 samples. Four would make the compiler take the instructions of
    # four warps together, which wait for each other.
    "accumulate": Choice(160, 8, down=2, kept=True),
    "accumulate_gradient": Choice(160, 8, down=2),
    # After accumulate_gradient, one tile after the other: of 32 columns a warp keeps V and ds of three iterations in 80
    # registers while it takes the input capsules of a chunk. Else it loads them for every one, 100 KiB for 32 samples.
    # du of the chunk, to which tiles after the first are added, and dW, to which batch tiles are, should stay in L2
    # (not measured).
    "gradient": Choice(48, 8, chunk=8, down=2),
    # Takes one tile after the other and keeps only a few numbers per row. With a warp's own outputs none of them
    # crosses warps.
    "row_norm": Choice(48, 8, down=2),
    # A pass with precision, center or second moments has second sums, or reads two more vectors.
    "accumulate quadratic": Choice(80, 8, down=2),
    "accumulate_gradient quadratic": Choice(80, 8, down=2),
    "gradient quadratic": Choice(48, 8, chunk=8, down=2),
    # Votes that are read lie in registers as memory has them: 16 columns of a tile are a warp's. Sums, votes and V
    # of 80 columns are 40 registers each.
    "accumulate votes": Choice(80, 8, kept=True),
    # Beside these ds.
    "accumulate_gradient votes": Choice(64, 8),
    "gradient votes": Choice(40, 8, chunk=8),
    "row_norm votes": Choice(64, 8),
    "accumulate votes quadratic": Choice(48, 8, kept=True),
    "accumulate_gradient votes quadratic": Choice(40, 8),
    "gradient votes quadratic": Choice(32, 8, chunk=8),
}


class Tiles(NamedTuple):
    """How a kernel cuts samples and outputs; kernels/tiles.py has the symbols. ``groups`` of NT tiles cover all j."""

    BB: int
    JT: int
    DP: int
    LANES: int
    KP: int
    NT: int
    groups: int
    warps: int
    stages: int

    @property
    def columns(self) -> int:
        """Of a warp."""
        return self.NT * self.JT * self.DP * self.BB // (ROWS * self.warps)

    @property
    def launch(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


class Layer(NamedTuple):
    """The layer that a row of the table is for. K is 0 of given votes. shared: one weight for all input capsules.

    poses: P of pose matrices. D is that of one of their rows.
    """

    J: int
    D: int
    K: int
    itemsize: int
    shared: bool = False
    poses: int = 1


class Cut(NamedTuple):
    """NT tiles of JT outputs for so many warps side by side, as in Tiles."""

    across: int
    DP: int
    LANES: int
    JT: int
    NT: int

    @property
    def columns(self) -> int:
        return self.JT * self.DP


def power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def tiles(kernel: str, layer: Layer, choice: Choice) -> Tiles:
    """The fewest warps whose registers hold all outputs. If even the most cannot, groups of outputs, which need nothing
    of each other, for as few warps as have room for a tile."""
    return _of_votes(kernel, layer, choice) if layer.K == 0 else _of_product(kernel, layer, choice)


def _of_votes(kernel: str, layer: Layer, choice: Choice) -> Tiles:
    """Of votes that are read: a tile has 16 columns per warp, more if D is larger."""
    DP = power_of_two(layer.D)
    warps = 1
    while True:
        columns = max(16 * warps, DP)
        JT = columns // DP
        NT = -(-layer.J // JT)
        if NT * columns <= choice.columns * warps or warps == choice.warps:
            break
        warps *= 2
    NT, groups = _groups(kernel, NT, max(1, choice.columns * warps // columns))
    return Tiles(ROWS, JT, DP, 0, 1, NT, groups, warps, 3 if kernel != "gradient" else 1)


def _groups(kernel: str, NT: int, fit: int) -> tuple[int, int]:
    """NT tiles in groups of as many as fit. row_norm takes one tile after the other."""
    groups = -(-NT // (1 if kernel == "row_norm" else fit))
    return -(-NT // groups), groups


def _of_product(kernel: str, layer: Layer, choice: Choice) -> Tiles:
    """Of votes that are a product: a warp has whole rows, or if these are too long, the columns of whole outputs."""
    J, D, K, itemsize, _, poses = layer
    apart = kernel in ("gradient", "row_norm")  # which need not have all outputs together
    rows = max(ROWS, power_of_two(poses))
    # What a warp may hold is counted in rows of one mma. Of a larger K it also holds more of W, of a shared weight dW.
    held = choice.columns * ROWS // rows // (2 if K > 16 and not apart else 1)
    KP = min(max(power_of_two(K), SMALLEST_K[itemsize]), LARGEST_K)
    # Where outputs need not be together, a tile of long ones may have twice as many columns.
    turn, room = (TURN, 2 * held) if apart else (0, held)
    cuts = [_cut(J, D, across, turn, room) for across in (1, 2, 4, 8, 16) if across <= choice.warps]
    whole = [cut for cut in cuts if not apart and cut.NT * cut.columns <= room * cut.across]
    single = [cut for cut in cuts if cut.columns <= room * cut.across]
    cut = (whole + single + cuts[-1:])[0]
    across, columns = cut.across, cut.columns
    NT, groups = _groups(kernel, cut.NT, max(1, held * across // columns))
    # Warps side by side share the weight. The compiler lays them so for tiles of 32 columns.
    down = choice.down if across == 1 and columns <= 32 else 1
    BB = max(rows, ROWS * down)
    # Bytes that Triton's pipeline keeps in shared memory: u and all tiles of W, twice, for at most two steps of K.
    steps = min(2, -(-K // KP))
    pipeline = 2 * (NT * columns + BB) * KP * steps * itemsize
    return Tiles(BB, cut.JT, cut.DP, cut.LANES, KP, NT, groups, across * BB // ROWS, 2 if pipeline <= SHARED else 1)


def _cut(J: int, D: int, across: int, turn: int, room: int) -> Cut:
    """The tiles that as many warps have, with the fewest columns of padding. turn: TURN, if it counts; room: the most
    columns that a warp should have of a tile.

    Outputs with more than four lanes are spread over warps. Their dot products go through shared memory, which costs as
    much as EXCHANGE more columns (in instructions of the compiled kernels, J from 3 to 100 and D of 16 and 64).
    """
    found = []
    for log in range(3 + across.bit_length() - 1):
        LANES = 1 << log
        # A warp has 4 DP / LANES columns of a row, over which the product of dvotes and the weight is summed.
        DP = max(power_of_two(D), SMALLEST_K[4] * LANES // 4)
        JT = 4 * across // LANES
        NT = -(-J // JT)
        # Of the same padding a tile of 32 columns.
        columns = NT * JT * (DP + (EXCHANGE if LANES > 4 else 0))
        columns += NT * turn * across * max(1, JT * DP // (32 * across))
        wide = room * across < JT * DP
        found.append((wide, columns, abs(JT * DP - 32 * across), DP, LANES, JT, NT))
    return Cut(across, *min(found)[3:])
