"""diff: what changed from one program to another, in structure and in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardweave.driver.report.diff_text import (
    Number,
    plain_text,
    program_numbers,
    simulated_numbers,
)
from shardweave.driver.report.explorer.page import explorer_page
from shardweave.driver.report.explorer.recorder import Recorder
from shardweave.ir.inspect.diff import (
    Change,
    ChangeGroup,
    StructuralDiff,
    count_by_kind,
    structural_diff,
)
from shardweave.ir.program.program import Program
from shardweave.ir.verify.program import check
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.predict.pipeline.simulation import PipelineSimulation
from shardweave.planners.predict.predict import simulate_step
from shardweave.planners.simulate.simulation import Simulation

Simulated = Simulation | PipelineSimulation


@dataclass(frozen=True)
class Diff:
    """The difference of two programs. `print` shows it; `save_html` writes it side by side.

    cluster: the cluster on which both programs were simulated.
    """

    structure: StructuralDiff
    programs: tuple[Program, Program]
    cluster: Cluster | None = None
    simulations: tuple[Simulated, Simulated] | None = None

    @property
    def changes(self) -> tuple[Change, ...]:
        return self.structure.changes

    @property
    def is_empty(self) -> bool:
        """True if both programs are the same except for the names of values."""
        return not self.changes

    def numbers(self) -> list[Number]:
        """The numbers of both programs, per rank where they are local."""
        numbers = list(program_numbers(*self.structure.stats))
        if self.simulations is not None:
            numbers += simulated_numbers(*self.simulations)
        return numbers

    def to_dict(self) -> dict[str, Any]:
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
        """Write a self-contained HTML page. names: titles of the two programs."""
        recorder = Recorder(self.cluster)
        for name, program in zip(names, self.programs, strict=True):
            recorder.note(name, program)
        text = explorer_page(recorder.moments, recorder.words, title=" and ".join(names))
        Path(path).write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        return plain_text(self.structure, self.numbers())


def diff(a: Program, b: Program, *, cluster: Cluster | str | Path | None = None) -> Diff:
    """List the changes that turn program `a` into `b`: ops added, removed, moved and changed.

    Ops are matched by what they compute and from which operands, not by text or names. With a
    cluster (a Cluster, a preset's name or a YAML file) both programs are simulated too.

    Raises ValueError for a program that is not well formed, or with a cluster for one that cannot
    be simulated. Takes O(n log n) in the ops, see `ir.diff_match`.
    """
    for program in (a, b):
        check(program)
    structure = structural_diff(a, b)
    if cluster is None:
        return Diff(structure, (a, b))
    known = find_cluster(cluster)
    before, after = (simulate_step(program, known, optimizer_multiplier=0.0) for program in (a, b))
    return Diff(structure, (a, b), known, (before, after))


def _group_dict(group: ChangeGroup) -> dict[str, Any]:
    changes = [_change_dict(change) for change in group.changes]
    return {"blocks": list(group.blocks), "num_changes": len(changes), "changes": changes}


def _change_dict(change: Change) -> dict[str, Any]:
    details = [{"what": d.what, "before": d.before, "after": d.after} for d in change.details]
    return asdict(change) | {"at": list(change.at), "details": details}
