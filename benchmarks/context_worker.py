"""One rank of benchmarks/context.py."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))

import modelled_link
from overlap_worker import as_rows, cluster_of, given_step
from timed_rows import Settings, TimedRow, Times, run_worker

from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.simulate.simulate import simulate

MESH = Mesh(context=2)
ROWS: dict[str, tuple[bool, int, str]] = {
    "blocking": (True, 1, "blocking"),
    "plain shards, in-order": (False, 1, ""),
    "stripes, in-order": (True, 1, ""),
    "stripes, 4 parts, in-order": (True, 4, ""),
    "stripes, 4 parts, list": (True, 4, "list"),
}
"""Name: whether the sequence is cut in stripes, parts of attention, and the schedule."""


def program_of(name: str, program: Program, cluster: str) -> Program:
    """The program of each rank of one row."""
    in_stripes, parts, schedule = ROWS[name]
    plan = plan_megatron(program, MESH, attention_parts=parts)
    if not in_stripes:
        inputs = {
            key: text.replace('"context":1', '"context"') for key, text in plan.inputs.items()
        }
        plan = replace(plan, inputs=inputs)
    return local_program(program, replace(plan, schedule=schedule, cluster=cluster))


def methods(settings: Settings) -> list[TimedRow]:
    """All rows, in the order of the table."""
    example = build_example(settings["model"])
    program = capture(example.module, kwargs=example.kwargs)
    if settings["link"] == "modelled":
        modelled_link.slow_down(settings["rate"])
    found: list[TimedRow] = []
    for name in ROWS:
        local = program_of(name, program, cluster_of(settings))
        step = given_step(local, example)
        run = lambda step=step: step(**example.kwargs)  # noqa: E731
        found.append(TimedRow(name, run, [step], local))
    return found


def torch_says(mesh: DeviceMesh) -> str:
    """What comes of torch's own context parallelism here: whether it gives eager's attention."""
    torch.manual_seed(0)
    q, k, v = whole = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    q, k, v = parts = [tensor.clone() for tensor in whole]
    try:
        with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 3):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    except (RuntimeError, ValueError, TypeError) as error:  # the table says it
        return f"does not run on {whole[0].device.type}: {type(error).__name__}: {error}"
    # Its shards are a front and a back piece for each rank.
    pieces, rank = expected.chunk(2 * mesh.size(), 2), mesh.get_local_rank()
    mine = torch.cat([pieces[rank], pieces[-1 - rank]], 2)
    if out.shape == mine.shape and torch.allclose(out, mine, atol=1e-5):
        return "runs"
    return f"is not in effect on {whole[0].device.type}: each rank attends to its own keys alone"


def result(rows: list[TimedRow], times: dict[str, Times], settings: Settings) -> dict[str, Any]:
    """The table's rows, and what comes of torch's own. Collective."""
    entries = as_rows(rows, times, settings)
    for row, entry in zip(rows, entries, strict=True):
        assert row.program is not None
        simulated = simulate(row.program, cluster_of(settings))
        entry["exposed_s"] = simulated.exposed_communication_s
    return {"rows": entries, "torch": torch_says(init_device_mesh("cpu", (2,)))}


if __name__ == "__main__":
    run_worker(methods, result)
