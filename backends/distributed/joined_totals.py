"""Totals over micro-batches of a stage that runs at several coordinates of the stage axis."""

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
"""Kinds of slots whose totals differ between the coordinates of a stage."""


@dataclass(frozen=True)
class JoinedTotals:
    """Combines totals over micro-batches from all coordinates of the stage axis that run one stage.
    Collective among them.

    group: the ranks at `places`, the stage's coordinates, with the same other coordinates as this
    rank. place: this rank's coordinate. sums: by name, `sum` or `max`. parts: names of values that
    are gathered. at: by micro-batch, the coordinate that has its part.
    """

    group: Group
    places: tuple[int, ...]
    place: int
    sums: Mapping[str, str]
    parts: tuple[str, ...]
    at: tuple[int, ...]

    def reduce(self, totals: Sequence[Tensor], reduction: str) -> None:
        """All-reduce contiguous totals over the coordinates, in place."""
        all_reduce_in_place(totals, self.group, reduction)

    def gathered(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Gather the parts of all micro-batches, in order. parts: the parts of this coordinate."""
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
    """Return the totals to join, by the name of the function of this rank that needs them first.
    functions: this rank's functions, in the order of their first runs. Only stages at several
    coordinates have totals to join. Collective among all ranks."""
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
