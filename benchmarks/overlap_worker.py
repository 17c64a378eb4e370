"""One rank of benchmarks/overlap.py."""

from __future__ import annotations

import copy
import statistics
import sys
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent))

import modelled_link
import torch_tensor_parallel
from overlap_methods import ROWS, pipeline
from timed_rows import Settings, TimedRow, Times, run_worker

import shardweave as sw
from shardweave.driver.models.models import Example, build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.simulate.simulate import simulate

TORCH = "torch-tensor-parallel"


def cluster_of(settings: Settings) -> str:
    """What the rows are ordered and simulated for."""
    return settings.get("cluster") or f"testbed:rate={settings['rate']}"


def given_step(local: sw.Program, example: Example) -> sw.CompiledModule:
    """A copy of an example's model that runs one program."""
    model = copy.deepcopy(example.module)
    return sw.compile(model, kwargs=example.kwargs, program=local, backward="in_call")


def methods(settings: Settings) -> list[TimedRow]:
    """All rows that were asked for, in the order of the table."""
    example = build_example(settings["model"])
    program = capture(example.module, kwargs=example.kwargs)
    program.set_mesh(Mesh(tensor=2))
    if settings["link"] == "modelled":
        modelled_link.slow_down(settings["rate"])
    chosen = settings["rows"].split(",") if settings["rows"] else [*ROWS, TORCH]
    found: list[TimedRow] = []
    for name in chosen:
        if name in ROWS:
            local = pipeline(name, program, cluster_of(settings))
            step = given_step(local, example)
            run = lambda step=step: step(**example.kwargs)  # noqa: E731
            found.append(TimedRow(name, run, [step], local))
        elif settings["link"] == "shaped":
            twin = build_example(settings["model"])
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
            run = torch_tensor_parallel.torch_step(twin.module, twin.kwargs, mesh, recompute=True)
            found.append(TimedRow(TORCH, run, [twin.module]))
    return found


def as_rows(
    rows: list[TimedRow], times: dict[str, Times], settings: Settings
) -> list[dict[str, Any]]:
    """The table's rows."""
    first = times.get("blocking", next(iter(times.values())))
    blocking = statistics.median(first["times_s"])
    found: list[dict[str, Any]] = []
    for row in rows:
        times_s = times[row.name]["times_s"]
        median = statistics.median(times_s)
        entry: dict[str, Any] = {
            "name": row.name, "time_s": median, "speedup": blocking / median,
            "times_s": times_s, "collectives": None, "simulated_s": None,
            "lower_bound_s": None, "peak_bytes": None,
        }  # fmt: skip
        if row.program is not None:
            result = simulate(row.program, cluster_of(settings))
            entry |= {
                "collectives": row.program.stats().count(),
                "simulated_s": result.time_s,
                "lower_bound_s": result.lower_bound_s,
                "peak_bytes": result.peak_bytes,
                "communication_share": sum(result.communication_s.values()) / result.time_s,
            }
        found.append(entry)
    return found


if __name__ == "__main__":
    run_worker(methods, as_rows)
