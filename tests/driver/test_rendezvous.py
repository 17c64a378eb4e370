"""Processes of one start find each other in a store that others have used, or say who is missing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from shardweave.backends.watch.watch import LostRankError
from shardweave.driver.processes.rendezvous import Start, initialise, meet_in


def start_of(rank: int, size: int, timeout_s: float = 30.0) -> Start:
    return Start(rank, size, "the store", timeout_s)


def on_threads(ranks: list[int], run: Callable[[int], Store]) -> dict[int, str]:
    """Where each rank stores what it says, or the error that it gets; rank 0 begins last."""
    found: dict[int, str] = {}

    def join(rank: int) -> None:
        try:
            fresh = run(rank)
            if rank == 0:
                fresh.set("made", "by rank 0")
            found[rank] = fresh.get("made").decode()
        except LostRankError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_of_a_start_meet_where_no_start_before_had_been() -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    for size in (3, 3, 2, 4, 1):
        found = on_threads([*range(size)], lambda rank: meet_in(store, start_of(rank, size)))  # noqa: B023
        assert found == dict.fromkeys(range(size), "by rank 0")


def test_names_left_by_processes_that_are_gone_are_not_waited_for() -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    for rank in range(3):
        store.set(f"name/{rank}", "gone")
    found = on_threads([0, 1, 2], lambda rank: meet_in(store, start_of(rank, 3)))
    assert found == dict.fromkeys(range(3), "by rank 0")


def test_every_rank_names_those_that_do_not_come_in_the_same_words() -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    found = on_threads([0, 2], lambda rank: meet_in(store, start_of(rank, 5, 1.0)))
    assert found[0] == found[2]
    assert (
        "ranks 1, 3-4 of 5 did not join at the store within 1 s (timeout=.., or SHARD" in found[0]
    )
    assert "with a RANK of its own and WORLD_SIZE=5" in found[0]


def test_rank_0_that_does_not_come_is_named() -> None:
    with pytest.raises(LostRankError, match="rank 0 of 2 did not join at the store within 0 s"):
        meet_in(dist.HashStore(), start_of(1, 2, 0.1))  # pyright: ignore[reportPrivateImportUsage]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Sets what torchrun would, for one rank of two, at a port."""

    def set_(rank: int, port: int) -> None:
        for name, value in {
            "RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }.items():  # fmt: skip
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    return set_


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_is_alone_ends_in_time_and_names_the_other_and_the_address(
    rank: int, port: int, environment: Callable[[int, int], None]
) -> None:
    environment(rank, port)
    said = rf"rank {1 - rank} of 2 did not join at 127.0.0.1:{port} .* within 1 s"
    with pytest.raises(LostRankError, match=said):
        initialise("gloo", None, 1.0)
    assert not dist.is_initialized()


@pytest.mark.parametrize("rank", [0, 1])
def test_port_that_another_program_has_is_said(
    rank: int, environment: Callable[[int, int], None]
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        environment(rank, other.getsockname()[1])
        said = ("rank 0 cannot listen at .*EADDRINUSE", "rank 0 of 2 did not join at 127")[rank]
        with pytest.raises(LostRankError, match=said):
            initialise("gloo", None, 0.5)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "two", "RANK is 'two', expected a whole number"),
        ("RANK", "2", "RANK=2 is not below WORLD_SIZE=2"),
        ("MASTER_PORT", "99999", "MASTER_PORT is '99999', expected a whole number below 65536"),
        ("MASTER_PORT", "", "MASTER_PORT is ''"),
        ("MASTER_ADDR", "", "MASTER_ADDR is not set"),
    ],
)
def test_environment_that_names_no_rank_is_refused(
    name: str,
    value: str,
    said: str,
    environment: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment(0, 1)
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=said):
        initialise("gloo", None, 0.5)


def test_ranks_meet_by_a_file(tmp_path: Path) -> None:
    def run(rank: int) -> Store:
        return meet_in(dist.FileStore(str(tmp_path / "store"), 2), start_of(rank, 2))  # pyright: ignore[reportPrivateImportUsage]

    assert on_threads([0, 1], run) == dict.fromkeys(range(2), "by rank 0")
