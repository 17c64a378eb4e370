"""DualPipeV: a V of two chunks whose forward and backward passes run side by side (DeepSeek 2025).

The steps are those of github.com/deepseek-ai/DualPipe. Forward and backward passes that run at once
there follow each other here; the compute of one hides the communication of the other.
"""

from __future__ import annotations

from shardweave.planners.schedules.table import Action, Kind, RankPasses, Table


def dualpipe_v(ranks: int, micro_batches: int, chunks: int = 2) -> Table:
    """Make the DualPipeV table. ValueError for fewer micro-batches than stages (2 per rank)."""
    assert chunks == 2
    if micro_batches < 2 * ranks:
        raise ValueError(
            f"schedule 'dualpipe-v' on {ranks} ranks needs at least {2 * ranks} micro-batches, "
            f"found {micro_batches}; use more micro-batches, or 'zero-bubble-v'."
        )
    return tuple(_Rank(rank, ranks, micro_batches).order() for rank in range(ranks))


class _Rank(RankPasses):
    def __init__(self, rank: int, ranks: int, micro_batches: int) -> None:
        super().__init__()
        self.rank, self.ranks, self.micro_batches = rank, ranks, micro_batches
        self.first, self.last = rank, 2 * ranks - 1 - rank

    def order(self) -> tuple[Action, ...]:
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
        return tuple(self.actions)

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

    def add_weights(self) -> None:
        """Add the oldest weight gradient that is still to be computed."""
        inputs = [action.stage for action in self.actions if action.kind == "I"]
        done = sum(action.kind == "W" for action in self.actions)
        if done < len(inputs):
            self.add(inputs[done], "W")
