"""One rank of benchmarks/context.py."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))

import modelled_link
from overlap_worker import Method, as_rows, time_in_turn

from shardweave.backends.distributed import step_of
from shardweave.backends.runtime import Runtime
from shardweave.driver.models import build_example
from shardweave.driver.steady import awake, hasten_network_threads
from shardweave.ir.capture.capture import capture
from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program
from shardweave.planners.cost.simulate import simulate
from shardweave.planners.lower import local_program
from shardweave.planners.megatron import plan_megatron

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


def methods(settings: dict[str, Any], cluster: str) -> list[Method]:
    """All rows, in the order of the table."""
    example = build_example(settings["model"])
    program = capture(example.module, kwargs=example.kwargs)
    runtime = Runtime(MESH)
    if settings["link"] == "modelled":
        modelled_link.slow_down(settings["rate"])
    found: list[Method] = []
    for name in ROWS:
        local = program_of(name, program, cluster)
        step = step_of(local, example.module, runtime)
        run = lambda step=step: step(**example.kwargs)  # noqa: E731
        found.append(Method(name, run, local, step))
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


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with awake():
        cluster = f"testbed:rate={settings['rate']}"
        says = torch_says(init_device_mesh("cpu", (2,)))
        rows = methods(settings, cluster)
        for row in rows:
            row.step()
        hasten_network_threads()
        times = time_in_turn(rows, settings["rounds"])
        if dist.get_rank() == 0:
            entries = as_rows(rows, times, cluster)
            for row, entry in zip(rows, entries, strict=True):
                assert row.program is not None
                result = simulate(row.program, cluster)
                entry["exposed_s"] = result.exposed_communication_s
            Path(settings["out"]).write_text(json.dumps({"rows": entries, "torch": says}))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
