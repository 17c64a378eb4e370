"""DualPipeV: a V of two chunks whose forward and backward passes run side by side (DeepSeek 2025).

The steps are those of github.com/deepseek-ai/DualPipe. A forward and a backward pass that overlap
there follow each other here; the compute of one hides the communication of the other.
"""

from __future__ import annotations

from shardweave.planners.schedules.table import Action, Kind, Table


def dualpipe_v(ranks: int, micro_batches: int, chunks: int = 2) -> Table:
    """Make the DualPipeV table. ValueError for fewer micro-batches than stages (2 per rank)."""
    assert chunks == 2
    if micro_batches < 2 * ranks:
        raise ValueError(
            f"schedule 'dualpipe-v' on {ranks} ranks needs at least {2 * ranks} micro-batches, "
            f"found {micro_batches}; use more micro-batches, or 'zero-bubble-v'."
        )
    return tuple(_Rank(rank, ranks, micro_batches).actions() for rank in range(ranks))


class _Rank:
    def __init__(self, rank: int, ranks: int, micro_batches: int) -> None:
        self.rank, self.ranks, self.micro_batches = rank, ranks, micro_batches
        self.first, self.last = rank, 2 * ranks - 1 - rank
        self.order: list[Action] = []
        self.done: dict[tuple[int, Kind], int] = {}
        self.left: list[tuple[int, int]] = []
        """(Stage, micro-batch) of the weight gradients that are still to be computed."""

    def actions(self) -> tuple[Action, ...]:
        behind = self.ranks - self.rank - 1
        for _ in range(2 * behind):
            self.add(self.first, "F")
        for _ in range(self.rank + 1):
            self.add(self.first, "F")
            self.add(self.last, "F")
        for _ in range(behind):
            self.add(self.last, "I")
            self.add_weights()
            self.add(self.last, "F")
        for _ in range(self.micro_batches - 2 * self.ranks + self.rank + 1):
            self.add(self.first, "F")
            self.add(self.last, "B")
            self.add(self.last, "F")
            self.add(self.first, "B")
        for _ in range(behind):
            self.add(self.last, "B")
            self.add(self.last, "F")
            self.add(self.first, "B")
        self.cool_down(behind)
        return tuple(self.order)

    def cool_down(self, behind: int) -> None:
        """Add the last backward passes; the second half of them defer their weight gradients."""
        count = self.rank + 1
        kind: Kind = "B"
        for index in range(count):
            if index == count // 2 and self.rank % 2 == 1:
                kind = "I"
            self.add(self.last, kind)
            if index == count // 2 and self.rank % 2 == 0:
                kind = "I"
            self.add(self.first, kind)
        for _ in range(behind):
            self.add_weights()
            self.add(self.first, kind)
        for _ in range(count):
            self.add_weights()

    def add(self, stage: int, kind: Kind) -> None:
        counted: Kind = "I" if kind == "B" else kind
        number = self.done[stage, counted] = self.done.get((stage, counted), -1) + 1
        self.order.append(Action(stage, kind, number))
        if kind == "I":
            self.left.append((stage, number))

    def add_weights(self) -> None:
        if self.left:
            stage, number = self.left.pop(0)
            self.order.append(Action(stage, "W", number))
