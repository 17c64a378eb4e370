"""Statistics of a program, counted in one walk over its ops."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from xdsl.ir import Operation

from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.dist import CollectiveOp, sent_bytes
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.dialects.types import num_bytes, tensor_type_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.ops.registry import flops_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.program_stats import CollectiveStats, ProgramStats
from shardweave.ir.program.staged import functions_of, is_staged, runs_of
from shardweave.ir.program.storage import kept_bytes
from shardweave.ir.program.traffic import bytes_by_block


def _ops(program: Program) -> Iterator[tuple[Operation, int]]:
    """Yield each op of a step and how often it runs; for a staged program, of all stages."""
    if not is_staged(program):
        yield from ((op, 1) for op in program.ops)
        return
    times = Counter(run.function for run in runs_of(program))
    for name, function in functions_of(program).items():
        yield from ((op, times[name]) for op in function.ops)


def stats(program: Program) -> ProgramStats:
    """Count a program's statistics, over all stages if it is staged. Takes time linear in ops."""
    ops: Counter[str] = Counter()
    flops: Counter[str] = Counter()
    groups: defaultdict[tuple[str, tuple[str, ...], str], list[float]] = defaultdict(
        lambda: [0, 0, 0.0]
    )
    mesh = program.mesh or Mesh()
    for op, times in _ops(program):
        phase = phase_of(op)
        ops[phase] += times
        flops[phase] += times * (
            sum(map(flops_of, op.fused_ops)) if isinstance(op, FusedOp) else flops_of(op)
        )
        if isinstance(op, CollectiveOp):  # started ones are subclasses
            group = groups[op.kind(), op.axes, phase]
            group[0] += times
            group[1] += times * sum(num_bytes(tensor_type_of(v)) for v in op.operands)
            group[2] += times * sent_bytes(op, mesh)
    parameters = sum(
        num_bytes(tensor_type_of(s.value)) for s in program.arguments if s.kind == "param"
    )
    collectives = tuple(
        CollectiveStats(*key, int(count), int(size), sent)
        for key, (count, size, sent) in groups.items()
    )
    kept = kept_bytes(program) if ops["backward"] and not is_staged(program) else None
    moved = bytes_by_block(program)
    return ProgramStats(dict(ops), dict(flops), parameters, collectives, kept, moved)
