"""Totals of micro-batches, where a stage is at several coordinates of the stage axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardweave.backends.distributed.in_flight import Group, all_reduce_in_place
from shardweave.backends.distributed.runtime import Runtime
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import StageFunction, StagePlaces, micro_axis

TOTALS = ("sum", "part")
"""Kinds of slots that differ between the coordinates of a stage."""


@dataclass(frozen=True)
class JoinedTotals:
    """Combines the totals of the coordinates of one stage. Collective among them.

    group: the ranks of this one's other coordinates there. place: this rank's coordinate. sums: by
    name, `sum` or `max`. parts: names of what is joined. at: by micro-batch, who has its part.
    """

    group: Group
    places: tuple[int, ...]
    place: int
    sums: Mapping[str, str]
    parts: tuple[str, ...]
    at: tuple[int, ...]

    def reduce(self, totals: Sequence[Tensor], reduction: str) -> None:
        """Make contiguous totals those of all coordinates, in place."""
        all_reduce_in_place(totals, self.group, reduction)

    def gathered(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The parts of all micro-batches, in order; those of this coordinate are given."""
        own = iter(parts)
        return [
            self._sent(
                next(own).contiguous() if at == self.place else torch.empty_like(parts[0]), at
            )
            for at in self.at
        ]

    def _sent(self, x: Tensor, at: int) -> Tensor:
        source = self.group.ranks[self.places.index(at)]
        dist.broadcast(x, src=source, group=self.group.process_group)
        return x


def joined_totals(
    program: Program, functions: Iterable[StageFunction], runtime: Runtime
) -> dict[str, JoinedTotals]:
    """By the function of this rank before which it is done, what its stage puts together.

    functions: this rank's, in the order in which they run first. Only stages at several coordinates
    have totals to join. Collective among all ranks.
    """
    places, axis = StagePlaces.of(program), micro_axis(program)
    groups = {at: runtime.group_at(at) for at in sorted(set(places.of_stage.values()))}
    totals: dict[str, JoinedTotals] = {}
    by_stage: dict[int, list[StageFunction]] = {}
    for function in functions:
        if any(slot.kind in TOTALS for slot in function.arguments):
            by_stage.setdefault(function.stage, []).append(function)
    for stage, readers in by_stage.items():
        group = groups[places.of_stage[stage]]
        if group is None or axis is None:
            continue
        sums: dict[str, str] = {}
        parts: dict[str, None] = {}
        for function in readers:
            for slot in function.arguments:
                if slot.kind == "sum":
                    sharding = function.sharding_of_slot(slot)
                    sums[slot.name] = "max" if sharding.reduction == "max" else "sum"
                elif slot.kind == "part":
                    parts[slot.name] = None
        at = tuple(places.source(stage, number) for number in range(axis.size))
        totals[readers[0].name] = JoinedTotals(
            group, places.of_stage[stage], runtime.place, sums, tuple(parts), at
        )
    return totals
