"""1F1B: one forward, one backward pass in turn (Narayanan et al. 2021, Sec. 2.2)."""

from __future__ import annotations

from shardweave.planners.schedules.table import Action, Table


def one_forward_one_backward(ranks: int, micro_batches: int, chunks: int = 1) -> Table:
    """As many forward passes as there are stages behind, then one of each, then what is left."""
    assert chunks == 1
    table: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        forward = [Action(rank, "F", number) for number in range(micro_batches)]
        backward = [Action(rank, "B", number) for number in range(micro_batches)]
        ahead = min(ranks - 1 - rank, micro_batches)
        found = forward[:ahead]
        for one, other in zip(forward[ahead:], backward, strict=False):
            found += (one, other)
        table.append((*found, *backward[micro_batches - ahead :]))
    return tuple(table)
