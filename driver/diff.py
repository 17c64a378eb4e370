"""diff: what changed from one program to another, in structure and in numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardweave.ir.inspect.diff import Change, Group, StructuralDiff, count_by_kind, structural_diff
from shardweave.ir.inspect.stats import ProgramStats
from shardweave.ir.program import Program
from shardweave.ir.verify.program import check
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.cost.simulate import Simulation, simulate


@dataclass(frozen=True)
class Number:
    """One number of both programs. unit: "", "bytes", "flops" or "s". None: it has none."""

    name: str
    unit: str
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Diff:
    """What changed. `print(diff)` says it; `save_html` writes it side by side."""

    structure: StructuralDiff
    simulations: tuple[Simulation, Simulation] | None = None

    @property
    def changes(self) -> tuple[Change, ...]:
        return self.structure.changes

    @property
    def is_empty(self) -> bool:
        """Whether both programs are the same but for the names of values."""
        return not self.changes

    def numbers(self) -> list[Number]:
        """The numbers of both programs, per rank where they are local."""
        found = list(_program_numbers(*self.structure.stats))
        if self.simulations is not None:
            found += _simulated_numbers(*self.simulations)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The diff as JSON data."""
        structure = self.structure
        return {
            "same": self.is_empty,
            "num_ops": list(structure.num_ops),
            "num_hunks": structure.num_hunks,
            "counts": count_by_kind(structure),
            "groups": [_group_dict(group) for group in structure.groups()],
            "changes": [_change_dict(change) for change in self.changes],
            "numbers": [vars(number) for number in self.numbers()],
        }

    def save_html(self, path: str | Path, names: tuple[str, str] = ("before", "after")) -> None:
        """Write a page that needs no other file. names: how to call the two programs."""
        from shardweave.driver.report.diff_html import page

        Path(path).write_text(page(self, names), encoding="utf-8")

    def __str__(self) -> str:
        from shardweave.driver.report.diff_text import plain_text

        return plain_text(self)


def diff(a: Program, b: Program, *, cluster: Cluster | str | Path | None = None) -> Diff:
    """What has to change in `a` to get `b`: ops added, removed, moved and changed.

    Ops are matched by what they compute from what, not by text or names of values. With a
    cluster (a Cluster, a preset's name or a YAML file) both are simulated too.

    Raises ValueError for a program that is not well formed, or with a cluster for one that
    cannot be simulated. Takes O(n log n) in the ops, see `ir.diff_match`.
    """
    for program in (a, b):
        check(program)
    structure = structural_diff(a, b)
    if cluster is None:
        return Diff(structure)
    found = find_cluster(cluster)
    return Diff(structure, (simulate(a, found), simulate(b, found)))


def _program_numbers(a: ProgramStats, b: ProgramStats) -> Iterator[Number]:
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


def _simulated_numbers(a: Simulation, b: Simulation) -> Iterator[Number]:
    for name, unit, of in _SIMULATED:
        yield Number(name, unit, of(a), of(b))


def _group_dict(group: Group) -> dict[str, Any]:
    return {
        "blocks": list(group.blocks),
        "num_changes": len(group.changes),
        "changes": [_change_dict(change) for change in group.changes],
    }


def _change_dict(change: Change) -> dict[str, Any]:
    return {
        "kind": change.kind,
        "op": change.op,
        "layer": change.layer,
        "phase": change.phase,
        "hunk": change.hunk,
        "at": list(change.at),
        "before": change.before,
        "after": change.after,
        "details": [{"what": d.what, "before": d.before, "after": d.after} for d in change.details],
    }
