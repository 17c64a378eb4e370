"""One rank of `shardweave profile`: `python -m shardweave.driver.profile.profile_worker REQUEST`.

Rank 0 writes what was measured as JSON to the file that the request names.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardweave.driver.processes import launch, world
from shardweave.driver.profile.profile_gpu import measure_gpu
from shardweave.driver.profile.profile_links import (
    measure_collectives,
    measure_message,
    measure_overlap,
    measure_start,
)
from shardweave.driver.profile.profile_ops import (
    Points,
    measure_ops,
    measure_peaks,
    measure_program,
)
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.cost.degrees import divisors

_K = TypeVar("_K")

PROGRAM_SECONDS = 20.0
"""Total seconds for measuring all given programs."""

_SPIN = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == int(sys.argv[1]): pass
"""
"""Code of an idle-priority process that keeps a core awake until its parent has ended."""

NETWORK_NICE = -5
"""Niceness of gloo's threads: they get three times the main thread's share of a core."""


def measure_and_report() -> int:
    """Measure together with all ranks; reports a failure to the launcher. Returns an exit code."""
    try:
        request: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
        count = int(os.environ["WORLD_SIZE"])
        device = world.local_device(count)
        if device.type == "cpu":
            pin(int(os.environ["LOCAL_RANK"]))
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(device)
        world.join(Mesh(rank=count), device)
        try:
            with awake() if device.type == "cpu" else nullcontext():
                record = measure(request, device)
            if world.rank() == 0:
                Path(request["output"]).write_text(json.dumps(record))
        finally:
            world.leave()
    except Exception as error:  # noqa: BLE001  the launcher shows it
        launch.report_failure(error, is_plain=isinstance(error, (ValueError, OSError)))
        return 1
    return 0


def measure(request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Run all measurements, as JSON data that `profile.cluster_of` reads. Collective."""
    programs = [Program.load(path) for path in request["programs"]]
    with torch.no_grad(), device:
        clock = _Clock()
        record: dict[str, Any] = {"collectives": []}
        if device.type == "cuda":
            record["gpu"] = measure_gpu()
            clock.say(record["gpu"]["name"])
        else:
            ops = _averaged(measure_ops())
            peaks = measure_peaks(max(work / s for work, s in ops["aten.mm"]))
            clock.say(f"{len(ops)} ops by size")
            record |= {"ops": ops, "peaks": peaks}
        measured: dict[str, list[float]] = {}
        for program in programs:
            for name, seconds in measure_program(program, PROGRAM_SECONDS / len(programs)).items():
                measured.setdefault(name, []).extend(seconds)
        if programs:
            clock.say(f"{len(measured)} distinct ops of {len(programs)} programs")
        record["measured"] = _averaged_times({name: _middle(s) for name, s in measured.items()})
        if dist.is_initialized():
            record |= _measure_links(clock)
    return record


def _measure_links(clock: _Clock) -> dict[str, Any]:
    count = dist.get_world_size()
    collectives: list[dict[str, Any]] = []
    for size in divisors(count)[1:]:
        made = [dist.new_group(list(range(first, first + size))) for first in range(0, count, size)]
        group = made[dist.get_rank() // size]
        assert isinstance(group, dist.ProcessGroup)
        dist.barrier(group)
        hasten_network_threads()
        for kind, points in measure_collectives(group, size).items():
            collectives.append({"kind": kind, "ranks": size, "points": points})
        clock.say(f"collectives of {size} ranks")
    everyone = dist.group.WORLD
    assert everyone is not None
    start = measure_start(everyone)
    (points,) = [
        c["points"] for c in collectives if c["kind"] == "all_reduce" and c["ranks"] == count
    ]
    overlap = measure_overlap(everyone, points)
    clock.say("compute beside communication")
    message = measure_message()
    clock.say("messages")
    return {"collectives": collectives, "start": start, "overlap": overlap, "message": message}


class _Clock:
    """Prints progress on rank 0: each measurement done, and its seconds."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    def say(self, what: str) -> None:
        now_s = time.monotonic()
        if world.rank() == 0:
            print(f"measured {what} in {now_s - self._start_s:.1f} s", flush=True)
        self._start_s = now_s


def _middle(seconds: list[float]) -> float:
    """The mean of the middle half: less noise than a mean, less bias than a median."""
    ordered = sorted(seconds)
    cut = len(ordered) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _averaged_times(own: dict[_K, float]) -> dict[_K, float]:
    if not dist.is_initialized() or not own:
        return own
    all_s = torch.tensor(list(own.values()), dtype=torch.float64)
    dist.all_reduce(all_s)
    return dict(zip(own, (all_s / dist.get_world_size()).tolist(), strict=True))


def _averaged(own: dict[str, Points]) -> dict[str, Points]:
    mean = _averaged_times({(name, work): s for name, points in own.items() for work, s in points})
    return {name: [(work, mean[name, work]) for work, _ in points] for name, points in own.items()}


# Times that can be repeated: on one core each, awake, and quick to answer


def pin(rank: int) -> None:
    """Keep this process, and threads that it starts later, on one of the cores that it may use."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


@contextmanager
def awake() -> Iterator[None]:
    """Context that keeps this core awake by an idle process: cores that slept are slower."""
    if not hasattr(os, "SCHED_IDLE"):
        yield
        return
    spinner = subprocess.Popen([sys.executable, "-c", _SPIN, str(os.getpid())])
    try:
        yield
    finally:
        spinner.kill()
        spinner.wait()


def hasten_network_threads() -> None:
    """Let this process's other threads, gloo's, run soon when a message comes, if allowed.

    Neither by a real-time policy nor by a very low niceness: gloo's thread polls for a connection's
    lock. If the main thread holds that lock while sending on the same core, it needs its share of
    the core to release it: at -20, steps that send much stood still for 0.1 to 0.7 s, at -5 for at
    most 0.01 s.
    """
    if not os.path.isdir("/proc/self/task"):
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        if thread == os.getpid():
            continue
        try:
            os.setpriority(os.PRIO_PROCESS, thread, NETWORK_NICE)
        except (PermissionError, ProcessLookupError):
            return


if __name__ == "__main__":
    sys.exit(measure_and_report())
