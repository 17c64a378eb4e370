"""What a program does, in numbers: ops, FLOPs, parameters, communication."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from shardweave.ir.dist import COLLECTIVES, DistOp, sent_bytes
from shardweave.ir.flops import flops_of
from shardweave.ir.kernel import FusedOp
from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program
from shardweave.ir.regions import kept_bytes
from shardweave.ir.syntax import phase_of
from shardweave.ir.traffic import bytes_by_block
from shardweave.ir.types import num_bytes, tensor_type_of


@dataclass(frozen=True)
class CollectiveStats:
    """Collectives of one kind, over the same axes, in one phase.

    count: messages. bytes: bytes of their operands on one rank. sent_bytes: what one rank
    sends for them with ring algorithms.
    """

    kind: str
    axes: tuple[str, ...]
    phase: str
    count: int
    bytes: int
    sent_bytes: float


@dataclass(frozen=True)
class ProgramStats:
    """Numbers of one program; per rank if it is local.

    ops: ops by phase. flops: of matrix products, convolutions and attention, by phase.
    parameter_bytes: of the parameters. collectives: by kind, axes and phase. kept_bytes: of the
    forward pass's results that the backward pass reads; None without a backward pass.
    moved_bytes: that ops read from memory and write to it, by repeated block ("h.0"; "" has the
    rest); a fused region moves its inputs and outputs once.
    """

    ops: dict[str, int]
    flops: dict[str, int]
    parameter_bytes: int
    collectives: tuple[CollectiveStats, ...]
    kept_bytes: int | None = None
    moved_bytes: dict[str, int] = field(default_factory=lambda: dict[str, int]())

    def count(self, kind: str | None = None, axes: tuple[str, ...] | None = None) -> int:
        """How many collectives of a kind, over exactly these axes (None: any)."""
        return sum(
            c.count for c in self.collectives if kind in (None, c.kind) and axes in (None, c.axes)
        )

    def __str__(self) -> str:
        lines = [
            "ops: " + ", ".join(f"{n} {phase}" for phase, n in self.ops.items()),
            "flops: " + ", ".join(f"{n:.3e} {phase}" for phase, n in self.flops.items() if n),
            f"parameters: {self.parameter_bytes / 2**20:.2f} MiB",
        ]
        lines.append(f"moved in memory: {sum(self.moved_bytes.values()) / 2**20:.2f} MiB")
        if self.kept_bytes is not None:
            lines.append(f"kept for the backward pass: {self.kept_bytes / 2**20:.3f} MiB")
        lines += [
            f"{c.kind} over {', '.join(c.axes)} ({c.phase}): {c.count}, {c.bytes / 2**20:.3f} MiB"
            for c in self.collectives
        ]
        return "\n".join(lines)


def stats(program: Program) -> ProgramStats:
    """Count what a program does. Linear in its ops."""
    ops: Counter[str] = Counter()
    flops: Counter[str] = Counter()
    groups: defaultdict[tuple[str, tuple[str, ...], str], list[float]] = defaultdict(
        lambda: [0, 0, 0.0]
    )
    mesh = program.mesh or Mesh()
    for op in program.ops:
        phase = phase_of(op)
        ops[phase] += 1
        flops[phase] += (
            sum(map(flops_of, op.fused_ops)) if isinstance(op, FusedOp) else flops_of(op)
        )
        if isinstance(op, COLLECTIVES):  # started ones are subclasses
            assert isinstance(op, DistOp)
            group = groups[op.name.removeprefix("dist.").removeprefix("start_"), op.axes, phase]
            group[0] += 1
            group[1] += sum(num_bytes(tensor_type_of(v)) for v in op.operands)
            group[2] += sent_bytes(op, mesh)
    parameters = sum(
        num_bytes(tensor_type_of(s.value)) for s in program.arguments if s.kind == "param"
    )
    collectives = tuple(
        CollectiveStats(*key, int(count), int(size), sent)
        for key, (count, size, sent) in groups.items()
    )
    kept = kept_bytes(program) if ops["backward"] else None
    moved = bytes_by_block(program)
    return ProgramStats(dict(ops), dict(flops), parameters, collectives, kept, moved)
