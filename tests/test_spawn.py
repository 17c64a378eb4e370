"""The processes that tests start: results come back, failures say why, nothing is left over."""

from __future__ import annotations

import os
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardweave.ir.capture import capture, trace
from shardweave.tests.spawn import RankError, run_ranks


def add_ranks(offset: torch.Tensor) -> torch.Tensor:
    total = offset + dist.get_rank()
    dist.all_reduce(total)
    return total


def test_results_come_back_by_rank() -> None:
    assert [found.item() for found in run_ranks(add_ranks, 2, torch.tensor(10))] == [21, 21]


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("no such layer")
    time.sleep(60)


def test_the_traceback_of_the_rank_that_failed_is_raised_at_once() -> None:
    with pytest.raises(RankError, match=r"rank 1 failed:(.|\n)*KeyError: 'no such layer'"):
        run_ranks(fail_on_rank_one, 2)


def leave_pid_and_sleep(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    dist.barrier()
    time.sleep(60 if dist.get_rank() else 0)


def test_ranks_that_hang_are_killed_at_the_time_limit(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] gave no result"):
        run_ranks(leave_pid_and_sleep, 2, str(tmp_path), timeout_s=4)
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)


def warm_up_without_an_engine() -> None:
    from shardweave.tests.preload import take_a_step

    no_engine = mock.Mock(side_effect=AssertionError("autograd runs"))
    with (
        mock.patch.object(capture, "trace", trace.trace),
        mock.patch.object(torch.autograd, "_engine_run_backward", no_engine),
    ):
        with pytest.raises(AssertionError, match="autograd runs"):
            torch.ones(1, requires_grad=True).backward()
        take_a_step()


def test_server_of_ranks_warms_up_without_autograd() -> None:
    """With a CUDA build of torch, a fork of a process that ran autograd cannot."""
    run_ranks(warm_up_without_an_engine, 1)
