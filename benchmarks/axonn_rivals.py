"""Megatron-LM and ZeRO-3, simulated as AxoNN is on the models of its Table I.

`python benchmarks/planners.py axonn-rivals [--quick] [--json FILE]`.
Both get this project's overlaps of messages, and recompute each layer. ZeRO-3 is AxoNN's grid
z=GPUs, with weights gathered once more for the backward pass. Megatron-LM is the rule of Narayanan
et al. 2021 (`planners/megatron`) in 1F1B: for each tensor degree within a node, the fewest stages
that fit; the fastest of these and of three micro-batches is taken. Stacks of one and two layers a
stage are simulated, and the line through both is followed to the whole depth. As in the paper, the
number of layers is rounded to a multiple of the stages; utilisation counts the layers that ran.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, takewhile
from typing import Any

from rich.console import Console

from shardweave.benchmarks.axonn_planner import (
    STATE_BYTES,
    captured,
    seconds_on_grid,
    shape_of_model,
    tables,
    utilisation,
)
from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan_parts import Pipeline, Predicted
from shardweave.planners.predict.predict import predict_plan

TENSOR, MICRO_BATCHES = (1, 2, 4), (1, 2, 4)


def zero_3(name: str, gpus: int) -> dict[str, Any]:
    """A step on the grid z=GPUs."""
    mesh, text = {"data": 1, "z": gpus, "y": 1, "x": 1}, f"perlmutter:nodes={gpus // 4}"
    seconds = seconds_on_grid(name, mesh, 0, find_cluster(text), text)
    return {"mesh": mesh, "step_s": seconds, "utilisation_pct": percent(name, seconds, gpus)}


def percent(name: str, seconds: float, gpus: int) -> float:
    peak = find_cluster("perlmutter").devices["A100-40GB"].flops["bfloat16"]
    return 100 * utilisation(name, seconds, gpus, peak)


def megatron(name: str, gpus: int, degrees: Sequence[int] = TENSOR) -> dict[str, Any]:
    """The fastest of Megatron-LM's plans that fit."""
    depth, cluster = shape_of_model(name)[0], find_cluster(f"perlmutter:nodes={gpus // 4}")
    rows: list[dict[str, Any]] = []
    for tensor in degrees:
        fitting: list[dict[str, Any]] = []
        for stages in takewhile(lambda stages: 2 * stages <= depth, (2**n for n in count())):
            mesh = {"pipeline": stages, "data": gpus // stages // tensor, "tensor": tensor}
            tried = (deepened(name, mesh, samples, cluster) for samples in MICRO_BATCHES)
            fitting = [row for row in takewhile(lambda row: row is not None, tried) if row]
            if fitting:
                break
        rows += fitting
    best = min(rows, key=lambda row: row["step_s"] / row["layers"])
    whole = best["step_s"] * depth / best["layers"]
    return best | {"utilisation_pct": percent(name, whole, gpus)}


def deepened(
    name: str, mesh: Mapping[str, int], samples: int, cluster: Cluster
) -> dict[str, Any] | None:
    """A step with micro-batches of some samples at the whole depth; None if it does not fit."""
    stages = mesh["pipeline"]
    layers, hidden, _ = shape_of_model(name)
    depth = max(1, round(layers / stages))
    capacity = cluster.devices["A100-40GB"].memory_bytes
    if depth * 12 * hidden**2 * STATE_BYTES / mesh["tensor"] > capacity:
        return None
    first, second = (predicted(name, mesh, each, samples, cluster) for each in (1, 2))
    used = first.peak_bytes + (depth - 1) * (second.peak_bytes - first.peak_bytes)
    if used > capacity:
        return None
    return {
        "mesh": dict(mesh),
        "micro_batch": samples,
        "layers": depth * stages,
        "step_s": first.time_s + (depth - 1) * (second.time_s - first.time_s),
    }


def predicted(
    name: str, mesh: Mapping[str, int], depth: int, samples: int, cluster: Cluster
) -> Predicted:
    """Simulate a stack with `depth` layers in each stage."""
    batch = tables()["weak_scaling"]["batch_tokens"] // tables()["weak_scaling"]["seq_len"]
    program = captured(name, depth * mesh["pipeline"], batch)
    stages = tuple(
        tuple(f"h.{layer}" for layer in range(depth * stage, depth * (stage + 1)))
        for stage in range(mesh["pipeline"])
    )
    plan = plan_megatron(program, Mesh(data=mesh["data"], tensor=mesh["tensor"]))
    sizes = {"pipeline": mesh["pipeline"]} if mesh["pipeline"] > 1 else {}
    plan = replace(
        plan,
        mesh={**sizes, **plan.mesh},
        pipeline=Pipeline(stages, batch // mesh["data"] // samples),
        recompute="layer",
        precision="bf16-mixed",
    )
    return predict_plan(program, plan, cluster)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the arguments of every subcommand suffice."""


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Simulate both on every model, print percents of peak; what `--json` writes."""
    console, rows = Console(width=None if sys.stdout.isatty() else 120), list[dict[str, Any]]()
    for entry in tables()["table3_hw_flops_util_pct"][: 1 if options.quick else None]:
        name, gpus = entry["model"], entry["gpus"]
        rivals = {"Megatron-LM": megatron(name, gpus), "ZeRO-3": zero_3(name, gpus)}
        rows.append({"model": name, "gpus": gpus, "rivals": rivals})
        for rival, row in rivals.items():
            console.print(
                f"{name} on {gpus} GPUs, {rival}: {row['utilisation_pct']:.0f}% of peak "
                f"(published {entry[rival]}), {row['mesh']}",
                highlight=False,
            )
    return {"rows": rows}
