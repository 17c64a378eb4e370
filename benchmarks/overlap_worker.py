"""One rank of benchmarks/overlap.py."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

import modelled_link
import torch_tensor_parallel
from overlap_methods import ROWS, pipeline

from shardweave.backends.distributed import step_of
from shardweave.backends.runtime import Runtime
from shardweave.driver.models import build_example
from shardweave.driver.steady import awake, hasten_network_threads
from shardweave.ir.capture.capture import capture
from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program
from shardweave.planners.cost.simulate import simulate

TORCH = "torch-tensor-parallel"


@dataclass
class Method:
    """One row: a step to time, and the program behind it if it is ours."""

    name: str
    step: Callable[[], torch.Tensor]
    program: Program | None = None
    module: torch.nn.Module | None = None


def methods(settings: dict[str, Any], cluster: str) -> list[Method]:
    """All rows that were asked for, in the order of the table."""
    example = build_example(settings["model"])
    program = capture(example.module, kwargs=example.kwargs)
    program.set_mesh(Mesh(tensor=2))
    runtime = Runtime(Mesh(tensor=2))
    if settings["link"] == "modelled":
        modelled_link.slow_down(settings["rate"])
    chosen = settings["rows"].split(",") if settings["rows"] else [*ROWS, TORCH]
    found: list[Method] = []
    for name in chosen:
        if name in ROWS:
            local = pipeline(name, program, cluster)
            step = step_of(local, example.module, runtime)
            run = lambda step=step: step(**example.kwargs)  # noqa: E731
            found.append(Method(name, run, local, step))
        elif settings["link"] == "shaped":
            twin = build_example(settings["model"])
            assert runtime.device_mesh is not None
            run = torch_tensor_parallel.torch_step(
                twin.module, twin.kwargs, runtime.device_mesh, recompute=True
            )
            found.append(Method(TORCH, run, None, twin.module))
    return found


def time_in_turn(rows: list[Method], rounds: int) -> dict[str, list[float]]:
    """Seconds per step of each method; one warm-up, then `rounds` rounds over all methods."""
    times: dict[str, list[float]] = {row.name: [] for row in rows}
    losses: dict[str, float] = {}
    for turn in range(rounds + 1):
        for row in rows:
            assert row.module is not None
            row.module.zero_grad()
            gc.collect()
            dist.barrier()
            begin = time.perf_counter()
            loss = row.step()
            took = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            losses[row.name] = float(loss)
            if turn:
                times[row.name].append(float(took))
    spread = max(losses.values()) - min(losses.values())
    if spread > 1e-4:
        raise SystemExit(f"the methods disagree on the loss: {losses}")
    return times


def as_rows(
    rows: list[Method], times: dict[str, list[float]], cluster: str
) -> list[dict[str, Any]]:
    """The table's rows."""
    blocking = statistics.median(times.get("blocking", next(iter(times.values()))))
    found: list[dict[str, Any]] = []
    for row in rows:
        median = statistics.median(times[row.name])
        entry: dict[str, Any] = {
            "name": row.name, "time_s": median, "speedup": blocking / median,
            "times_s": times[row.name], "collectives": None, "simulated_s": None,
            "lower_bound_s": None, "peak_bytes": None,
        }  # fmt: skip
        if row.program is not None:
            result = simulate(row.program, cluster)
            entry |= {
                "collectives": row.program.stats().count(),
                "simulated_s": result.time_s,
                "lower_bound_s": result.lower_bound_s,
                "peak_bytes": result.peak_bytes,
                "communication_share": sum(result.communication_s.values()) / result.time_s,
            }
        found.append(entry)
    return found


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with awake():
        cluster = settings["cluster"] or f"testbed:rate={settings['rate']}"
        rows = methods(settings, cluster)
        for row in rows:
            row.step()
        hasten_network_threads()
        times = time_in_turn(rows, settings["rounds"])
        if dist.get_rank() == 0:
            Path(settings["out"]).write_text(json.dumps(as_rows(rows, times, cluster)))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
