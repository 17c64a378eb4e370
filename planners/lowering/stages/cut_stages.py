"""Pass `cut-stages`: cuts a local program into the functions of its pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from xdsl.dialects.builtin import ArrayAttr, StringAttr
from xdsl.ir import Attribute

from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import micro_axis
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram
from shardweave.passes.stages.cut import cut_into_stages
from shardweave.planners.cost.presets import cluster_to_order
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.lowering.stages.list_stages import order_stages, tasks_of
from shardweave.planners.plan.plan_names import Lookup
from shardweave.planners.plan.plan_parts import PIPELINE_SCHEDULES, check_shares
from shardweave.planners.schedules.schedules import LIST, find_schedule, fixed_tables
from shardweave.planners.schedules.table import Table
from shardweave.planners.schedules.uneven import (
    Shares,
    read_shares,
    shares_text,
    uneven_table,
    uneven_tables,
)

STAGES = "dist.stages"
"""Attribute of a module before `cut-stages`: the names or patterns of the layers of each stage."""


def store_stages(program: Program, stages: Sequence[Sequence[str]]) -> None:
    program.module.attributes[STAGES] = ArrayAttr(
        ArrayAttr(StringAttr(name) for name in names) for names in stages
    )


def stored_stages(program: Program) -> tuple[tuple[str, ...], ...]:
    """Read the layers of each stage from `dist.stages`; empty without it. Raises ValueError."""
    stored = program.module.attributes.get(STAGES)
    if stored is None:
        return ()
    rows = _items(stored)
    words = [[word.data for word in _items(row) if isinstance(word, StringAttr)] for row in rows]
    if (
        not words
        or not all(words)
        or any(len(names) != len(_items(row)) for names, row in zip(words, rows, strict=True))
    ):
        raise ValueError(f'{STAGES} is {stored}, expected lists of layers, as [["h.0"], ["h.1"]].')
    return tuple(map(tuple, words))


def _items(attribute: Attribute) -> Sequence[Attribute]:
    """The items of an array attribute; empty for any other attribute."""
    if not isinstance(attribute, ArrayAttr):
        return ()
    return cast("ArrayAttr[Attribute]", attribute).data


def _uneven_table(
    schedule: str, shares: Shares, stages: Sequence[Sequence[str]], ranks: int, micro_batches: int
) -> Table:
    """Order for stages at several coordinates. Raises ValueError for shares that do not fit."""
    if not stages:
        raise ValueError(
            f"cut-stages with shares needs the layers of each stage; set {STAGES}, as a plan does."
        )
    check_shares(shares, len(stages), micro_batches)
    if sum(map(len, shares)) != ranks:
        raise ValueError(
            f"shares {shares_text(shares)} list {sum(map(len, shares))} ranks, but the stage "
            f"axis has {ranks}; make the two numbers equal."
        )
    return uneven_table(schedule, shares, len(stages) // len(shares))


def _cut(program: Program, stages: Sequence[Sequence[str]], table: Table, zero: int) -> None:
    cut_into_stages(
        program,
        stages_of_layers(program, stages),
        tasks_of(table, len(stages)),
        keep_gathered=zero < 3,
        scatter_each=zero > 1,
    )
    program.module.attributes.pop(STAGES, None)


def stages_of_layers(program: Program, stages: Sequence[Sequence[str]]) -> dict[str, int]:
    """Map each layer to the stage that names it or a module around it; exact names win. A module's
    name is ignored if another name in the stages lies inside that module."""
    outer = {name.rpartition(".")[0] for names in stages for name in names}
    around = {path for name in outer for path in _paths(name)}
    kept = [[name for name in names if name not in around] for names in stages]
    lookups = [Lookup(dict.fromkeys(names, "")) for names in kept]
    exact = {name: stage for stage, names in reversed([*enumerate(kept)]) for name in names}
    stage_of: dict[str, int] = {}
    for layer in program.layers():
        for path in _paths(layer):
            named = [stage for stage, lookup in enumerate(lookups) if lookup.key(path) is not None]
            if path in exact or named:
                stage_of[layer] = exact[path] if path in exact else named[0]
                break
    return stage_of


def _paths(layer: str) -> Iterator[str]:
    while layer:
        yield layer
        layer = layer.rpartition(".")[0]


@dataclass(frozen=True)
class CutStagesPass(PassOnProgram):
    """Cut the step into functions of pipeline stages, and make `@step` the schedule that runs them.

    Stages are those of the attribute `dist.stages`, which `apply-plan` writes, or else as equal as
    whole blocks allow. The remaining time axis is that of micro-batches; without one the step runs
    on the whole batch. `schedule` orders micro-batches; `chunks` is the number of stages per
    coordinate of the stage axis. `zero`: with 1 and 2, sharded parameters are gathered once in a
    step, with 3 for each pass of a micro-batch; their gradients are scattered once with 1, and for
    each micro-batch with 2 and 3. Schedule `list` optimizes for `cluster`, a preset's name or a
    YAML file. `shares` puts stages at several coordinates of the stage axis, and gives the number
    of micro-batches of each coordinate, such as `8/5,3` for two stages.

    Requires: a local program whose only time axis is that of micro-batches, as
    `split-batch{axis=micro}` makes it. Ensures: a staged program without deadlocks; numerics
    unchanged.
    """

    name = "cut-stages"
    schedule: str = PIPELINE_SCHEDULES[0]
    chunks: int = 0
    zero: int = 3
    cluster: str = ""
    shares: str = ""

    def run(self, program: Program) -> None:
        mesh = program.mesh
        if mesh is not None and mesh.num_stages == 1 and not mesh.time_names:
            note(
                "the mesh has neither stages nor micro-batches; give it an axis stage=2, or "
                "leave the pass out."
            )
        chosen = find_schedule(self.schedule)
        ranks, axis = program.needed_mesh().num_stages, micro_axis(program)
        micro_batches = axis.size if axis else 1
        stages = stored_stages(program)
        if self.shares:
            uneven = read_shares(self.shares)
            table = _uneven_table(self.schedule, uneven, stages, ranks, micro_batches)
            others = partial(uneven_tables, uneven, len(stages) // len(uneven))
        else:
            stages = stages or balanced_stages(program, ranks * (self.chunks or chosen.chunks))
            count = len(stages)
            if count % ranks or self.chunks not in (0, count // ranks):
                raise ValueError(
                    f"{count} stages cannot be placed on {ranks} ranks of the stage axis"
                    + (f" with {self.chunks} chunks on each" if self.chunks else "")
                    + f"; give a multiple of {ranks}."
                )
            sizes = ranks, micro_batches, count // ranks
            table, others = chosen.table(*sizes), partial(fixed_tables, *sizes)
        if self.schedule == LIST:
            draft = program.clone()
            _cut(draft, stages, table, self.zero)
            known = cluster_to_order(self.cluster) if self.cluster else None
            table = order_stages(draft, known, [table, *others()])
        _cut(program, stages, table, self.zero)
