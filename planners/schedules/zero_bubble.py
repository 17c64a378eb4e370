"""Zero bubble, ZB-H1: weight gradients fill what 1F1B leaves idle (Qi et al. 2024, Sec. 2).

With several chunks on each rank it is what PyTorch calls InterleavedZeroBubble.
"""

from __future__ import annotations

from shardweave.planners.schedules.interleaved import passes, round_size
from shardweave.planners.schedules.table import Action, Table


def zero_bubble(ranks: int, micro_batches: int, chunks: int = 1) -> Table:
    """As 1F1B, with weight gradients put off by as many micro-batches as there are ranks before.

    So no rank holds more micro-batches than the first one does in 1F1B.
    """
    size = round_size(ranks, micro_batches)
    table: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        arguments = rank, ranks, micro_batches, chunks
        forward = [Action(s, "F", n) for s, n in passes(*arguments, is_forward=True)]
        backward = list(passes(*arguments, is_forward=False))
        ahead = min((chunks - 1) * size + ranks - 1 - rank, len(forward))
        found = forward[:ahead]
        left = list(backward)
        for index, (stage, number) in enumerate(backward):
            found += forward[ahead + index : ahead + index + 1]
            found.append(Action(stage, "I", number))
            if index >= rank:
                found.append(Action(left[0][0], "W", left.pop(0)[1]))
        found += [Action(stage, "W", number) for stage, number in left]
        table.append(tuple(found))
    return tuple(table)
