"""ZB-V: two chunks on each rank, placed in the shape of a V (Qi et al. 2024, Sec. 6)."""

from __future__ import annotations

from shardweave.planners.pipelines.table import Action, Kind, Table


def zero_bubble_v(ranks: int, micro_batches: int, chunks: int = 2) -> Table:
    """Rank r has stages r and 2 ranks - 1 - r, so that the loss is where the inputs are.

    Without bubbles if forward and both halves of backward take the same time, and in no more memory
    than 1F1B. Fewer micro-batches than 2 ranks - 1 leave gaps.
    """
    assert chunks == 2
    return tuple(_rank(rank, ranks, micro_batches) for rank in range(ranks))


def _rank(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    first, last = rank, 2 * ranks - 1 - rank
    count = max(2 * ranks - 1, micro_batches)
    found: list[Action] = []
    done: dict[tuple[int, Kind], int] = {}

    def add(stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            number = done[stage, kind] = done.get((stage, kind), -1) + 1
            if number < micro_batches:
                found.append(Action(stage, kind, number))

    def ran(stage: int, kind: Kind) -> int:
        return done.get((stage, kind), -1) + 1

    for _ in range(2 * (ranks - rank) - 1):
        add(first, "F")
    for _ in range(rank):
        add(last, "F")
        add(first, "F")
    for _ in range(ranks - rank):
        add(last, "F", "I", "W")
    while ran(last, "F") < ran(first, "F") or ran(first, "F") < count:
        if ran(first, "F") < count:
            add(first, "F")
        add(first, "I", "W")
        add(last, "F", "I", "W")
    for _ in range(rank):
        add(first, "I")
        add(last, "I")
    for _ in range(ranks - rank):
        add(first, "I", "W")
    for stage in (last, first):
        while ran(stage, "W") < ran(stage, "I"):
            add(stage, "W")
    return tuple(found)
