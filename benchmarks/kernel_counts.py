"""Launches and bytes of the kernels of a step, counted from their sources."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from xdsl.ir import Operation

from shardweave.backends.triton.kernels.generate import generate
from shardweave.backends.triton.source.joining import partial_results_of
from shardweave.backends.triton.source.parts import is_sum_in_memory, joined_together
from shardweave.backends.triton.source.source import Kernel
from shardweave.backends.triton.source.writer import UnfitError
from shardweave.ir.dialects.dist import DistOp, SliceOp
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.storage import is_view
from shardweave.ir.program.traffic import accesses, bytes_moved


@dataclass
class Counts:
    """Launches and bytes of a step, by kind of kernel and name."""

    launches: Counter[tuple[str, str]] = field(default_factory=Counter)
    moved: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, kind: str, name: str, moved: int, launches: int = 1) -> None:
        self.launches[kind, name] += launches
        self.moved[kind, name] += moved


def passes_over(source: str, pointer: str) -> int:
    """How often a kernel reads what a pointer points to: in how many of its loops, at least once.

    What is read several times within one loop counts once: it is in registers or the cache.
    """
    in_loop, indent, loops, outside = False, 0, 0, 0
    seen = False
    for line in source.splitlines():
        depth = len(line) - len(line.lstrip())
        if in_loop and line.strip() and depth <= indent:
            loops, in_loop = loops + seen, False
        if not in_loop and re.match(r"\s*(?:for|while) ", line):
            in_loop, indent, seen = True, depth, False
        if re.search(rf"tl\.load\({pointer}\b", line):
            if in_loop:
                seen = True
            else:
                outside = 1
    loops += in_loop and seen
    return max(1, loops, outside)


def own_counts(program: Program) -> Counts:
    """Of a fused local program. Collectives are not counted."""
    counts = Counts()
    kernels: dict[FusedOp, Kernel] = {}
    for op in program.ops:
        if isinstance(op, FusedOp):
            if is_sum_in_memory(op):
                continue  # its rows are parts
            kernel = _add_region(counts, op)
            if kernel is not None:
                kernels[op] = kernel
        elif is_call(op):
            counts.add("library", op.name, bytes_moved(op))
    for joining in joined_together(program, kernels):
        moved = sum(p.num_bytes + p.num_columns * p.target.itemsize for p in joining.results)
        counts.add("kernel", "finish", moved, launches=int(joining.beside is None))
    return counts


def _add_region(counts: Counts, op: FusedOp) -> Kernel | None:
    """Count a region's kernel, which writes some results in parts; or its ops, if it has none."""
    try:
        kernel = generate(op)
    except UnfitError:
        for inner in op.fused_ops:
            if not is_view(inner):
                counts.add("library", inner.name, bytes_moved(inner))
        return None
    read, written = accesses(op.fused_ops)
    pointers = dict(zip(kernel.region.inputs, kernel.pointer_names, strict=False))
    moved = sum(size * passes_over(kernel.source, pointers[v]) for v, size in read.items())
    in_parts = {kernel.region.stored[number] for number in kernel.partial}
    moved += sum(size for value, size in written.items() if value not in in_parts)
    moved += sum(parts.num_bytes for parts in partial_results_of(kernel, kernel.configs[0]))
    counts.add("kernel", kernel.name, moved)
    return kernel


def is_call(op: Operation) -> bool:
    """Whether an op that is in no kernel is a call of the library: no view, and no message."""
    if isinstance(op, SliceOp):  # of the leading dim in one block, it is a view
        return op.dim > 0 or op.block < shape_of(op.results[0])[0]
    return not (isinstance(op, DistOp) or is_view(op))
