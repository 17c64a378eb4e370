"""Execution of staged programs on a virtual mesh: all stages' ranks in one process, run by run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from shardweave.backends.programs import Key, sharding_held
from shardweave.backends.reference.virtual_ranks import (
    TOLERANCES,
    PerRank,
    ReplicaMismatchError,
    collect,
    global_argument,
    once_per_key,
    relative_difference,
    run_op_by_op,
    scatter_shards,
)
from shardweave.backends.stages import Cut, Place, Slots, StagedStep, last_reads, slots_of_runs
from shardweave.ir.dialects import dist
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.shards import merge_blocks, take_blocks
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.staged import Run, runs_of


@torch.no_grad()
def run_staged(program: Program, values: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Run a staged program on all ranks of its mesh; returns the global results by kind and name.
    The program has no fused regions. `values` and errors are as for `run_reference`. A result that
    several stages return must be equal on all of them.
    """
    mesh = program.needed_mesh().within_stage
    given = {
        (slot.kind, slot.name): scatter_shards(
            global_argument(program, slot, values), sharding_held(program, slot), mesh
        )
        for slot in program.arguments
    }
    step, runs = _VirtualStep(given, mesh), list(_runs(program))
    functions = slots_of_runs(program, runs)
    for run, last in zip(runs, last_reads(runs, functions), strict=True):
        step.run(run, functions[run.function], last)
    keys = [(slot.kind, slot.name) for slot in program.results]
    return {key: step.returned[key][1] for key in keys}


def _runs(program: Program) -> Iterator[Run]:
    """Yield the runs in order. A function that runs once a step runs at only one of its stage's
    coordinates, since all of these hold the same values."""
    done: set[str] = set()
    for run in runs_of(program):
        if run.function not in done:
            yield run
        if run.micro_batch is None:
            done.add(run.function)


class _VirtualStep(StagedStep[PerRank]):
    """One step of the ranks of all stages. returned: results, and the stage that gave each."""

    def __init__(self, given: Mapping[Key, PerRank], mesh: Mesh) -> None:
        super().__init__(given)
        self.mesh = mesh
        self.returned: dict[Key, tuple[int, Tensor]] = {}
        self.sent: dict[tuple[int, int, str, int | None], PerRank] = {}

    def results_of(
        self, slots: Slots, run: Run, arguments: dict[Key, PerRank]
    ) -> Mapping[Key, PerRank]:
        stage, number = slots.stage, run.micro_batch

        def messages(op: dist.DistOp, operands: list[PerRank]) -> list[PerRank]:
            if isinstance(op, dist.SendOp):
                self.sent[stage, op.to, op.message, number] = operands[0]
                return []
            assert isinstance(op, dist.RecvOp)
            return [self.sent.pop((op.source, stage, op.message, number))]

        environment = {slot.value: arguments[slot.kind, slot.name] for slot in slots.arguments}
        for _ in run_op_by_op(slots.function, environment, self.mesh, messages):
            pass
        return {(slot.kind, slot.name): environment[slot.value] for slot in slots.results}

    def give(self, slots: Slots, slot: Slot, value: PerRank) -> None:
        result = slots.stage, collect(slot, value, slots.function, self.mesh)
        _check_same(slot, self.returned.setdefault((slot.kind, slot.name), result), result)

    def scalar(self, number: int, dtype: torch.dtype) -> PerRank:
        return [torch.tensor(number, dtype=dtype)] * self.mesh.num_devices

    def taken(self, value: PerRank, cut: Cut, number: int) -> PerRank:
        return once_per_key(
            range(len(value)),
            lambda rank: id(value[rank]),
            lambda rank: take_blocks(value[rank], *cut, number),
        )

    def merged(self, parts: list[PerRank], cut: Cut) -> PerRank:
        dim, _, block = cut
        return once_per_key(
            range(len(parts[0])),
            lambda rank: tuple(id(part[rank]) for part in parts),
            lambda rank: merge_blocks([part[rank] for part in parts], dim, block),
        )

    def combined(self, place: Place, total: PerRank, term: PerRank, *, is_max: bool) -> PerRank:
        combine = torch.maximum if is_max else torch.add
        return once_per_key(
            range(len(total)),
            lambda rank: (id(total[rank]), id(term[rank])),
            lambda rank: combine(total[rank], term[rank]),
        )


def _check_same(slot: Slot, first: tuple[int, Tensor], other: tuple[int, Tensor]) -> None:
    """Raises ReplicaMismatchError if two stages return different values for a result."""
    error = relative_difference(first[1], other[1])
    if error > TOLERANCES.get(first[1].dtype, 0.0):
        raise ReplicaMismatchError(
            f"{slot.kind} '{slot.name}' should be equal on stages {first[0]} and {other[0]}, but "
            f"differs by {error:.3g} relative to its largest element; either the program was "
            "changed after cut-stages, or a pass is wrong (--validate names the pass)."
        )
