"""Processes of one start find each other in a store that others have used before."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, Store

from shardweave.driver.processes.rendezvous import agreed_token


def tokens(store: Store, world_size: int) -> list[str]:
    """What each rank of one start gets, rank 0 coming last."""
    found: dict[int, str] = {}

    def join(rank: int) -> None:
        found[rank] = agreed_token(store, rank, world_size, timedelta(seconds=30))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(world_size)]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(world_size)]


def test_ranks_of_a_start_agree_on_what_no_start_before_had() -> None:
    store = HashStore()
    seen = [tokens(store, size) for size in (3, 3, 2, 4, 1)]
    assert all(len(set(of_ranks)) == 1 for of_ranks in seen)
    assert len({of_ranks[0] for of_ranks in seen}) == len(seen)


def test_names_left_by_processes_that_are_gone_are_not_waited_for() -> None:
    store = HashStore()
    for rank in range(3):
        store.set(f"name/{rank}", "gone")
    assert len(set(tokens(store, 3))) == 1


def test_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] of 3 did not come within 0 s"):
        agreed_token(HashStore(), 0, 3, timedelta(seconds=0.1))
