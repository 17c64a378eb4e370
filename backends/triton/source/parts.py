"""Partial results of kernels: which of them wait, until when, and which kernel joins them.

A reduction over all rows takes two kernels: each program of the first leaves a partial result, and
a second joins them. Gradients of biases and norms are seldom read soon, so those of several kernels
wait for one launch. A sum of a few rows in memory waits too: its rows are the partial results. The
kernel of a lookup's gradient also joins waiting results, which saves their launch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from xdsl.ir import Operation, SSAValue

from shardweave.backends.triton.kernels.reductions import accumulation_kind
from shardweave.backends.triton.source.joining import PartialResult, partial_results_of
from shardweave.backends.triton.source.region import Region, region_of
from shardweave.backends.triton.source.source import Kernel
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.ops.fusible import column_results
from shardweave.ir.program.iteration_space import IterationSpace, space_of, sum_of_few_rows
from shardweave.ir.program.program import Program
from shardweave.ir.program.storage import is_view, layout_source

MAX_RESULTS = 24
"""Limit on the results that one launch joins: it has two pointers for each."""

MAX_BYTES = 32 << 20
"""Limit on waiting partial results, to fit into the cache (50 MiB on an H100, 40 on an A100)."""

Place = tuple[Tensor, Tensor]
"""The tensor of a result's partial results, and the tensor to join them into."""


class PartsQueue:
    """Queue of partial results to be joined. join: joins results, given them and their places.
    at_once: whether results are joined as soon as they are added."""

    def __init__(
        self,
        join: Callable[[Sequence[PartialResult], Sequence[Any]], None],
        *,
        at_once: bool = False,
    ) -> None:
        self._join = join
        self._at_once = at_once
        self._results: list[PartialResult] = []
        self._places: list[Any] = []

    def add(self, results: Sequence[PartialResult], places: Sequence[Any]) -> None:
        """Queue a kernel's partial results; join the earlier ones first if there are too many."""
        both = [*self._results, *results]
        made = sum(parts.num_bytes for parts in both if not parts.in_memory)
        if len(both) > MAX_RESULTS or made > MAX_BYTES:
            self.join()
        self._results += results
        self._places += places
        if self._at_once:
            self.join()

    def join(self) -> None:
        """Join all waiting results, which may be read from then on."""
        if self._results:
            self._join(*self.take())

    def take(self) -> tuple[list[PartialResult], list[Any]]:
        """Empty the queue; return its results and places, for a kernel that joins them itself."""
        taken = self._results, self._places
        self._results, self._places = [], []
        return taken


def joins(program: Program, at_once: Collection[SSAValue] = ()) -> dict[SSAValue, Operation]:
    """Map each value left as partial results, and its views, to the op before which they are
    joined.

    All waiting values are joined before the first op that reads one of them, before the return, or
    right after the op of a value in `at_once`. Takes time linear in the ops.
    """
    waiting: list[SSAValue] = []
    join_of: dict[SSAValue, Operation] = {}

    def join_before(op: Operation) -> None:
        join_of.update(dict.fromkeys(waiting, op))
        waiting.clear()

    for op in program.ops:
        if is_view(op):
            waiting += op.results if op.operands[0] in waiting else ()
        elif any(value in waiting for value in op.operands):
            join_before(op)
        waiting += in_parts(op)
        if any(value in at_once for value in op.results) and op.next_op is not None:
            join_before(op.next_op)
    join_before(program.return_op)
    return join_of


def in_parts(op: Operation) -> list[SSAValue]:
    """Return the results that a fused op leaves as partial results if a kernel computes it."""
    if not isinstance(op, FusedOp):
        return []
    if is_sum_in_memory(op):
        return list(op.results)
    space = space_of(op.fused_ops, list(map(layout_source, op.yielded)))
    if isinstance(space, IterationSpace) and space.holds_columns:
        return []
    columns = {value for inner in op.fused_ops for value in column_results(inner)}
    pairs = zip(op.results, op.yielded, strict=True)
    return [result for result, value in pairs if layout_source(value) in columns]


def is_sum_in_memory(op: FusedOp) -> bool:
    """True if a region only sums a few rows of an input. It needs no kernel of its own: the rows
    are queued as partial results, which one launch joins."""
    reducing = sum_of_few_rows(op.fused_ops)
    return reducing is not None and reducing.operands[0] in op.block.args


def sum_in_memory(region: Region) -> tuple[int, PartialResult]:
    """Return the index of the input with the rows to sum, and its rows as partial results."""
    op = sum_of_few_rows(region.ops)
    assert op is not None
    rows, (made,) = op.operands[0], region.stored
    shape = region.space.rows, region.space.columns
    types = region.dtype_of(rows), region.dtype_of(made)
    parts = PartialResult(accumulation_kind(op), *shape, *types, in_memory=True)
    return region.inputs.index(rows), parts


def joins_others(kernel: Kernel) -> bool:
    """True if a kernel also joins waiting partial results, in instances that follow its own."""
    return kernel.family == "lookups"


@dataclass(frozen=True)
class Joining:
    """Results that one launch joins. beside: the region whose kernel also joins them, or None."""

    results: list[PartialResult]
    beside: FusedOp | None = None


def joined_together(program: Program, kernels: Mapping[FusedOp, Kernel]) -> list[Joining]:
    """List the results that each launch of a program joins, at default configurations."""
    joinings: list[Joining] = []
    queue = PartsQueue(lambda results, _: joinings.append(Joining(list(results))))
    places = set(joins(program).values())
    for op in program.ops:
        if op in places:
            queue.join()
        if isinstance(op, FusedOp):
            kernel = kernels.get(op)
            if kernel is not None and joins_others(kernel) and (taken := queue.take()[0]):
                joinings.append(Joining(taken, op))
            results = [] if kernel is None else partial_results_of(kernel, kernel.configs[0])
            if is_sum_in_memory(op):
                results = [sum_in_memory(region_of(op))[1]]
            queue.add(results, results)
    queue.join()
    return joinings
