"""Execution of staged programs on a virtual mesh: all stages' ranks in one process, run by run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor
from xdsl.ir import SSAValue

from shardweave.backends.programs import Key, sharding_held
from shardweave.backends.reference.virtual_ranks import (
    TOLERANCES,
    PerRank,
    ReplicaMismatchError,
    collect,
    global_argument,
    once_per_key,
    relative_difference,
    run_ops,
    scatter_shards,
)
from shardweave.ir.dialects import dist
from shardweave.ir.dialects.types import dtype_of_value
from shardweave.ir.mesh.placement import Sharding, block_of
from shardweave.ir.mesh.shards import merge_blocks, take_blocks
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.staged import Run, functions_of, micro_axis, runs_of

_RETURNED = ("output", "grad", "buffer")
_STATE = ("param", "buffer", "input", "tangent")


@torch.no_grad()
def run_staged(program: Program, values: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Run a staged program on all ranks of its mesh; returns the global results by kind and name.
    The program has no fused regions. `values` and errors are as for `run_reference`. A result that
    several stages return must be equal on all of them."""
    return _StagedRun(program, values).run()


class _StagedRun:
    """A run of a staged program, with the values that the stages hold.

    kept: by stage, name and micro-batch (None: of the whole step). totals: by stage and name, the
    combined results of micro-batches so far, or (of slots of kind `part`) a list with one of each.
    """

    def __init__(self, program: Program, values: Mapping[Key, Tensor]) -> None:
        self.program = program
        self.mesh = program.needed_mesh().within_stage
        self.axis = micro_axis(program)
        self.functions = functions_of(program)
        self.stages = {name: function.stage for name, function in self.functions.items()}
        self.values = {
            (slot.kind, slot.name): global_argument(program, slot, values)
            for slot in program.arguments
        }
        self.readers = Counter(
            (self.stages[name], slot.name)
            for name, function in self.functions.items()
            for slot in function.arguments
            if slot.kind == "kept"
        )
        self.left: Counter[tuple[int, str, int | None]] = Counter()
        self.kept: dict[tuple[int, str, int | None], PerRank] = {}
        self.totals: dict[tuple[int, str], tuple[list[PerRank], Sharding]] = {}
        self.sent: dict[tuple[int, int, str, int | None], PerRank] = {}

    def run(self) -> dict[Key, Tensor]:
        returned: dict[SSAValue, Tensor] = {}
        first: dict[Key, tuple[int, Tensor]] = {}
        done: set[str] = set()
        for op, run in runs_of(self.program):
            if run.function in done:  # at another coordinate of its stage, on the same values
                continue
            if run.micro_batch is None:
                done.add(run.function)
            function, stage = self.functions[run.function], self.stages[run.function]
            slots = [slot for slot in function.results if slot.kind in _RETURNED]
            for value, slot, tensors in zip(op.results, slots, self._run(run), strict=False):
                tensor = returned[value] = collect(slot, tensors, function, self.mesh)
                key = slot.kind, slot.name
                _check_same(slot, first.setdefault(key, (stage, tensor)), (stage, tensor))
        return {(slot.kind, slot.name): returned[slot.value] for slot in self.program.results}

    def _run(self, run: Run) -> list[PerRank]:
        """Run a function; returns those of its results that the step returns."""
        function, stage = self.functions[run.function], self.stages[run.function]
        environment = {
            slot.value: self._argument(slot, function, stage, run.micro_batch)
            for slot in function.arguments
        }

        def messages(op: dist.DistOp, operands: list[PerRank]) -> list[PerRank]:
            if isinstance(op, dist.SendOp):
                self.sent[stage, op.to, op.message, run.micro_batch] = operands[0]
                return []
            assert isinstance(op, dist.RecvOp)
            return [self.sent.pop((op.source, stage, op.message, run.micro_batch))]

        run_ops(function, environment, self.mesh, messages)
        results: list[PerRank] = []
        for slot in function.results:
            tensors = environment[slot.value]
            if slot.kind in _RETURNED:
                results.append(tensors)
            else:
                self._keep(slot, tensors, function, stage, run.micro_batch)
        return results

    # Arguments of a function

    def _argument(self, slot: Slot, function: Program, stage: int, number: int | None) -> PerRank:
        sharding = sharding_held(function, slot)
        if slot.kind in _STATE:
            also = {} if self.axis is None or number is None else {self.axis.name: number}
            return scatter_shards(self.values[slot.kind, slot.name], sharding, self.mesh, also)
        if slot.kind == "micro_batch":
            index = torch.tensor(number, dtype=dtype_of_value(slot.value))
            return [index] * self.mesh.num_devices
        if slot.kind == "whole":
            return self._part(self.kept[stage, slot.name, None], sharding, number)
        if slot.kind == "kept":
            key = stage, slot.name, number
            self.left[key] -= 1
            return self.kept[key] if self.left[key] else self.kept.pop(key)
        return self._total(slot, stage)

    def _part(self, whole: PerRank, sharding: Sharding, number: int | None) -> PerRank:
        """Return the slice of a whole batch's value that micro-batch `number` reads."""
        seat = sharding.seat_of(self.axis.name) if self.axis is not None else None
        if seat is None or number is None:
            return whole
        dim, placement = seat
        block = block_of(sharding.dims[dim], placement)
        return once_per_key(
            range(len(whole)),
            lambda rank: id(whole[rank]),
            lambda rank: take_blocks(whole[rank], dim, placement.size, block, number),
        )

    def _total(self, slot: Slot, stage: int) -> PerRank:
        parts_held, sharding = self.totals[stage, slot.name]
        if slot.kind != "part":
            return parts_held[0]
        ranks = [list(parts) for parts in zip(*parts_held, strict=True)]
        return once_per_key(
            range(len(ranks)),
            lambda rank: tuple(id(part) for part in ranks[rank]),
            lambda rank: self._joined(ranks[rank], sharding),
        )

    def _joined(self, parts: list[Tensor], sharding: Sharding) -> Tensor:
        assert self.axis is not None
        seat = sharding.seat_of(self.axis.name)
        assert seat is not None, "a value of each micro-batch is cut over none of its dims"
        dim, placement = seat
        return merge_blocks(parts, dim, block_of(sharding.dims[dim], placement))

    # Results of a function

    def _keep(
        self, slot: Slot, tensors: PerRank, function: Program, stage: int, number: int | None
    ) -> None:
        if slot.kind in ("whole", "kept"):
            key = stage, slot.name, number
            self.kept[key] = tensors
            self.left[key] = self.readers[stage, slot.name]
            return
        sharding = sharding_held(function, slot)
        before, _ = self.totals.get((stage, slot.name), ([], sharding))
        if slot.kind == "part":
            total = [*before, tensors]
        elif slot.kind == "sum" and before:
            total = [_combined(before[0], tensors, sharding)]
        else:
            total = [tensors]
        self.totals[stage, slot.name] = total, sharding


def _check_same(slot: Slot, first: tuple[int, Tensor], other: tuple[int, Tensor]) -> None:
    """Raises ReplicaMismatchError if two stages return different values for a result."""
    error = relative_difference(first[1], other[1])
    if error > TOLERANCES.get(first[1].dtype, 0.0):
        raise ReplicaMismatchError(
            f"{slot.kind} '{slot.name}' should be equal on stages {first[0]} and {other[0]}, but "
            f"differs by {error:.3g} relative to its largest element; either the program was "
            "changed after cut-stages, or a pass is wrong (--validate names the pass)."
        )


def _combined(total: PerRank, terms: PerRank, sharding: Sharding) -> PerRank:
    """Add new tensors to the total so far, or take the maximum, on every rank."""
    combine = torch.maximum if sharding.reduction == "max" else torch.add
    return once_per_key(
        range(len(total)),
        lambda rank: (id(total[rank]), id(terms[rank])),
        lambda rank: combine(total[rank], terms[rank]),
    )
