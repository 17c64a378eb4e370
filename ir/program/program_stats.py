"""The numbers of a program: ops, FLOPs, parameters, communication, memory."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CollectiveStats:
    """Collectives of one kind, over the same axes, in one phase.

    count: messages. bytes: bytes of their operands on one rank. sent_bytes: bytes that one rank
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
        """Count the collectives of a kind, over exactly these axes (None: any)."""
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
