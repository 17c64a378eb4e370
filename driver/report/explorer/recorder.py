"""Record of a pipeline's work on a program, pass by pass, as the data of the explorer's page."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from inspect import getdoc
from typing import Any

from xdsl.ir import Operation
from xdsl.passes import ModulePass

from shardweave.driver.report.diff_text import (
    Simulated,
    number_cells,
    program_numbers,
    simulated_numbers,
)
from shardweave.driver.report.explorer.part import KINDS, FunctionPart, Words
from shardweave.driver.report.html import memory_html, timeline_html
from shardweave.driver.report.page import groups_text
from shardweave.ir.dialects.dist import ReshardOp
from shardweave.ir.inspect.diff_table import Interner, table_of
from shardweave.ir.inspect.side_by_side import (
    ancestors_of,
    by_layers,
    pairs_of,
    same_by_name,
    unchanged,
)
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.program_stats import ProgramStats
from shardweave.ir.program.staged import functions_of, is_staged
from shardweave.passes.observers import Observer
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.quantity import bytes_text, seconds_text
from shardweave.planners.lowering.stages.picture import moments_of
from shardweave.planners.lowering.stages.picture import schedule_table_of as schedule_of
from shardweave.planners.predict.predict import simulate_step
from shardweave.planners.simulate.simulation import Simulation

Json = dict[str, Any]

STEP = ""
"""The name of the only function of a program without stages."""


class Recorder(Observer):
    """Records the program after each pass of a pipeline. `moments`: the page's data; `words`: its
    texts.

    cluster: the cluster to simulate on; None: no simulation. optimizer_multiplier: bytes of
    optimizer state per byte of parameters, for the memory; None: Adam's. precision, update: as in
    `Plan`.
    """

    def __init__(
        self,
        cluster: Cluster | None,
        *,
        optimizer_multiplier: float | None = 0.0,
        precision: str = "",
        update: str = "",
    ) -> None:
        self.cluster, self.precision, self.update = cluster, precision, update
        self.optimizer_multiplier = optimizer_multiplier
        self.words = Words()
        self.moments: list[Json] = []
        self._program: Program | None = None
        self._interner = Interner()
        self._parts: dict[str, FunctionPart] = {}
        self._simulated: Simulated = None
        self._stats: ProgramStats | None = None
        self._start_s = 0.0

    def before(self, pass_: ModulePass, program: Program) -> None:
        if self._program is None:
            self.note("input", program, summary="The program that the passes are given.")
        self._start_s = time.perf_counter()

    def after(self, pass_: ModulePass, program: Program) -> None:
        seconds = time.perf_counter() - self._start_s
        summary = (getdoc(type(pass_)) or "").partition("\n\n")[0]
        self.note(pass_.name, program, spec=str(pass_.spec()), summary=summary, seconds=seconds)

    def note(
        self,
        name: str,
        program: Program,
        *,
        spec: str = "",
        summary: str = "",
        seconds: float | None = None,
        choices: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Add a moment: the current program, compared with the one before. seconds: time
        of the pass. choices: (name, text) of each choice of the plan that was run."""
        head: Json = {
            "name": name,
            "spec": spec or name,
            "summary": " ".join(summary.split()),
            "seconds": "" if seconds is None else seconds_text(seconds),
            "choices": [list(row) for row in choices],
        }
        if program == self._program:
            self.moments.append(head | {"same": True})
            return
        kept = program.clone()
        counts, parts = self._compared(kept)
        stats = kept.stats()
        simulated, why_not = self._simulate(kept)
        rail = list(_rail(kept, stats, simulated))
        before = self._stats or stats, self._simulated if self.moments else simulated
        numbers = [*program_numbers(before[0], stats), *simulated_numbers(before[1], simulated)]
        data = head | {
            "same": False,
            "counts": {kind: counts[kind] for kind in KINDS if counts[kind]},
            "parts": parts,
            "rail": [[name, text] for name, text, _ in rail],
            "amounts": {name: amount for name, _, amount in rail},
            "numbers": [list(number_cells(number)) for number in numbers],
            "axes": _axes(kept),
            "whyNot": why_not,
        }
        self.moments.append(data | self._pictures(kept, simulated))
        self._program, self._stats, self._simulated = kept, stats, simulated

    # The ops

    def _compared(self, program: Program) -> tuple[Counter[str], list[Json]]:
        """Compare functions with the last moment's; returns change counts by kind, and data."""
        old, self._parts = self._parts, {}
        counts: Counter[str] = Counter()
        parts: list[Json] = []
        first_row = 0
        for name, function in _functions(program).items():
            table = table_of(function, self._interner)
            before, whole = old.get(name), old.get(STEP)
            rows: dict[Operation, int] = {}
            if before is not None:
                pairs, changes = pairs_of(before.table, table)
                blocks = before.table.blocks | table.blocks
                counts.update(change.kind for change in changes)
                rows = before.rows_of(ancestors_of(pairs))
            else:
                pairs, blocks = unchanged(function), table.blocks
                if whole is not None:
                    rows = whole.rows_of(same_by_name(whole.program, function))
            layers = by_layers(pairs, blocks)
            part = FunctionPart(name, table, layers, before, self.words, first_row)
            parts.append(part.data(rows))
            self._parts[name] = part
            first_row += part.num_rows
        for part in self._parts.values():
            part.before = None  # which else would hold all programs
        return counts, parts

    # Time and memory

    def _simulate(self, program: Program) -> tuple[Simulated, str]:
        """Simulate the step; returns the simulation, or None and the reason."""
        mesh = program.mesh or Mesh()
        if self.cluster is None:
            return None, ""
        if not program.is_local and mesh.num_devices > 1:
            return None, (
                "The program is still global; the work and times of one device are shown after "
                "the pass insert-collectives."
            )
        simulation = simulate_step(
            program,
            self.cluster,
            optimizer_multiplier=self.optimizer_multiplier,
            precision=self.precision,
            update=self.update,
        )
        return simulation, ""

    def _pictures(self, program: Program, simulated: Simulated) -> Json:
        """Pictures of streams, memory and schedule, as indices of HTML texts, and a table."""
        pictures: Json = {"streams": -1, "memory": -1, "schedule": []}
        if simulated is not None:
            pictures["streams"] = self.words.number(timeline_html(simulated))
        if isinstance(simulated, Simulation):
            pictures["memory"] = self.words.number(memory_html(program, simulated))
        if is_staged(program):
            pictures["schedule"] = moments_of(*schedule_of(program))
        return pictures


