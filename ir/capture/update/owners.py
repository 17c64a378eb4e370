"""Owners of updates that need full values, and the messages to them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence


def dealt_out(flops: Mapping[int, int], ranks: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """The owner of each update: the largest goes first, to the rank with least to do.

    flops, ranks: by update, its work, and the ranks that may own it.
    """
    work = dict.fromkeys((rank for chosen in ranks.values() for rank in chosen), 0)
    owners: dict[int, int] = {}
    for index in sorted(flops, key=lambda i: (-flops[i], i)):
        owners[index] = min(ranks[index], key=lambda rank: (work[rank], rank))
        work[owners[index]] += flops[index]
    return owners


def senders_of(shards: Mapping[int, Hashable], goal: int) -> list[int]:
    """A rank that has each distinct shard: `goal` itself where it can, else by turns.

    shards: by rank.
    """
    by_shard: dict[Hashable, list[int]] = {}
    for rank, shard in shards.items():
        by_shard.setdefault(shard, []).append(rank)
    return [goal if goal in ranks else ranks[goal % len(ranks)] for ranks in by_shard.values()]
