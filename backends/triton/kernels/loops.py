"""Kernels over a space of elements: pointwise, and reductions of rows and columns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from xdsl.ir import SSAValue

from shardweave.backends.triton.kernels.reductions import Accumulation, Reducer, keeps_nan
from shardweave.backends.triton.launch.tune import configs_of, power_of_2
from shardweave.backends.triton.source.alignment import (
    COLUMNS_FROM_ALIGNED,
    DENSE,
    ROWS_ALIKE,
    ROWS_FROM_ALIGNED,
    VECTOR_BYTES,
    pitch_text,
    row_period,
)
from shardweave.backends.triton.source.formulas import computed_in, converted, type_text
from shardweave.backends.triton.source.index import Base, of_base
from shardweave.backends.triton.source.joining import identity_of, joined_blocks, reduced_block
from shardweave.backends.triton.source.region import Region
from shardweave.backends.triton.source.source import Config, Kernel, KernelDraft, Kind
from shardweave.backends.triton.source.values import Values
from shardweave.backends.triton.source.writer import NotReadyError, Term
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.ops.fusible import column_results, role_of
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.iteration_space import WHOLE_ROW

_REGISTERS = 65536
"""32-bit registers of an SM, the limit for one program."""

_MOST_THREADS = 512
"""Threads of a program with the longest rows."""

_ASIDE_BLOCK = 256
"""Elements that one program computes of values that do not depend on the rows."""

Strides = Sequence[Sequence[int]]


def pointwise_kernel(region: Region, strides: Strides) -> Kernel:
    """Write a pointwise kernel: each lane computes one element of every stored value."""
    draft = KernelDraft(region, strides)
    writer = draft.writer
    writer.masks = {"x": "in_x"}
    writer.line("x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)")
    writer.line("in_x = x < n")
    values = Values(writer)
    x = of_base(Base("x", region.space.columns, frozenset({"x"})))
    for value in region.stored:
        values.store(draft, value, x, frozenset({"x"}))
    blocks = [(1024, 4), (512, 4), (2048, 8), (4096, 8), (256, 2)]
    if any(spec_of(op).costly == "trigonometric" for op in region.ops):
        blocks.insert(0, (256, 8))
    configs: list[Config] = [{"BLOCK": block, "num_warps": warps} for block, warps in blocks]
    return draft.kernel({"n": region.space.columns}, configs)


def _or_0(peak: str) -> str:
    """Return text that replaces a maximum of -inf by 0, so that differences to it are not NaN."""
    return f'tl.where({peak} == float("-inf"), 0.0, {peak})'


class ReductionTemplate:
    """Writes a reduction kernel. Each instance reduces its own rows; column sums are left as
    partial results. Rows of more than `whole_row` elements are read block by block."""

    def __init__(self, region: Region, strides: Strides, whole_row: int = WHOLE_ROW) -> None:
        self.region, self.space = region, region.space
        self.draft = KernelDraft(region, strides)
        self.writer = self.draft.writer
        self.writer.masks = {"row": "in_row", "col": "in_col", "x": "in_x"}
        self.writer.symbols = [(self.space.columns, "n_cols")]
        self.values = Values(self.writer)
        row = Base("row", self.space.rows, frozenset({"row"}))
        col = Base("col", self.space.columns, frozenset({"col"}))
        self.row, self.col = of_base(row), of_base(col)
        self.reducer = Reducer(self.values, self.row, self.col, self.space.columns)
        self.column_values = {v for op in region.ops for v in column_results(op)}
        longest = min(whole_row, self._longest())
        self.in_parts = self.space.reduces_rows and self.space.columns > longest
        self.is_ragged = row_period(self.space) > 1
        self.partial: dict[int, Kind] = {}

    def kernel(self) -> Kernel:
        steps = [s for op in self.region.ops if role_of(op) == "reduce" for s in self._steps(op)]
        stored = self.region.stored
        if not self.space.holds_columns:
            self.partial = {stored.index(s.result): s.kind for s in steps if s.result is not None}
        rows = [step for step in steps if step.result is None]
        columns = [step for step in steps if step.result is not None]
        if columns and not self.in_parts:
            self._all_rows(rows, columns)
        else:
            self._one_block(rows, columns)
        return self._kernel()

    def _longest(self) -> int:
        """Return the length of the longest row whose live values fit into a program's registers."""
        if not self.space.reduces_columns:
            return self.space.columns
        region, numel = self.region, self.space.rows * self.space.columns
        full = [v for v in region.inputs if math.prod(shape_of(v)) == numel]
        sums = sum(value in self.column_values for value in region.stored)
        rows = len(full) + sum(op.name == "aten.embedding" for op in region.ops)
        is_wide = any(region.dtype_of(value).itemsize >= 4 for value in full)  # halves go in pairs
        spare = 8 * is_wide  # registers of a thread for places and masks
        if any(spec_of(op).costly == "error function" for op in region.ops):
            spare = 64
        return (_REGISTERS - _MOST_THREADS * spare) // (sums + rows + 1)

    def _steps(self, op: object) -> list[Accumulation]:
        """List an op's accumulations, without column sums that are not stored."""
        stored = set(self.region.stored)
        return [s for s in self.reducer.steps(op) if s.result is None or s.result in stored]  # type: ignore[arg-type]

    # Loops

    def _one_block(self, rows: list[Accumulation], columns: list[Accumulation]) -> None:
        """Write a kernel with one block of rows per program; long rows in a loop over columns."""
        self.writer.line("row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]")
        self.writer.line("in_row = row < n_rows")
        if self.in_parts:
            self._rows_in_parts(rows, columns)
            return
        self._define_columns("tl.arange(0, BLOCK_C)")
        self._reduce_rows(rows)
        self._store([v for v in self.region.stored if v not in self.region.aside])
        if self.region.aside:
            self._store_aside()

    def _store_aside(self) -> None:
        """Write stores of values that do not depend on rows: each early program stores a block."""
        x = of_base(Base("x", self.space.aside, frozenset({"x"})))
        with self.writer.block("if tl.program_id(0) * BLOCK_A < n_aside:"):
            self.writer.line("x = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)")
            self.writer.line("in_x = x < n_aside")
            for value in self.region.aside:
                self.values.store(self.draft, value, x, frozenset({"x"}))

    def _define_columns(self, text: str) -> None:
        self.writer.line(f"col = ({text})[None, :]")
        self.writer.line("in_col = col < n_cols")

    def _reduce_rows(self, rows: list[Accumulation]) -> None:
        for step in rows:
            term = step.term()
            text = f"tl.where(in_col, {term.name}, {identity_of(step.kind, term.dtype)})"
            self._finish(step, self._reduced(step, text, term.dtype, axis=1), term)

    def _reduced(self, step: Accumulation, text: str, dtype: torch.dtype, axis: int) -> str:
        """Return text that reduces a block along axis 1 (rows) or 0 (columns) to size 1."""
        must_keep = keeps_nan(step.key[0]) and dtype.is_floating_point
        if must_keep and step.kind != "sum":
            text = self.writer.assign("part", text, dtype, frozenset({"row", "col"})).name
        return reduced_block(step.kind, text, axis, keeps_nan=must_keep)

    def _finish(self, step: Accumulation, text: str, term: Term) -> None:
        axes = frozenset({"row"})
        hint = f"row_{step.kind}"
        made = self.writer.assign(hint, text, term.dtype, axes, step.key[0].name)
        self.reducer.finished[step.key] = made

    def _rows_in_parts(self, rows: list[Accumulation], columns: list[Accumulation]) -> None:
        """Write a loop over columns for each round of dependent reductions, and one to store."""
        pending = list(rows)
        while pending:
            pending = self._round(pending)
        stored = [v for v in self.region.stored if v not in self.column_values]
        per_row = [v for v in stored if self._is_per_row(v)]
        self._store(per_row)
        full = [v for v in stored if v not in per_row]
        if full or columns:
            with self._loop_over_columns():
                self._store(full)
                for step in columns:
                    self._store_part(step, "tl.program_id(0)", self._sum_of_block(step))

    def _sum_of_block(self, step: Accumulation) -> str:
        """Return text that reduces each column of a block."""
        assert step.result is not None
        dtype = computed_in(dtype_of_value(step.result))
        part = f"tl.where(in_row & in_col, {step.term().name}, {identity_of(step.kind, dtype)})"
        return self._reduced(step, part, dtype, axis=0)

    def _store_part(self, step: Accumulation, part: str, text: str) -> None:
        assert step.result is not None
        place = (
            f"{self.draft.outputs[step.result]} + {part} * {pitch_text(self.space.columns)} + col"
        )
        if self.space.holds_columns:
            place = f"{self.draft.outputs[step.result]} + col"
            dtype = computed_in(dtype_of_value(step.result))
            whole = self.writer.assign("whole", text, dtype, frozenset({"col"}))
            text = converted(whole.name, dtype, self.region.dtype_of(step.result))
        self.writer.line(f"tl.store({place}, {text}, mask=in_col)")

    def _is_per_row(self, value: SSAValue) -> bool:
        return math.prod(shape_of(value)) != self.space.rows * self.space.columns

    @contextmanager
    def _loop_over_columns(self) -> Iterator[None]:
        group = self._group()
        if group == 1:
            with self.writer.block("for start in range(0, n_cols, BLOCK_C):"):
                self._define_columns("start + tl.arange(0, BLOCK_C)")
                yield
            return
        with self.writer.block(f"for start in range(0, n_cols + {group - 1}, BLOCK_C):"):
            self.writer.line(ROWS_FROM_ALIGNED.format(group=group))
            self.writer.dense = DENSE
            yield
        self.writer.dense = None

    def _group(self) -> int:
        """Return the elements in 16 bytes if rows need aligned reads (`alignment`), else 1."""
        space = self.space
        numel = space.rows * space.columns
        dense = [v for v in self.region.inputs if math.prod(shape_of(v)) == numel]
        if not dense or space.reduces_columns:  # whose blocks have the same columns of each row
            return 1
        group = VECTOR_BYTES // min(self.region.dtype_of(value).itemsize for value in dense)
        return group if space.columns % group else 1

    def _round(self, pending: list[Accumulation]) -> list[Accumulation]:
        """Write one loop over columns for all steps that are ready; returns the other steps."""
        first = len(self.writer.lines)
        ready: list[tuple[Accumulation, str, Term]] = []
        waiting: list[Accumulation] = []
        online: dict[Accumulation, str] = {}
        sums = {step.peak: step for step in pending if step.peak is not None}
        with self._loop_over_columns():
            for step in pending:
                if step in online:
                    continue
                before = self.writer.state()
                try:
                    term = step.term()
                except NotReadyError:
                    self.writer.restore(before, erase=True)
                    waiting.append(step)
                    continue
                total = self.writer.fresh("total")
                part = f"tl.where(in_col, {term.name}, {identity_of(step.kind, term.dtype)})"
                ready.append((step, total, term))
                partner = sums.get(step.key)
                if partner is None:
                    self.writer.line(f"{total} = {joined_blocks(step.kind, total, part)}")
                else:
                    online[partner] = total
                    ready.append((partner, self._join_powers(total, part), term))
        assert ready, "reductions of a region wait for each other in a circle"
        starts = "    {} = tl.full([BLOCK_R, BLOCK_C], {}, {})"
        self.writer.lines[first:first] = [
            starts.format(total, identity_of(step.kind, term.dtype), type_text(term.dtype))
            for step, total, term in ready
        ]
        for step, total, term in ready:
            if step in online:
                self._finish(step, self._sum_of_powers(step, online[step], total), term)
            else:
                self._finish(step, self._reduced(step, total, term.dtype, axis=1), term)
        return [step for step in waiting if step not in online]

    def _join_powers(self, peak: str, part: str) -> str:
        """Write one loop step of an online softmax; returns the variable of the sum.
        In each lane it updates the maximum `peak` by `part`, and the sum of exp(x - maximum).
        (Milakov and Gimelshein, 2018: "Online normalizer calculation for softmax".)
        """
        total, each, new = (self.writer.fresh(word) for word in ("total", "each", "peak"))
        self.writer.line(
            f"{each} = {part}\n"
            f"{new} = {joined_blocks('max', peak, each)}\n"
            f"{new}_or_0 = {_or_0(new)}\n"
            f"{total} = {total} * tl.exp({peak} - {new}_or_0) + tl.exp({each} - {new}_or_0)\n"
            f"{peak} = {new}"
        )
        return total

    def _sum_of_powers(self, step: Accumulation, peak: str, total: str) -> str:
        """Return text that sums an online softmax's lanes; NaN for rows of -inf, as in ATen."""
        assert step.peak is not None
        highest = self.reducer.finished[step.peak].name
        text = f"tl.sum({total} * tl.exp({peak} - {_or_0(highest)}), axis=1)[:, None]"
        return f'tl.where({highest} == float("-inf"), float("nan"), {text})'

    def _all_rows(self, rows: list[Accumulation], columns: list[Accumulation]) -> None:
        """Write a kernel in which each program loops over blocks of rows and sums columns."""
        line = self.writer.line
        loop = self._share_rows(has_rows=bool(rows))
        height = "1" if rows else "BLOCK_R"
        totals = [self.writer.fresh("total") for _ in columns]
        dtypes = [computed_in(dtype_of_value(step.result)) for step in columns if step.result]
        for step, total, dtype in zip(columns, totals, dtypes, strict=True):
            start = identity_of(step.kind, dtype)
            line(f"{total} = tl.full([{height}, BLOCK_C], {start}, {type_text(dtype)})")
        with self.writer.block(loop):
            self._define_rows()
            self._reduce_rows(rows)
            for step, total, dtype in zip(columns, totals, dtypes, strict=True):
                if rows:
                    part = self._sum_of_block(step)
                else:
                    start = identity_of(step.kind, dtype)
                    part = f"tl.where(in_row & in_col, {step.term().name}, {start})"
                line(f"{total} = {joined_blocks(step.kind, total, part)}")
            self._store([v for v in self.region.stored if v not in self.column_values])
            self.writer.dense = None
        for step, total, dtype in zip(columns, totals, dtypes, strict=True):
            text = total if rows else self._reduced(step, total, dtype, axis=0)
            self._store_part(step, "part", text)

    def _share_rows(self, *, has_rows: bool) -> str:
        """Write the columns and rows of each program; returns the header of the loop over rows.
        has_rows: whether rows are reduced too, so that a program needs all columns. The grid has
        only one dim in any case, since its other dims are limited to 65,535."""
        line = self.writer.line
        if self.is_ragged:
            line(COLUMNS_FROM_ALIGNED)
            return "for start in range(part, n_rows, num_parts * BLOCK_R):"
        if has_rows:
            line("part = tl.program_id(0)")
            line("step = tl.num_programs(0) * BLOCK_R")
            self._define_columns("tl.arange(0, BLOCK_C)")
        else:
            line("blocks_c = tl.cdiv(n_cols, BLOCK_C)")
            line("part = tl.program_id(0) // blocks_c")
            line("step = tl.num_programs(0) // blocks_c * BLOCK_R")
            self._define_columns("tl.program_id(0) % blocks_c * BLOCK_C + tl.arange(0, BLOCK_C)")
        return "for start in range(part * BLOCK_R, n_rows, step):"

    def _define_rows(self) -> None:
        if self.is_ragged:
            self.writer.line(ROWS_ALIKE)
            self.writer.dense = DENSE
            return
        self.writer.line("row = (start + tl.arange(0, BLOCK_R))[:, None]")
        self.writer.line("in_row = row < n_rows")

    def _store(self, stored: Sequence[SSAValue]) -> None:
        for value in stored:
            place, axes = self.row * self.space.columns + self.col, frozenset({"row", "col"})
            if self._is_per_row(value):
                place, axes = self.row, frozenset({"row"})
            self.values.store(self.draft, value, place, axes)

    # The result

    def _kernel(self) -> Kernel:
        space = self.space
        whole = space.reduces_rows and not self.in_parts
        fixed: dict[str, int] = {"n_cols": space.columns} if whole else {}
        if whole:
            fixed["BLOCK_C"] = power_of_2(space.columns)
        sizes = {"n_rows": space.rows} | ({} if whole else {"n_cols": space.columns})
        if space.aside:
            sizes["n_aside"] = space.aside
            fixed["BLOCK_A"] = _ASIDE_BLOCK
        configs = configs_of(self.region, in_parts=self.in_parts)
        return self.draft.kernel(sizes, configs, self.partial, fixed)
