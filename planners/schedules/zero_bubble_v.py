"""ZB-V: two chunks on each rank, placed in the shape of a V (Qi et al. 2024, Sec. 6)."""

from __future__ import annotations

from shardweave.planners.schedules.table import Action, Kind, Table


def zero_bubble_v(ranks: int, micro_batches: int, chunks: int = 2) -> Table:
    """Rank r has stages r and 2 ranks - 1 - r, so that the loss is where the inputs are.

    Without bubbles if forward and both halves of backward take the same time, and in no more memory
    than 1F1B. Fewer micro-batches than 2 ranks - 1 leave gaps.
    """
    assert chunks == 2
    return tuple(_rank(rank, ranks, micro_batches) for rank in range(ranks))


def _rank(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    made = _Rank(rank, ranks, micro_batches)
    made.warm_up(ranks - rank, rank)
    made.steady()
    made.cool_down(ranks - rank, rank)
    # The steps are those of enough micro-batches to fill the pipeline.
    return tuple(action for action in made.found if action.micro_batch < micro_batches)


class _Rank:
    def __init__(self, rank: int, ranks: int, micro_batches: int) -> None:
        self.first, self.last = rank, 2 * ranks - 1 - rank
        self.count = max(2 * ranks - 1, micro_batches)
        self.found: list[Action] = []
        self.done: dict[tuple[int, Kind], int] = {}

    def add(self, stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            self.found.append(Action(stage, kind, self.ran(stage, kind)))
            self.done[stage, kind] = self.ran(stage, kind) + 1

    def ran(self, stage: int, kind: Kind) -> int:
        return self.done.get((stage, kind), 0)

    def warm_up(self, behind: int, before: int) -> None:
        for _ in range(2 * behind - 1):
            self.add(self.first, "F")
        for _ in range(before):
            self.add(self.last, "F")
            self.add(self.first, "F")
        for _ in range(behind):
            self.add(self.last, "F", "I", "W")

    def steady(self) -> None:
        first, last = self.first, self.last
        while self.ran(last, "F") < self.ran(first, "F") or self.ran(first, "F") < self.count:
            if self.ran(first, "F") < self.count:
                self.add(first, "F")
            self.add(first, "I", "W")
            self.add(last, "F", "I", "W")

    def cool_down(self, behind: int, before: int) -> None:
        for _ in range(before):
            self.add(self.first, "I")
            self.add(self.last, "I")
        for _ in range(behind):
            self.add(self.first, "I", "W")
        for stage in (self.last, self.first):
            while self.ran(stage, "W") < self.ran(stage, "I"):
                self.add(stage, "W")
