"""Zero-bubble schedules: weight gradients fill the bubbles of 1F1B (Qi et al. 2024).

ZB-H1 (Sec. 2) with several chunks on each rank is InterleavedZeroBubble in PyTorch. ZB-H2 runs
twice as many forward passes ahead; ZB-V (Sec. 6) places the two chunks of each rank in a V.
"""

from __future__ import annotations

from shardweave.planners.schedules.one_forward_one_backward import passes, round_size
from shardweave.planners.schedules.table import Action, Kind, RankPasses, Table

KINDS: tuple[Kind, ...] = ("F", "I", "W")


def zero_bubble(ranks: int, micro_batches: int, chunks: int = 1) -> Table:
    """Make the ZB-H1 table: 1F1B in which rank r defers weight gradients by r micro-batches. No
    rank holds more micro-batches than the first rank does in 1F1B."""
    return _deferring(ranks, micro_batches, chunks, round_size(ranks, micro_batches), 1)


def zero_bubble_h2(ranks: int, micro_batches: int, chunks: int = 1) -> Table:
    """Make the ZB-H2 table: rank r runs 2 (ranks - 1 - r) passes ahead, and defers W by 2 r.

    If F, I and W take the same time, no rank waits once it has begun. Each rank holds up to 2 ranks
    - 1 micro-batches; in 1F1B the first rank holds `ranks`.
    """
    assert chunks == 1
    return _deferring(ranks, micro_batches, chunks, micro_batches, 2)


def _deferring(ranks: int, micro_batches: int, chunks: int, size: int, factor: int) -> Table:
    """Make the table in which rank r runs `factor` (ranks - 1 - r) passes more ahead than its
    chunks need, and defers W by `factor` r. size: as for `passes`."""
    table: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        arguments = rank, ranks, micro_batches, chunks, size
        forward, inputs, weights = (passes(kind, *arguments) for kind in KINDS)
        ahead, behind = (chunks - 1) * size + factor * (ranks - 1 - rank), factor * rank
        actions = forward[:ahead]
        for index, action in enumerate(inputs):
            actions += forward[ahead + index : ahead + index + 1]
            actions.append(action)
            actions += weights[index - behind : index - behind + 1] if index >= behind else []
        table.append((*actions, *weights[max(0, len(weights) - behind) :]))
    return tuple(table)


def zero_bubble_v(ranks: int, micro_batches: int, chunks: int = 2) -> Table:
    """Make the ZB-V table: rank r runs stages r and 2 * ranks - 1 - r; rank 0 has inputs and loss.

    There are no bubbles if F, I and W take the same time and there are at least 2 * ranks - 1
    micro-batches. Memory is at most that of 1F1B.
    """
    assert chunks == 2
    return tuple(_rank(rank, ranks, micro_batches) for rank in range(ranks))


def _rank(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    made = _Rank(rank, ranks, micro_batches)
    made.warm_up(ranks - rank, rank)
    made.steady()
    made.cool_down(ranks - rank, rank)
    # The steps are those of enough micro-batches to fill the pipeline.
    return tuple(action for action in made.actions if action.micro_batch < micro_batches)


class _Rank(RankPasses):
    def __init__(self, rank: int, ranks: int, micro_batches: int) -> None:
        super().__init__()
        self.first, self.last = rank, 2 * ranks - 1 - rank
        self.count = max(2 * ranks - 1, micro_batches)

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
