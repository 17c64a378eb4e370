"""GPipe: all forward passes, then all backward (Huang et al. 2019, Sec. 2.3)."""

from __future__ import annotations

from shardweave.planners.schedules.table import Action, Table


def gpipe(ranks: int, micro_batches: int, chunks: int = 1) -> Table:
    """With several chunks, rank r has stages r, r + ranks, .., one after another."""
    every = range(micro_batches)
    table: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forward = [Action(stage, "F", number) for stage in stages for number in every]
        backward = [Action(stage, "B", number) for stage in reversed(stages) for number in every]
        table.append((*forward, *backward))
    return tuple(table)
