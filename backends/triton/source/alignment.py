"""Aligned 16-byte access to rows that do not begin at multiples of 16 bytes.

In a tensor with rows of 50,257 halves, each row begins 2 bytes later within a 16-byte group than
the row before. A program that reads rows one by one begins each at the group of its first element.
A program that sums columns needs the same columns of all its rows, so it takes rows of equal
offset: every 16th row, for 50,257 as for any odd length.
"""

from __future__ import annotations

import math

from shardweave.backends.triton.source.writer import DensePlace
from shardweave.ir.ops.fusible import GROUP
from shardweave.ir.program.iteration_space import IterationSpace

VECTOR_BYTES = 16
"""Bytes of a thread's widest access."""

DENSE = DensePlace("row * n_cols + col", "place", "in_place & in_row", "is_whole")
"""Variable names, in the statements below, to address elements of dense values."""

ROWS_FROM_ALIGNED = """\
first = row * n_cols
place = first // {group} * {group} + (start + tl.arange(0, BLOCK_C))[None, :]
col = place - first
in_col = (col >= 0) & (col < n_cols)
# Whole groups are read, of the row's neighbours too, but nothing beyond the last row.
in_groups = place < (first + n_cols + {group} - 1) // {group} * {group}
in_place = in_groups & (place < n_rows * n_cols)
is_whole = (start >= {group}) & (start + BLOCK_C <= n_cols)
is_whole &= (tl.program_id(0) + 1) * BLOCK_R <= n_rows"""

COLUMNS_FROM_ALIGNED = f"""\
blocks_c = tl.cdiv(n_cols + {GROUP - 1}, BLOCK_C)
part = tl.program_id(0) // blocks_c
num_parts = tl.num_programs(0) // blocks_c
# Rows of a part begin alike, so that the same columns of each are in the same groups.
shift = part * (n_cols % {GROUP}) % {GROUP}
first = tl.program_id(0) % blocks_c * BLOCK_C
lane = (first + tl.arange(0, BLOCK_C))[None, :]
col = lane - shift
in_col = (col >= 0) & (col < n_cols)
in_groups = lane < (n_cols + shift + {GROUP - 1}) // {GROUP} * {GROUP}
is_inside = (first >= shift) & (first + BLOCK_C <= n_cols + shift)"""

ROWS_ALIKE = f"""\
row = (start + tl.arange(0, BLOCK_R) * num_parts)[:, None]
in_row = row < n_rows
place = row * n_cols // {GROUP} * {GROUP} + lane
# Whole groups are read, of the row's neighbours too, but nothing beyond the last row.
in_place = in_groups & (place < n_rows * n_cols)
is_whole = is_inside & (start + (BLOCK_R - 1) * num_parts < n_rows)"""


def row_period(space: IterationSpace) -> int:
    """Return the number of rows after which alignment repeats, if a kernel sums columns; else 1."""
    if space.family != "columns" or space.holds_columns:
        return 1
    return GROUP // math.gcd(space.columns, GROUP)


def num_column_blocks(space: IterationSpace, block: int) -> int:
    """Number of column blocks in a row; the first block may begin before the row does."""
    before = GROUP - 1 if row_period(space) > 1 else 0
    return -(-(space.columns + before) // block)


def pitch(columns: int) -> int:
    """Row stride, in elements, of partial results: `columns` rounded up to a multiple of
    `GROUP`."""
    return -(-columns // GROUP) * GROUP


def pitch_text(columns: int) -> str:
    """Return `pitch` as Triton text, for partial results of `n_cols` columns."""
    return "n_cols" if columns % GROUP == 0 else f"(tl.cdiv(n_cols, {GROUP}) * {GROUP})"