def _functions(program: Program) -> dict[str, Program]:
    if not is_staged(program):
        return {STEP: program}
    return dict(functions_of(program))


def _rail(
    program: Program, stats: ProgramStats, simulated: Simulated
) -> Iterator[tuple[str, str, float]]:
    """Yield (name, text, number) for the page's side rail at a moment. The page compares numbers,
    since the units in the texts vary."""
    ops = sum(stats.ops.values())
    yield "ops", f"{ops:,}", ops
    reshards = sum(isinstance(op, ReshardOp) for op in program.ops)
    if reshards:
        yield "reshards", f"{reshards:,}", reshards
    axes = dict.fromkeys(c.axes for c in stats.collectives)
    for names in axes:
        rows = [c for c in stats.collectives if c.axes == names]
        count, size = sum(c.count for c in rows), sum(c.sent_bytes for c in rows)
        yield ", ".join(names), f"{count:,} x, {bytes_text(size)}", size
    if simulated is not None:
        exposed_s = simulated.exposed_communication_s
        yield "step", seconds_text(simulated.step_s), simulated.step_s
        yield "exposed", seconds_text(exposed_s), exposed_s
        yield "memory", bytes_text(simulated.peak_bytes), simulated.peak_bytes


def _axes(program: Program) -> list[list[str]]:
    """The axes of the mesh: name, kind, size, and the devices of each group."""
    mesh = program.mesh or Mesh()
    return [
        [
            axis.name,
            axis.kind,
            str(axis.size),
            groups_text(mesh, axis.name) if axis.kind == "space" else "",
        ]
        for axis in mesh.axes
    ]
