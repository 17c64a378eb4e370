"""Registry of the pipeline schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from shardweave.ir.suggest import did_you_mean
from shardweave.planners.plan.plan_parts import PIPELINE_SCHEDULES
from shardweave.planners.schedules.dualpipe_v import dualpipe_v
from shardweave.planners.schedules.list_order import list_table
from shardweave.planners.schedules.one_forward_one_backward import (
    gpipe,
    interleaved,
    one_forward_one_backward,
)
from shardweave.planners.schedules.table import Table
from shardweave.planners.schedules.zero_bubble import zero_bubble, zero_bubble_h2, zero_bubble_v


@dataclass(frozen=True)
class Schedule:
    """An order of the passes of micro-batches through stages.

    make: makes the table for (ranks, micro-batches, chunks). chunks: default number of stages on
    each rank. fixed: whether only this number is possible. is_v: whether chunks are placed as a V,
    so that the last stage is on the first rank; else cyclically.
    """

    name: str
    make: Callable[[int, int, int], Table]
    chunks: int = 1
    fixed: bool = False
    is_v: bool = False

    def table(self, ranks: int, micro_batches: int, chunks: int) -> Table:
        """Make the table of each rank's actions. ValueError if these numbers have no table."""
        if chunks < 1 or (self.fixed and chunks != self.chunks):
            raise ValueError(
                f"schedule '{self.name}' puts {self.chunks} stages on each rank, not {chunks}; "
                f"use {ranks * self.chunks} stages, or another schedule."
            )
        return self.make(ranks, micro_batches, chunks)

    def place(self, stage: int, ranks: int) -> int:
        chunk, at = divmod(stage, ranks)
        return ranks - 1 - at if self.is_v and chunk % 2 else at


LIST = "list"
"""Schedule optimized for a program's costs; `Schedule.table` assumes passes of equal time."""


@lru_cache(maxsize=256)
def _list_table(ranks: int, micro_batches: int, chunks: int = 1) -> Table:
    """Make the `list` table for equal passes; cached, because the search takes a second."""
    return list_table(
        ranks, micro_batches, chunks, None, fixed_tables(ranks, micro_batches, chunks)
    )


_SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("1f1b", one_forward_one_backward, fixed=True),
        Schedule("gpipe", gpipe),
        Schedule("interleaved-1f1b", interleaved, chunks=2),
        Schedule("zero-bubble", zero_bubble),
        Schedule("zero-bubble-h2", zero_bubble_h2, fixed=True),
        Schedule("zero-bubble-v", zero_bubble_v, chunks=2, fixed=True, is_v=True),
        Schedule("dualpipe-v", dualpipe_v, chunks=2, fixed=True, is_v=True),
        Schedule(LIST, _list_table),
    )
}
assert tuple(_SCHEDULES) == PIPELINE_SCHEDULES


def find_schedule(name: str) -> Schedule:
    """Return a schedule by name. Raises ValueError, which lists all names, for an unknown one."""
    if name not in _SCHEDULES:
        raise ValueError(
            f"there is no pipeline schedule '{name}'; {did_you_mean(name, _SCHEDULES)}the "
            f"schedules are {', '.join(_SCHEDULES)}."
        )
    return _SCHEDULES[name]


def fixed_tables(ranks: int, micro_batches: int, chunks: int) -> list[Table]:
    """Make the tables of all schedules except `list` that are possible for these numbers."""
    return possible_tables(lambda name: _SCHEDULES[name].table(ranks, micro_batches, chunks))


def possible_tables(make: Callable[[str], Table]) -> list[Table]:
    """Make the tables of all schedules except `list`, by name, for which that is possible."""
    tables: list[Table] = []
    for name in (name for name in _SCHEDULES if name != LIST):
        with suppress(ValueError):
            tables.append(make(name))
    return tables
