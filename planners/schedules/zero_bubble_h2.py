"""Zero bubble, ZB-H2: twice as many forward passes ahead as ZB-H1 (Qi et al. 2024, Sec. 2)."""

from __future__ import annotations

from shardweave.planners.schedules.table import Action, Table


def zero_bubble_h2(ranks: int, micro_batches: int, chunks: int = 1) -> Table:
    """Two passes ahead for each rank behind, and weight gradients put off by two for each before.

    So no rank waits once it has begun, if forward and both halves of backward take the same time.
    Each rank holds up to 2 ranks - 1 micro-batches: the first one in 1F1B holds `ranks`.
    """
    assert chunks == 1
    table: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        forward = [Action(rank, "F", number) for number in range(micro_batches)]
        weights = [Action(rank, "W", number) for number in range(micro_batches)]
        ahead, behind = 2 * (ranks - 1 - rank), 2 * rank
        found = forward[:ahead]
        for number in range(micro_batches):
            found += forward[ahead + number : ahead + number + 1]
            found.append(Action(rank, "I", number))
            found += weights[number - behind : number - behind + 1] if number >= behind else []
        table.append((*found, *weights[max(0, micro_batches - behind) :]))
    return tuple(table)
