"""Tile sizes, in one place, with the reason beside each number.

They follow from what the compiler reports (tests/test_triton_compile.py holds it to that), not yet from
measurements on a GPU. ``tune.py`` measures; the table it writes is used where CAPSFAST_TRITON_TABLE names it.
"""

import functools
import json
import os
from pathlib import Path
from typing import NamedTuple

import torch
import triton

# Rows of a tile of samples: the M of one mma instruction. Fewer samples are padded.
ROWS = 16
# The K of the smallest tl.dot: Triton up to 3.8 asks for 16 whatever the dtype, later ones for 32 bytes.
SMALLEST_K = {4: 8 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 16, 2: 16}
# Larger K is taken in steps, whose tiles of W have to fit the registers.
LARGEST_K = 32
# Loads are pipelined where this holds the tiles that are under way: what a program of any GPU from 8.0 on may have
# (99 KiB on 8.6, 8.9 and 12.0), less what changes of layout take.
SHARED = 64 * 1024


class Choice(NamedTuple):
    """How one kernel is cut.

    columns: padded columns (j, d) of a tile row that one warp may hold. warps: the most of a program.
    resident: warps per multiprocessor that the grid is to give work. chunk: the most input capsules of a
    program; 0: as few programs as fill the device.
    """

    columns: int
    warps: int
    resident: int = 16
    chunk: int = 0


# resident 16: two to four programs a multiprocessor, so that one computes while others wait for memory.
TABLE = {
    # Sums, votes and V: 40 registers a thread each at J=10, D=16 with two warps, 225 in all, no spills.
    "accumulate": Choice(80, 8),
    # ds passes through as well: 24 registers a tile set at J=10, D=16 with four warps, 251 in all.
    "accumulate_gradient": Choice(64, 8),
    # Coefficients of all iterations beside the votes. Above 40, Triton 3.6 spills at r=3.
    # chunk 8: W, u, V and ds of a tile are in L1 after the first input capsule, and dW stays within L2.
    "gradient": Choice(40, 8, chunk=8),
    # One tile after the other; nothing is kept but numbers per row.
    "sweep": Choice(64, 8),
    "coupling": Choice(64, 8),
}


class Tiles(NamedTuple):
    """How a kernel cuts samples and outputs, in the symbols of kernels/tiles.py. groups of NT tiles cover all j."""

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
    """What a row of the table is for, beside the kernel. K: 0 where votes are given. shared: one weight for all i."""

    J: int
    D: int
    K: int
    itemsize: int
    shared: bool = False


def power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def tiles(kernel: str, layer: Layer, choice: Choice) -> Tiles:
    """The fewest warps whose registers hold all outputs; if not even the most do, groups of outputs.

    A tile has 16 columns per warp, so that every warp owns whole outputs of all samples: what the sum over d
    needs stays in one warp, and only a maximum and a sum per row cross warps. Few warps pad few columns.
    """
    J, D, K, itemsize, _ = layer
    DP = power_of_two(D)
    KP = min(max(power_of_two(K), SMALLEST_K[itemsize]), LARGEST_K)
    warps = 1
    while True:
        columns = max(16 * warps, DP)
        JT = columns // DP
        NT = -(-J // JT)
        if NT * columns <= choice.columns * warps or warps == choice.warps:
            break
        warps *= 2
    # A sweep takes one tile after the other.
    fit = 1 if kernel == "sweep" else max(1, choice.columns * warps // columns)
    groups = -(-NT // fit)
    NT = -(-NT // groups)
    # What Triton's pipeline keeps in shared memory: u and all tiles of W twice, for two steps of K at most.
    steps = min(2, -(-K // KP))
    pipeline = 2 * (NT * columns + ROWS) * KP * steps * itemsize
    # The last pass would also pipeline V and ds of every iteration, through 330 KiB at J=10, D=16.
    pipelined = pipeline <= SHARED and kernel != "gradient"
    return Tiles(ROWS, JT, DP, KP, NT, groups, warps, 3 if pipelined else 1)


def choice(kernel: str, layer: Layer, device: torch.device) -> Choice:
    """The row of the tuned table for this layer and device, else that of TABLE."""
    name = os.environ.get("CAPSFAST_TRITON_TABLE")
    if name and device.type == "cuda":
        return tuned(name, torch.cuda.get_device_name(device)).get((kernel, layer), TABLE[kernel])
    return TABLE[kernel]


@functools.cache
def tuned(name: str, device: str) -> dict[tuple[str, Layer], Choice]:
    """The rows for a device in a table that tune.py wrote.

    Raises:
        ValueError: the file is missing or is no such table.
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
