"""Kernels of the gradient of an embedding lookup: rows with equal indices are summed.

There is one program per index. Among equal indices, the program of the first sums the rows of all,
in order, and writes that row of the table. There are no atomics and no sorting, so that each run
gives the same sums. All pairs of indices are compared, from the cache. The gradient may be added to
a table that no other op needs (as with tied embeddings). Its other rows then stay in place, neither
read nor written. Otherwise more programs copy the other rows, or write zeros if there is no table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from xdsl.ir import Operation, SSAValue

from shardweave.backends.triton.launch.tune import power_of_2
from shardweave.backends.triton.source.formulas import computed_in, converted, type_text
from shardweave.backends.triton.source.index import Base, Index, of_base
from shardweave.backends.triton.source.region import Region
from shardweave.backends.triton.source.source import Config, Kernel, KernelDraft
from shardweave.backends.triton.source.values import Values
from shardweave.backends.triton.source.writer import Term
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.ops.records.indexing import LOOKUP_GRADIENT
from shardweave.ir.ops.strides import dense_strides
from shardweave.ir.program.storage import overwritten_table

_BLOCK = """\
blocks_c = tl.cdiv(n_cols, BLOCK_C)
at = tl.program_id(0) // blocks_c
col = (tl.program_id(0) % blocks_c * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
in_col = col < n_cols"""

_CHUNK = """\
i = start + tl.arange(0, BLOCK_I)
in_i = i < n"""

_EQUAL = """\
equal = (({index} == own) & in_i & (i >= at)).to(tl.int32)
rank = tl.cumsum(equal, axis=0)
count = tl.sum(equal, axis=0)"""

_ROWS = """\
wanted = first + 1 + tl.arange(0, BLOCK_K)
is_it = (equal[None, :] > 0) & (rank[None, :] == wanted[:, None])
row = tl.sum(tl.where(is_it, i[None, :], 0), axis=1)[:, None]
in_row = (wanted <= count)[:, None]"""


class LookupTemplate:
    """Writes a kernel that sums a gradient's rows by index, and adds the sums to a table, if
    any."""

    def __init__(self, region: Region, strides: Sequence[Sequence[int]]) -> None:
        self.region = region
        self.gradient = next(op for op in region.ops if op.name == LOOKUP_GRADIENT)
        (self.made,) = region.stored
        self.num_rows, self.width = shape_of(self.made)
        self.count = region.space.rows
        self.draft = KernelDraft(region, strides)
        self.writer = self.draft.writer
        self.writer.masks = {"i": "in_i", "row": "in_row", "col": "in_col", "place": "in_place"}
        self.writer.symbols = [(self.width, "n_cols")]
        self.values = Values(self.writer)
        self.col = of_base(Base("col", self.width, frozenset({"col"})))
        self.table = self._table()
        self.dtype = computed_in(dtype_of_value(self.made))
        self.overwrites = self._overwritten(strides)

    def kernel(self) -> Kernel:
        writer = self.writer
        writer.line(_BLOCK)
        if self.overwrites is not None:
            self._add_rows()
        else:
            with writer.block("if at < n:"):
                self._add_rows()
            with writer.block("else:"):
                self._fill()
        sizes = {"n": self.count, "n_rows": self.num_rows, "n_cols": self.width}
        configs = _configs(
            self.count, self.width, dtype_of_value(self.gradient.operands[0]).itemsize
        )
        return self.draft.kernel(sizes, configs, overwrites=self.overwrites)

    def _table(self) -> SSAValue | None:
        adding = self.made.owner
        assert isinstance(adding, Operation)
        if adding is self.gradient:
            return None
        (table,) = (v for v in adding.operands if v.owner is not self.gradient)
        return table

    def _overwritten(self, strides: Sequence[Sequence[int]]) -> int | None:
        if self.table is None:
            return None
        given = list(self.region.inputs).index(self.table)
        is_dense = tuple(strides[given]) == dense_strides((self.num_rows, self.width))
        return given if is_dense and overwritten_table(self.region.op) == given else None

    def _index(self, name: str, axes: frozenset[str]) -> Term:
        """Write the load of the index at position `name`, a variable, of the indices to look up."""
        places = self.gradient.operands[1]
        place = of_base(Base(name, self.count, axes))
        return self.values.variable(self.values.at(places, self.values.indices(places, place)))

    def _add_rows(self) -> None:
        """Write the sum of a table row's gradients, in the program of its first index."""
        writer = self.writer
        own = self._index("at", frozenset()).name
        writer.line(f"own = {own}.to(tl.int64)\nbefore = 0\nstart = 0")
        with writer.block("while (start < at) & (before == 0):"):
            writer.line(_CHUNK)
            index = self._index("i", frozenset({"i"})).name
            writer.line(f"before += tl.sum((({index} == own) & (i < at)).to(tl.int32), axis=0)")
            writer.line("start += BLOCK_I")
        with writer.block(f"if {self._is_wanted('own')} & (before == 0):"):
            dtype = type_text(self.dtype)
            writer.line(f"total = tl.full([1, BLOCK_C], 0, {dtype})")
            with writer.block("for start in range(at // BLOCK_I * BLOCK_I, n, BLOCK_I):"):
                writer.line(_CHUNK)
                index = self._index("i", frozenset({"i"})).name
                writer.line(_EQUAL.format(index=index))
                with writer.block("for first in range(0, count, BLOCK_K):"):
                    writer.line(_ROWS)
                    self._add_wanted()
            self._store(of_base(Base("own", self.num_rows, frozenset())), "total", "in_col")

    def _add_wanted(self) -> None:
        source = self.gradient.operands[0]
        row = of_base(Base("row", self.count, frozenset({"row"})))
        place = row * self.width + self.col
        term = self.values.variable(self.values.at(source, self.values.indices(source, place)))
        text = f"tl.where(in_row & in_col, {converted(term.name, term.dtype, self.dtype)}, 0)"
        self.writer.line(f"total += tl.sum({text}, axis=0)[None, :]")

    def _fill(self) -> None:
        """Write the stores of table rows that no index refers to."""
        writer = self.writer
        writer.line("place = ((at - n) * BLOCK_V + tl.arange(0, BLOCK_V))[:, None]")
        writer.line("is_named = tl.full([BLOCK_V], 0, tl.int32)")
        with writer.block("for start in range(0, n, BLOCK_I):"):
            writer.line(_CHUNK)
            index = self._index("i", frozenset({"i"})).name
            named = (
                f"({index}[None, :] == place) & in_i[None, :] & {self._is_wanted(index)}[None, :]"
            )
            if self.count == 1:
                named = f"({index} == place) & {self._is_wanted(index)}"
            writer.line(f"is_named = tl.maximum(is_named, tl.max(({named}).to(tl.int32), axis=1))")
        writer.line("in_place = (place < n_rows) & (is_named == 0)[:, None]")
        zero = f"tl.full([BLOCK_V, BLOCK_C], 0, {type_text(self.dtype)})"
        self._store(
            of_base(Base("place", self.num_rows, frozenset({"place"}))), zero, "in_place & in_col"
        )

    def _is_wanted(self, index: str) -> str:
        padding: int = self.gradient.value("padding_idx")
        text = f"({index} >= 0) & ({index} < n_rows)"
        return f"({text} & ({index} != {padding}))" if padding >= 0 else f"({text})"

    def _store(self, row: Index, total: str, mask: str) -> None:
        """Write the store of table rows: their old values, if there is a table, plus `total`."""
        text = total
        if self.table is not None:
            term = self.values.variable(self.values.at(self.table, (row, self.col)))
            text = f"{converted(term.name, term.dtype, self.dtype)} + {total}"
        offset = (row * self.width + self.col).text(self.writer.symbols)
        # The index does not vary along an axis of one element, but the block still has that axis.
        offset += " + col * 0" + (" + place * 0" if "place" in mask else "")
        out = self.draft.outputs[self.made]
        made = self.writer.assign("sum", text, self.dtype, frozenset({"col"}))
        stored = converted(made.name, self.dtype, dtype_of_value(self.made))
        self.writer.line(f"tl.store({out} + {offset}, {stored}, mask={mask})")


def num_programs(kernel: Kernel, config: Config) -> int:
    """Number of program instances: (indices + blocks of rows, unless in place) x column blocks."""
    sizes = kernel.sizes
    rows = sizes["n"]
    if kernel.overwrites is None:
        rows += math.ceil(sizes["n_rows"] / config["BLOCK_V"])
    return rows * math.ceil(sizes["n_cols"] / config["BLOCK_C"])


def _configs(count: int, width: int, itemsize: int) -> list[Config]:
    """List configs to tune over. BLOCK_I: indices compared at once. BLOCK_K: rows added at once.
    itemsize: bytes of an element; registers hold fewer wide elements: 4 blocks of 1,024 spill 16
    bytes a thread on sm_80, so that 2 come first."""
    block_c = min(power_of_2(width), 2048)
    # Blocks of 256 and 512, with as many rows at once, spill 12 to 20 bytes a thread.
    block_i = power_of_2(count) if count <= 128 else 1024
    first, second = (8192, 4096) if itemsize <= 2 else (2048, 4096)
    return [
        {"BLOCK_I": min(block_i, wide), "BLOCK_K": max(2, elements // block_c), "BLOCK_V": 4,
         "BLOCK_C": block_c, "num_warps": warps}
        for wide, elements, warps in ((1024, first, 8), (1024, second, 8), (512, first, 4))
    ]  # fmt: skip
