"""Measuring this machine into a cluster description, with a process per device."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from shardweave.driver.processes.launch import launch, num_cores
from shardweave.ir.program.program import Program
from shardweave.passes.notes import note
from shardweave.planners.auto.reader import Depths
from shardweave.planners.auto.space.cuts import cut_plan, replica_cuts, tensor_degrees
from shardweave.planners.cost.cluster import Cluster, CollectiveTimes, DeviceType, NodeType, Points
from shardweave.planners.cost.workload import batch_of
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.plan.plan_parts import PlanError


def profiled_programs(program: Program, num_processes: int) -> list[Program]:
    """Local programs for the partitions that `auto` considers on `num_processes` devices of one
    node, with a few blocks of a deep model; partitions that fail are left out. Plans with stages or
    recomputation run the same ops. A program without a batch is returned itself."""
    try:
        batch = batch_of(program)
    except PlanError:
        return [program]
    read = Depths.of(program).read
    degrees = tensor_degrees(num_processes, num_processes)
    cuts = replica_cuts(partial(cut_plan, read, 1), batch, num_processes, degrees)
    programs: list[Program] = []
    for cut, pieces in cuts.partitions():
        with suppress(ValueError):  # a plan cannot have that partition either
            programs.append(local_program(read, cut_plan(read, pieces, cut)))
    return programs


SPARE_BYTES = "268435456"


def profile_machine(
    num_processes: int = 2,
    programs: Sequence[Program | str | Path] = (),
    *,
    launcher: str | None = None,
    per_node: int | None = None,
    name: str = "profiled",
    time_limit_s: float | None = None,
) -> Cluster:
    """Measure op and collective times with `num_processes` processes busy at once: on a GPU each,
    where this machine has as many, else on the CPU.

    programs: programs, or their files, whose ops are measured at their exact shapes, so that
    simulating them uses these times; a global program is first partitioned in each way that
    `num_processes` devices allow (`profiled_programs`). launcher: a shell command that starts a
    rank's process, in which `{rank}` is its number, as in `ip netns exec sw{rank} env
    GLOO_SOCKET_IFNAME=eth0`. per_node: how many processes make a node of the cluster; by default
    one with a launcher, else all.

    Takes a minute or so, and prints its progress. Raises ValueError for a wrong request, and
    launch.WorkerError if a process fails.
    """
    on_node = per_node or (1 if launcher else num_processes)
    if num_processes < 1 or num_processes % on_node:
        raise ValueError(
            f"{num_processes} processes do not divide into nodes of {on_node} processes; give a "
            f"multiple of {on_node}."
        )
    if num_processes > num_cores():
        note(_shared_cores(num_processes, launcher))
    with tempfile.TemporaryDirectory(prefix="shardweave-") as folder:
        request, output = Path(folder, "request.json"), Path(folder, "measured.json")
        paths = [
            _saved(local, Path(folder, f"{number}-{part}.mlir"))
            for number, program in enumerate(programs)
            for part, local in enumerate(_measured(program, num_processes))
        ]
        request.write_text(json.dumps({"programs": paths, "output": str(output)}))
        command = [sys.executable, "-m", "shardweave.driver.profile.profile_worker", str(request)]
        launch(_prefixed(command, launcher), num_processes, time_limit_s=time_limit_s)
        measured = json.loads(output.read_text())
    return cluster_of(measured, name, num_processes, on_node)


def _shared_cores(num_processes: int, launcher: str | None) -> str:
    """Return a warning that predictions are off if profiled processes share cores."""
    here = "" if launcher is None else "if they all run on this machine, "
    return (
        f"{here}{num_processes} processes share {num_cores()} cores: they are measured while all "
        "of them compute, so that a step in which some wait for others, as stages do, takes "
        "another time than plans predict; measure with a core for each process"
    )


def _measured(program: Program | str | Path, num_processes: int) -> list[Program]:
    whole = program if isinstance(program, Program) else Program.load(program)
    return [whole] if whole.is_local else profiled_programs(whole, num_processes)


def _saved(program: Program, path: Path) -> str:
    program.save(path)
    return str(path)


def _prefixed(command: Sequence[str], launcher: str | None) -> list[str]:
    """Prefix a rank's command with the launcher, in a shell that fills in the rank."""
    # Freed memory is kept, as a long run keeps it: else every large op pays for fresh pages.
    settings = {
        "MALLOC_TRIM_THRESHOLD_": SPARE_BYTES,
        "MALLOC_MMAP_THRESHOLD_": SPARE_BYTES,
        "OMP_NUM_THREADS": "1",
    }
    variables = [f"{key}={os.environ.get(key, value)}" for key, value in settings.items()]
    plain = ["env", *variables, *command]
    if launcher is None:
        return plain
    return ["sh", "-c", f"exec {launcher.replace('{rank}', '$RANK')} {shlex.join(plain)}"]


def cluster_of(measured: dict[str, Any], name: str, num_processes: int, per_node: int) -> Cluster:
    """Make the cluster that measurements (`profile_worker.measure`) describe."""
    num_nodes = num_processes // per_node
    device = _device_of(measured, num_processes)
    collectives = [
        CollectiveTimes(c["kind"], c["ranks"], max(1, c["ranks"] // per_node), _points(c["points"]))
        for c in measured["collectives"]
    ]
    bandwidth, latency_s = _link_of(collectives, num_processes)
    start_s, start_bandwidth = measured.get("start", (0.0, 0.0))
    message_s, message_bandwidth = measured.get("message", (0.0, 0.0))
    slowdown, link_slowdown = measured.get("overlap", (1.0, 1.0))
    node = NodeType(
        device=device.name,
        devices=per_node,
        count=num_nodes,
        bandwidth_bytes_s=bandwidth if per_node > 1 else 0.0,
        latency_s=latency_s if per_node > 1 else 0.0,
        nic_bandwidth_bytes_s=bandwidth if num_nodes > 1 else 0.0,
    )
    return Cluster(
        name=name,
        devices={device.name: device},
        nodes=(node,),
        network_latency_s=latency_s if num_nodes > 1 else 0.0,
        overlap_slowdown=slowdown,
        link_slowdown=link_slowdown,
        start_overhead_s=start_s,
        start_bandwidth_bytes_s=start_bandwidth,
        message_overhead_s=message_s,
        message_bandwidth_bytes_s=message_bandwidth,
        collectives=tuple(collectives),
    )


def _device_of(measured: dict[str, Any], num_processes: int) -> DeviceType:
    if "gpu" in measured:
        curves = ("efficiency", "attention_efficiency")
        own: dict[str, Any] = {
            k: tuple(map(tuple, v)) if k in curves else v for k, v in measured["gpu"].items()
        }
        return DeviceType(**own, measured=measured["measured"])
    curves = {name: _points(points) for name, points in measured["ops"].items()}
    copied, seconds = curves["default"][-1]
    peak = measured["peaks"]["float32"]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceType(
        name="cpu",
        flops=measured["peaks"],
        memory_bytes=memory // num_processes,
        memory_bandwidth_bytes_s=copied / seconds,
        overhead_s=curves["default"][0][1],
        efficiency=tuple((work, min(1.0, work / s / peak)) for work, s in curves["aten.mm"]),
        op_times=curves,
        measured=measured["measured"],
    )


def _points(points: Sequence[Sequence[float]]) -> Points:
    """Sort a measured curve by work, and make its times non-decreasing."""
    curve: list[tuple[float, float]] = []
    most_s = float("inf")
    for work, seconds in sorted(((float(x), float(y)) for x, y in points), reverse=True):
        # A point that is slower than one with more work was disturbed.
        most_s = min(most_s, seconds)
        if not curve or work < curve[-1][0]:
            curve.append((work, most_s))
    return tuple(reversed(curve))


def _link_of(collectives: Sequence[CollectiveTimes], ranks: int) -> tuple[float, float]:
    """Fit bandwidth and latency of a ring to the measured all-reduces over all ranks."""
    for table in collectives:
        if table.kind == "all_reduce" and table.ranks == ranks:
            (small, small_s), (large, large_s) = table.points[0], table.points[-1]
            share = 2 * (ranks - 1) / ranks
            bandwidth = share * (large - small) / max(large_s - small_s, 1e-9)
            return bandwidth, small_s / (2 * (ranks - 1))
    return 0.0, 0.0
