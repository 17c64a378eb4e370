"""Launches and bytes of the kernels of a step, counted from their sources."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from shardweave.backends.triton.generate import generate
from shardweave.backends.triton.launch import num_partial
from shardweave.backends.triton.source import Kernel
from shardweave.backends.triton.writer import UnfitError
from shardweave.ir.dist import DistOp, SliceOp
from shardweave.ir.kernel import FusedOp
from shardweave.ir.program import Program
from shardweave.ir.storage import is_view
from shardweave.ir.traffic import accesses, bytes_moved


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
        if not in_loop and re.match(r"\s*for ", line):
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
    for op in program.ops:
        if isinstance(op, FusedOp):
            _add_region(counts, op)
        elif isinstance(op, SliceOp) or not (isinstance(op, DistOp) or is_view(op)):
            counts.add("library", op.name, bytes_moved(op))
    return counts


def _add_region(counts: Counts, op: FusedOp) -> None:
    try:
        kernel = generate(op)
    except UnfitError:
        for inner in op.fused_ops:
            if not is_view(inner):
                counts.add("library", inner.name, bytes_moved(inner))
        return
    read, written = accesses(op.fused_ops)
    pointers = dict(zip(kernel.region.inputs, pointers_of(kernel), strict=False))
    moved = sum(written.values())
    moved += sum(size * passes_over(kernel.source, pointers[v]) for v, size in read.items())
    if kernel.partial:
        num_parts = num_partial(kernel, kernel.configs[0])
        parts = sum(dtype.itemsize for dtype in kernel.partial_dtypes)
        parts *= num_parts * kernel.region.space.columns
        results = [written[kernel.region.stored[number]] for number in kernel.partial]
        moved += parts - sum(results)
        counts.add("kernel", "finish", parts + sum(results))
    counts.add("kernel", kernel.name, moved)


def pointers_of(kernel: Kernel) -> list[str]:
    """The names of a kernel's parameters, inputs first."""
    found = re.search(r"^def \w+\(\n(.*?)\n\):", kernel.source, re.DOTALL | re.MULTILINE)
    assert found is not None
    return [line.strip().rstrip(",") for line in found[1].splitlines()]
