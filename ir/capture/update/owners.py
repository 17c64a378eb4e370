"""Choose the ranks that run updates on full values, and the ranks that send them shards."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence


def dealt_out(flops: Mapping[int, int], ranks: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Assign each update to a rank: the largest first, to the rank with the least work so far.

    flops: the work of each update. ranks: the ranks to choose from. Returns the rank of each
    update.
    """
    work = dict.fromkeys((rank for chosen in ranks.values() for rank in chosen), 0)
    owners: dict[int, int] = {}
    for index in sorted(flops, key=lambda i: (-flops[i], i)):
        owners[index] = min(ranks[index], key=lambda rank: (work[rank], rank))
        work[owners[index]] += flops[index]
    return owners


def senders_of(shards: Mapping[int, Hashable], goal: int) -> list[int]:
    """Choose a rank to send each distinct shard to rank `goal`: `goal` itself if it has the shard,
    else ranks by turns. shards: for each rank a key, equal for equal shards."""
    by_shard: dict[Hashable, list[int]] = {}
    for rank, shard in shards.items():
        by_shard.setdefault(shard, []).append(rank)
    return [goal if goal in ranks else ranks[goal % len(ranks)] for ranks in by_shard.values()]
