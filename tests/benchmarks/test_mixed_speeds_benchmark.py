"""benchmarks/mixed_speeds.py: processes held to a share of a core, and plans that know of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.pipelining import schedules as pytorch

from shardweave.backends.distributed.mail import Mail
from shardweave.backends.distributed.pipeline import RankStep
from shardweave.backends.stages import Slots
from shardweave.benchmarks import mixed_speeds
from shardweave.benchmarks import throttle as throttle_of_ranks
from shardweave.benchmarks.throttle import Throttle, throttled
from shardweave.ir.program.staged import Run
from shardweave.planners.cost.presets import find_cluster

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("factor", [1.5, 4.0])
def test_what_is_computed_takes_a_multiple_of_its_processor_time(factor: float) -> None:
    begin_s = time.perf_counter()
    throttle = Throttle(factor)
    work(0.03)
    throttle.settle()
    assert time.perf_counter() - begin_s >= factor * 0.03
    again_s = time.perf_counter()
    throttle.settle()
    assert time.perf_counter() - again_s < 0.02


class Clock:
    """Of a process: the moment, what it computed, and how long others had its core meanwhile."""

    def __init__(self) -> None:
        self.now_s = self.worked_s = self.queued_s = 0.0

    def run(self, worked_s: float, queued_s: float = 0.0) -> None:
        self.worked_s += worked_s
        self.queued_s += queued_s
        self.now_s += worked_s + queued_s

    def perf_counter(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.worked_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_device_that_others_held_up_catches_up_until_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(throttle_of_ranks, "time", clock)
    monkeypatch.setattr(throttle_of_ranks, "queued_s", lambda: clock.queued_s)
    throttle = Throttle(4.0)
    clock.run(1.0, queued_s=5.0)  # the device was done two seconds ago
    throttle.settle()
    clock.run(1.0)
    throttle.settle()
    assert clock.now_s == pytest.approx(8.0)  # twice four seconds: all is caught up
    clock.run(1.0, queued_s=5.0)
    throttle.wait(lambda: None)  # the message is there
    clock.run(0.5)
    throttle.wait(lambda: clock.sleep(3.0))
    assert throttle.lost_s == pytest.approx(0.5)
    begin_s = clock.now_s
    clock.run(1.0)
    throttle.settle()
    assert clock.now_s - begin_s == pytest.approx(4.0)
    clock.sleep(10.0)  # what it waited for in other ways does not put the device ahead
    throttle.settle()
    begin_s = clock.now_s
    clock.run(1.0)
    throttle.settle()
    assert clock.now_s - begin_s == pytest.approx(4.0)
    assert throttle.worked_s == pytest.approx(5.5)


def work(seconds: float) -> None:
    worked_s = time.thread_time()
    while time.thread_time() - worked_s < seconds:
        pass


@pytest.mark.parametrize("whose", ["ours", "PyTorch's"])
def test_messages_leave_when_the_slower_device_would_be_that_far(whose: str) -> None:
    mail, x = Mail(0, {}, torch.device("cpu")), torch.zeros(1)
    throttle, before = Throttle(4.0), (Mail.send, pytorch._batch_p2p)
    with throttled(throttle):
        begin_s = time.perf_counter()
        throttle.begin()
        work(0.02)
        if whose == "ours":
            mail.send(x, 0, (0, 1, "x", 0))
        else:
            pytorch._batch_p2p([])
        assert time.perf_counter() - begin_s >= 4 * 0.02
    assert (Mail.send, pytorch._batch_p2p) == before


def test_collectives_leave_and_are_waited_for_when_the_slower_device_would_be_that_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Arrived:
        def wait(self) -> None:
            pass

    def start(x: torch.Tensor, **options: Any) -> Arrived | None:
        return Arrived() if options.get("async_op") else None

    for home, name in throttle_of_ranks.COLLECTIVES:
        monkeypatch.setattr(home, name, start)
    throttle, x = Throttle(4.0), torch.zeros(1)
    with throttled(throttle):
        for home, name in throttle_of_ranks.COLLECTIVES:
            begin_s = time.perf_counter()
            throttle.begin()
            work(0.01)
            started = getattr(home, name)(x, async_op=True)
            assert time.perf_counter() - begin_s >= 4 * 0.01
            work(0.01)
            started.wait()
            assert time.perf_counter() - begin_s >= 4 * 0.02
            work(0.01)
            getattr(home, name)(x)
            assert time.perf_counter() - begin_s >= 4 * 0.03
    assert all(getattr(home, name) is start for home, name in throttle_of_ranks.COLLECTIVES)


def test_ranks_sleep_before_what_runs_once_and_not_behind_each_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    throttle = Throttle(4.0)
    monkeypatch.setattr(throttle, "settle", lambda: done.append("sleep"))
    monkeypatch.setattr(RankStep, "run", lambda step, one, *_: done.append(one.function))
    with throttled(throttle):
        for run in (Run("forward_0", 0, 1), Run("weights_0", 0, 1), Run("after_0", 0, None)):
            RankStep.run(cast("RankStep", None), run, cast("Slots", None), frozenset())
    assert done == ["forward_0", "weights_0", "sleep", "after_0"]


def test_cluster_has_two_devices_of_each_speed() -> None:
    cluster = mixed_speeds.slowed(find_cluster("testbed"))
    fast, slow = (cluster.devices[name] for name in ("fast", "slow"))
    assert fast.flops["float32"] == pytest.approx(2 * slow.flops["float32"])
    assert slow.overhead_s == 2 * fast.overhead_s
    nodes = [cluster.node_type(cluster.place(rank)[0]).device for rank in range(4)]
    assert nodes == ["fast", "fast", "slow", "slow"]


def test_gain_is_the_ratio_of_medians_beside_the_simulated_one() -> None:
    rows: list[dict[str, Any]] = [
        {"name": "a", "times_s": [0.2, 0.4, 0.3], "simulated_s": 0.4},
        {"name": "b", "times_s": [0.1, 0.2, 0.15], "simulated_s": 0.1},
    ]
    found = mixed_speeds.gain(rows, "a", "b")
    assert (found["measured"], found["simulated"]) == pytest.approx((2.0, 4.0))


def test_measured_gains_are_near_the_simulated_ones() -> None:
    rows = json.loads((BENCHMARKS / "results" / "mixed_speeds.json").read_text())["rows"]
    stages, shares = (mixed_speeds.gain(rows, *pair) for pair in mixed_speeds.PAIRS)
    for one in (stages, shares):
        assert one["measured"] == pytest.approx(one["simulated"], rel=0.15)


@pytest.mark.slow
def test_quick_run_compares_plans_that_all_compute_the_same_loss(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, str(BENCHMARKS / "mixed_speeds.py"), "--quick", "--json", str(out)]
    subprocess.run(command, check=True, timeout=900)
    result = json.loads(out.read_text())
    assert [row["name"] for row in result["rows"]] == [
        name for p in mixed_speeds.PAIRS for name in p
    ]
    assert all(gain["simulated"] > 1.1 for gain in result["gains"])
