"""The numbers of two programs, side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardweave.ir.program_stats import ProgramStats
from shardweave.planners.cost.simulation import Simulation


@dataclass(frozen=True)
class Number:
    """One number of both programs. unit: "", "bytes", "flops" or "s". None: it has none."""

    name: str
    unit: str
    before: float | None
    after: float | None


def program_numbers(a: ProgramStats, b: ProgramStats) -> Iterator[Number]:
    """Ops and FLOPs by phase, bytes, and collectives by kind and axes."""
    for phase in dict.fromkeys([*a.ops, *b.ops]):
        yield Number(f"ops, {phase}", "", a.ops.get(phase, 0), b.ops.get(phase, 0))
    for phase in dict.fromkeys([*a.flops, *b.flops]):
        yield Number(f"FLOPs, {phase}", "flops", a.flops.get(phase, 0), b.flops.get(phase, 0))
    yield Number("FLOPs, all", "flops", sum(a.flops.values()), sum(b.flops.values()))
    yield Number("parameters", "bytes", a.parameter_bytes, b.parameter_bytes)
    yield Number("kept for the backward pass", "bytes", a.kept_bytes, b.kept_bytes)
    sums = _by_axes(a), _by_axes(b)
    for kind, axes in dict.fromkeys([*sums[0], *sums[1]]):
        name = f"{kind} over {axes}"
        before, after = sums[0][kind, axes], sums[1][kind, axes]
        yield Number(name, "", before[0], after[0])
        yield Number(f"{name}, operands", "bytes", before[1], after[1])
        yield Number(f"{name}, sent", "bytes", before[2], after[2])


def _by_axes(
    stats: ProgramStats,
) -> defaultdict[tuple[str, str], tuple[int, int, float]]:
    """Messages, bytes of operands and bytes sent, by kind and axes."""
    found: defaultdict[tuple[str, str], tuple[int, int, float]] = defaultdict(lambda: (0, 0, 0.0))
    for c in stats.collectives:
        key = c.kind, ", ".join(c.axes)
        count, size, sent = found[key]
        found[key] = count + c.count, size + c.bytes, sent + c.sent_bytes
    return found


_SIMULATED: tuple[tuple[str, str, Callable[[Simulation], float]], ...] = (
    ("simulated step", "s", lambda s: s.time_s),
    ("simulated compute", "s", lambda s: s.compute_s),
    ("simulated communication", "s", lambda s: sum(s.communication_s.values())),
    ("simulated exposed communication", "s", lambda s: s.exposed_communication_s),
    ("simulated peak memory", "bytes", lambda s: s.peak_bytes),
)


def simulated_numbers(a: Simulation, b: Simulation) -> Iterator[Number]:
    """Seconds and peak memory of a simulated step."""
    for name, unit, of in _SIMULATED:
        yield Number(name, unit, of(a), of(b))
