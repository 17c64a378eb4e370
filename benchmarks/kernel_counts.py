"""Launches and bytes of the kernels of a step, counted from their sources."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from xdsl.ir import Operation

from shardweave.backends.triton.generate import generate
from shardweave.backends.triton.joining import parts_of
from shardweave.backends.triton.parts import is_sum_in_memory, joined_together
from shardweave.backends.triton.source import Kernel
from shardweave.backends.triton.writer import UnfitError
from shardweave.ir.annotations import phase_of
from shardweave.ir.dist import DistOp, SliceOp
from shardweave.ir.facts import facts_of
from shardweave.ir.fusible import role_of
from shardweave.ir.kernel import FusedOp
from shardweave.ir.program import Program
from shardweave.ir.storage import is_view, layout_source
from shardweave.ir.traffic import accesses, bytes_moved, traffic
from shardweave.ir.types import shape_of


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
        elif _is_call(op):
            counts.add("library", op.name, bytes_moved(op))
    for results in joined_together(program, kernels):
        moved = sum(p.num_bytes + p.num_columns * p.target.itemsize for p in results)
        counts.add("kernel", "finish", moved)
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
    pointers = dict(zip(kernel.region.inputs, pointers_of(kernel), strict=False))
    moved = sum(size * passes_over(kernel.source, pointers[v]) for v, size in read.items())
    in_parts = {kernel.region.stored[number] for number in kernel.partial}
    moved += sum(size for value, size in written.items() if value not in in_parts)
    moved += sum(parts.num_bytes for parts in parts_of(kernel, kernel.configs[0]))
    counts.add("kernel", kernel.name, moved)
    return kernel


def lower_bound(program: Program) -> Counts:
    """What no fusion of an unfused local program can go below, its library calls as they are.

    Bytes: those of the calls, and of all other ops of a phase as one kernel, which reads and
    writes once what comes from or goes to calls, messages and the other phase. Launches: the calls,
    and a kernel wherever one has to wait for a call that waits for another kernel.
    """
    counts = Counts()
    phases: tuple[list[Operation], list[Operation]] = [], []
    waves: dict[Operation, int] = {}
    has_turned = False
    for op in program.ops:
        is_kernel = _is_for_kernels(op)
        has_turned |= phase_of(op) == "backward"
        makers = [layout_source(value).owner for value in op.operands]
        before = [
            waves[maker] + (is_kernel and not _is_for_kernels(maker))
            for maker in makers
            if isinstance(maker, Operation)
        ]
        waves[op] = max([int(is_kernel), *before])
        if is_kernel or facts_of(op).is_layout:
            phases[has_turned].append(op)
        elif _is_call(op):
            counts.add("library", op.name, bytes_moved(op))
    for phase, ops in zip(("forward", "backward"), phases, strict=True):
        counts.add("kernel", phase, traffic(ops), launches=0)
    counts.add("kernel", "one after another", 0, launches=max(waves.values(), default=0))
    return counts


def _is_call(op: Operation) -> bool:
    """Whether an op that is in no kernel is a call of the library: no view, and no message."""
    if isinstance(op, SliceOp):  # of the leading dim in one block, it is a view
        return op.dim > 0 or op.block < shape_of(op.results[0])[0]
    return not (isinstance(op, DistOp) or is_view(op))


def _is_for_kernels(op: Operation) -> bool:
    """Whether a kernel computes an op, but for products."""
    return role_of(op) not in (None, "view", "matmul")


def pointers_of(kernel: Kernel) -> list[str]:
    """The names of a kernel's parameters, inputs first."""
    found = re.search(r"^def \w+\(\n(.*?)\n\):", kernel.source, re.DOTALL | re.MULTILINE)
    assert found is not None
    return [line.strip().rstrip(",") for line in found[1].splitlines()]
