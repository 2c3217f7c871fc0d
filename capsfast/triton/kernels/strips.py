"""The order in memory of the float32 vectors that loops read: V and ds of a routing, query, precision and the like.

A strip is 16 rows, the rows of one mma. A row is a sample, or a row of a pose matrix. Vectors [B, J, S, C], S of them
for every output, lie as [strips, J, S, fours, 16, 4]: a vector is cut into fours of numbers, and the same four of all
rows of a strip is side by side. So a load of 16 bytes a lane, for 8 rows and 4 lanes of a row, touches 4 lines of 128
bytes, whatever output and components a lane has; vectors one after the other would make it touch 16. The last four is
padded with 0, but not in a pose. Rows without a sample, and rows that pad a pose, are not written.

For given votes, whose columns lie in registers in memory order, a strip is one row, so vectors lie one after the other.
"""

import triton
import triton.language as tl

from .. import config

fours = triton.constexpr_function(config.fours)
power_of_two = triton.constexpr_function(config.power_of_two)


@triton.constexpr_function
def numbers(C, ROWS):  # type: ignore[no-untyped-def]
    """How many numbers the vectors of a strip take: the step from V to ds."""
    return ROWS * 4 * -(-C // 4)


@triton.jit
def strip_offset(row, c, ROWS: tl.constexpr):
    """Where component c of a row of the strip is, counted from the first component of the first row."""
    return c if ROWS == 1 else c // 4 * (4 * ROWS) + row * 4 + c % 4
