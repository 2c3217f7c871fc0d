"""Tile sizes, in one place, with the reason beside each number.

The numbers follow from the registers and spills that the compiler reports (tests/test_triton_compile.py checks
these), not from measurements on a GPU. ``tune.py`` measures and writes a table, which is used if
CAPSFAST_TRITON_TABLE names it.
"""

import functools
import json
import os
from pathlib import Path
from typing import NamedTuple

import torch
import triton

# Rows of a tile: the M of one mma instruction. They are samples, or the rows of pose matrices. Smaller batches are
# padded. Of votes with positions, 16 are whole sectors of memory; with 32 the outputs would sooner need row_norm,
# which reads all votes again.
ROWS = 16
# The smallest K of tl.dot, by bytes of an element. Triton up to 3.8 requires 16 for all dtypes, later ones 32 bytes.
SMALLEST_K = {4: 8 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 16, 2: 16}
# A larger K is taken in steps of this size, as the tiles of W of a step have to fit the registers.
LARGEST_K = 32
# Loads are pipelined if the tiles that are loaded ahead take no more bytes of shared memory than this. A program may
# have 99 KiB on every GPU from 8.0 on (that much on 8.6, 8.9 and 12.0); changes of layout need some of it.
SHARED = 64 * 1024


class Choice(NamedTuple):
    """How one kernel is cut.

    columns: how many padded columns (j, d) a warp may hold. warps: the most of a program. resident: for how many
    warps per multiprocessor the grid is made. chunk: the most input capsules of a program, or 0 for as few programs
    as fill the device.
    """

    columns: int
    warps: int
    resident: int = 16
    chunk: int = 0


# The default of resident, 16, is two to four programs a multiprocessor: one computes while others wait for memory.
TABLE = {
    # Holds sums, votes and V: at J=10, D=16 with two warps, 40 registers a thread for each, 225 in all, no spills.
    "accumulate": Choice(80, 8),
    # Also reads ds: at J=10, D=16 with four warps, 24 registers for each of these sets of tiles, 251 in all.
    "accumulate_gradient": Choice(64, 8),
    # Holds the coefficients of all iterations beside the votes. With more than 40, Triton 3.6 spills at r=3.
    # chunk 8: V and ds of a tile stay in L1 after the first input capsule, and dW of a chunk stays in L2.
    "gradient": Choice(40, 8, chunk=8),
    # Takes one tile after the other and keeps only a few numbers per row.
    "row_norm": Choice(64, 8),
    "coupling": Choice(64, 8),
    # A pass with precision, center or second moments has second sums, and reads precision and center from L1: at
    # J=10, D=16 with four warps, 24 registers a thread for each set of tiles, 220 in all, no spills.
    "accumulate quadratic": Choice(48, 8),
    # At J=10, D=16 with eight warps, 227 registers.
    "accumulate_gradient quadratic": Choice(40, 8),
    # At J=10, D=16 the tiles of "gradient": with eight warps 255 registers, 48 bytes of stack, no spills in the loop.
    # More outputs are taken in smaller groups.
    "gradient quadratic": Choice(32, 8, chunk=8),
}


class Tiles(NamedTuple):
    """How a kernel cuts samples and outputs; kernels/tiles.py has the symbols. ``groups`` of NT tiles cover all j."""

    BB: int
    JT: int
    DP: int
    KP: int
    NT: int
    groups: int
    warps: int
    stages: int

    @property
    def launch(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


class Layer(NamedTuple):
    """The layer that a row of the table is for. K is 0 for route_votes. shared: one weight for all input capsules.

    poses: P of pose matrices. D is that of one of their rows.
    """

    J: int
    D: int
    K: int
    itemsize: int
    shared: bool = False
    poses: int = 1


def power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def tiles(kernel: str, layer: Layer, choice: Choice) -> Tiles:
    """The fewest warps whose registers hold all outputs. If even the most warps cannot, groups of outputs.

    A tile has 16 columns per warp (more if D is larger), so that a warp has whole outputs: sums over d stay within the
    warp, and only a maximum and a sum per row cross warps. With fewer warps fewer columns are padding.
    """
    J, D, K, itemsize, _, poses = layer
    rows = max(ROWS, power_of_two(poses))
    # What a warp may hold is counted in rows of one mma.
    held = choice.columns * ROWS // rows
    DP = power_of_two(D)
    KP = min(max(power_of_two(K), SMALLEST_K[itemsize]), LARGEST_K)
    warps = 1
    while True:
        columns = max(16 * warps, DP)
        JT = columns // DP
        NT = -(-J // JT)
        if NT * columns <= held * warps or warps == choice.warps:
            break
        warps *= 2
    # row_norm takes one tile after the other.
    fit = 1 if kernel == "row_norm" else max(1, held * warps // columns)
    groups = -(-NT // fit)
    NT = -(-NT // groups)
    # Bytes that Triton's pipeline keeps in shared memory: u and all tiles of W, twice, for at most two steps of K.
    steps = min(2, -(-K // KP))
    pipeline = 2 * (NT * columns + rows) * KP * steps * itemsize
    # Not in the gradient pass: Triton would also pipeline V and ds of every iteration, 330 KiB at J=10, D=16.
    pipelined = pipeline <= SHARED and kernel != "gradient"
    return Tiles(rows, JT, DP, KP, NT, groups, warps, 3 if pipelined else 1)


def choice(kernel: str, layer: Layer, device: torch.device) -> Choice:
    """The choice of the tuned table for this layer and device, or that of TABLE if there is none."""
    name = os.environ.get("CAPSFAST_TRITON_TABLE")
    if name and device.type == "cuda":
        return tuned(name, torch.cuda.get_device_name(device)).get((kernel, layer), TABLE[kernel])
    return TABLE[kernel]


@functools.cache
def tuned(name: str, device: str) -> dict[tuple[str, Layer], Choice]:
    """The choices for a device from a table that tune.py wrote, by kernel and layer.

    Raises:
        ValueError: the file is missing or is not such a table.
    """
    try:
        rows = [row for row in json.loads(Path(name).read_text())["rows"] if row["device"] == device]
        found = {(row["kernel"], Layer(*row["layer"])): Choice(*row["choice"]) for row in rows}
        if any(chosen.warps not in (1, 2, 4, 8, 16) or chosen.columns < 16 for chosen in found.values()):
            raise ValueError("warps must be a power of two up to 16, columns at least 16")
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"CAPSFAST_TRITON_TABLE: {name} is no table of tile sizes ({error!r}); write one with "
            "python -m capsfast tune, or unset the variable"
        ) from error
