"""The order in memory of the float32 vectors that loops read: V and ds of a routing, query, precision and the like.

A strip is 16 rows, the rows of one mma. A row is a sample, or a row of a pose matrix. Vectors [B, J, S, C], S of them
for every output, lie as [strips, J, S, fours, 16, 4]: a vector is cut into fours of numbers, and the n-th fours of the
16 rows lie side by side. A warp loads 16 bytes a lane, for 8 rows with 4 lanes each. In this order the load touches 4
lines of 128 bytes, whatever outputs and components the lanes have; if vectors lay one after the other, the load would
touch 16. The last four of a vector is padded with 0, but not in a pose matrix. Rows without a sample, and rows that pad
a pose matrix, are not written.

Given votes have their columns in memory order in registers. For them a strip is one row, so vectors lie one after the
other.
"""

import triton
import triton.language as tl

from .. import config

fours = triton.constexpr_function(config.fours)
power_of_two = triton.constexpr_function(config.power_of_two)


@triton.constexpr_function
def numbers(C, ROWS):  # type: ignore[no-untyped-def]
    """How many numbers a strip takes for one output and one of its S vectors: the step from V to ds."""
    return ROWS * 4 * -(-C // 4)


@triton.jit
def strip_offset(row, c, ROWS: tl.constexpr):
    """The offset of component c of a row of the strip from the first component of the first row."""
    return c if ROWS == 1 else c // 4 * (4 * ROWS) + row * 4 + c % 4
