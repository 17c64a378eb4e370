"""Whether a step runs after a call that failed: by what the other ranks tell of that call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

from shardweave.backends.watch import failure_guard
from shardweave.backends.watch.failure_guard import FailureGuard
from shardweave.backends.watch.watch import LostRankError

REFUSAL = r"failed on this rank alone \(out of range\).*last checkpoint"


@dataclass
class Rank0:
    """Rank 0 of two, whose calls fail at a line; the test says what rank 1 tells."""

    guard: FailureGuard
    store: Any
    line: str = "step:7"

    def fail(self) -> None:
        with pytest.raises(IndexError), self.guard:
            raise IndexError("out of range")

    def told(self, run: int) -> Any:
        prefix = f"shardweave/failed/{self.guard._number}/{run}"
        return dist.PrefixStore(prefix, self.store)  # pyright: ignore[reportPrivateImportUsage]


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> Rank0:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    rank = Rank0(FailureGuard(is_joint=True), store)
    monkeypatch.setattr(failure_guard, "default_store", lambda: rank.store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(failure_guard, "computing_line", lambda _: rank.line)
    monkeypatch.setattr(failure_guard, "SILENCE_S", 0.1)
    return rank


def test_step_goes_on_after_ranks_that_failed_at_the_same_line(rank_0: Rank0) -> None:
    rank_0.guard.check()
    for run in (1, 2):
        rank_0.fail()
        rank_0.told(run).set("1", "step:7")
        rank_0.guard.check()
        rank_0.guard.check()


@pytest.mark.parametrize("other", ["step:8", ""])
def test_step_is_refused_after_ranks_that_failed_at_different_lines(
    rank_0: Rank0, other: str
) -> None:
    rank_0.fail()
    rank_0.told(1).set("1", other)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=REFUSAL):
            rank_0.guard.check()


def test_rank_that_was_refused_stays_so_and_tells_one_that_fails_later(rank_0: Rank0) -> None:
    rank_0.fail()
    assert rank_0.told(1).get("0") == b"step:7"
    with pytest.raises(RuntimeError, match=REFUSAL):
        rank_0.guard.check()
    assert rank_0.told(1).get("0") == b""
    rank_0.told(1).set("1", "step:7")
    with pytest.raises(RuntimeError, match=REFUSAL):
        rank_0.guard.check()


def test_failure_in_a_message_is_told_and_refused(rank_0: Rank0) -> None:
    rank_0.line = ""
    rank_0.fail()
    assert rank_0.told(1).get("0") == b""
    rank_0.told(1).set("1", "")
    with pytest.raises(RuntimeError, match=REFUSAL):
        rank_0.guard.check()


def test_nothing_is_told_by_a_store_that_may_be_gone(rank_0: Rank0) -> None:
    rank_0.line = ""
    with pytest.raises(LostRankError), rank_0.guard:
        raise LostRankError("rank 1 was killed")
    assert not rank_0.told(1).check(["0"])
    with pytest.raises(RuntimeError, match="rank 1 was killed"):
        rank_0.guard.check()


def test_rank_alone_may_fail_and_go_on() -> None:
    guard = FailureGuard(is_joint=False)
    with pytest.raises(IndexError), guard:
        raise IndexError
    guard.check()
