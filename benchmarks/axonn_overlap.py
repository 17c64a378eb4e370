"""What AxoNN's overlaps gain, one by one, and Frontier, U-Nets and its ranking of grids.

`python benchmarks/planners.py axonn-overlap [--quick] [--json FILE]`. Programs are compiled and
simulated; nothing is fitted. Of the paper (arXiv 2305.13525):

- Figure 3, GPT-20B on 16 GPUs of Perlmutter: overlaps A to C as orders (`schedule/axonn_orders`),
  D as kept gathers, and beside them the orders of this project. As in the paper, layers are
  recomputed, and each percentage is of the step before it.
- Figure 7, GPT-20B on 32 GPUs: how many of the five fastest grids are among the first five by the
  model that knows where groups are, by one that does not, and by Equation 10 as printed. The
  paper measured all grids; here they are simulated.
- Figure 10, GPT-80B on 1,024 dies of Frontier: seconds of communication that nothing hides. ZeRO-3
  is the grid z=1024. DeepSpeed-3D's stages and their micro-batches are not given.
- Table II, U-Nets. The paper's parameters are those of half the channels that it states at the
  first level, doubled at each, which is what `unet:` has. Their times are not given.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.benchmarks.axonn_literal import rank_literally
from shardweave.benchmarks.axonn_planner import (
    OPTIONS,
    PASSES,
    captured,
    gpt_model,
    shape_of_model,
    tables,
)
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import run_passes
from shardweave.planners.axonn.planner import plan_axonn
from shardweave.planners.axonn.search import Model, Ranked, rank_grids
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.lowering.plan_passes import PARTITIONING
from shardweave.planners.overlap.axonn_orders import AXONN_ORDERS
from shardweave.planners.simulate.simulate import simulate

NO_DELETION = PASSES.replace("delete-redundant-collectives,", "")
KEPT_GATHERS = PASSES.replace("collectives,", "collectives{kind=all_gather},", 1)
FULL = "axonn-abc"
"""The order with all three of AxoNN's overlaps."""

STEPS: Mapping[str, tuple[str, str]] = {
    "blocking": ("blocking", NO_DELETION),
    "overlap_all_reduce": ("axonn-a", NO_DELETION),
    "overlap_reduce_scatter": ("axonn-ab", NO_DELETION),
    "overlap_all_gather": (FULL, NO_DELETION),
    "cache_all_gather": (FULL, KEPT_GATHERS),
    "list": ("list", KEPT_GATHERS),
    "list, reductions kept too": ("list", PASSES),
}
"""By the names of Figure 3: the order, and the passes before it."""

assert set(AXONN_ORDERS) < {order for order, _ in STEPS.values()}
NEAR = 5
"""Grids that count as efficient in Figure 7."""


@dataclass(frozen=True)
class Step:
    """Seconds of a step, and of its communication that nothing hides."""

    time_s: float
    exposed_s: float

    def extended(self, two: Step, layers: int) -> Step:
        """The step of so many layers from those of one and of two."""
        depth = layers - 1
        return Step(
            self.time_s + depth * (two.time_s - self.time_s),
            self.exposed_s + depth * (two.exposed_s - self.exposed_s),
        )


def local_program(program: Program, grid: Mapping[str, int], passes: str) -> Program:
    """A program cut on a grid and started."""
    mesh = Mesh(**grid)
    plan = replace(plan_axonn(program, mesh), recompute="none")
    return run_passes(program, [ApplyPlanPass.of(plan), *PARTITIONING, passes], mesh=mesh)


def step_of(local: Program, order: str, cluster_text: str) -> Step:
    """A started program in an order, within a device's memory."""
    cluster = find_cluster(cluster_text)
    memory = min(one.memory_bytes for one in cluster.devices.values())
    spec = f'schedule={order} cluster="{cluster_text}" memory-cap={memory}'
    found = simulate(run_passes(local, f"overlap-communication{{{spec}}}"), cluster)
    return Step(found.time_s, found.exposed_communication_s)


def steps_of(
    model: str, samples: int, grid: Mapping[str, int], cluster: str, names: Iterable[str]
) -> dict[str, Step]:
    """Steps of a model of Table I at its whole depth, in some of `STEPS`."""
    layers = shape_of_model(model)[0]
    found: dict[str, Step] = {}
    programs: dict[tuple[int, str], Program] = {}
    for name in names:
        order, passes = STEPS[name]
        for depth in (1, 2):
            if (depth, passes) not in programs:
                program = captured(model, depth, samples)
                programs[depth, passes] = local_program(program, grid, passes)
        one, two = (step_of(programs[depth, passes], order, cluster) for depth in (1, 2))
        found[name] = one.extended(two, layers)
    return found


def figure_3() -> dict[str, Any]:
    """GPT-20B on 16 GPUs: seconds of a step, and what each overlap gains in percent."""
    published = tables()["comm_opt_improvements_pct_fig3"]
    samples = published["batch_tokens"] // published["seq_len"]
    x, y, z, data = published["Gx,Gy,Gz,Gdata"]
    grid = {"data": data, "z": z, "y": y, "x": x}
    found = steps_of(published["model"], samples, grid, "perlmutter:nodes=4", STEPS)
    first = found["blocking"].time_s
    rows: list[dict[str, Any]] = []
    before = first
    for name, step in found.items():
        paper = [value for key, value in published.items() if key.startswith(name)]
        rows.append(
            {
                "step": name,
                **asdict(step),
                "gain_pct": 100 * (1 - step.time_s / before),
                "total_pct": 100 * (1 - step.time_s / first),
                "published_pct": paper[0] if paper else None,
            }
        )
        before = step.time_s
    return {"rows": rows, "published_total_pct": published["total"]}


def figure_7(quick: bool) -> dict[str, Any]:
    """Hits of both rankings among the fastest simulated grids of GPT-20B on 32 GPUs."""
    published = tables()["fig7_validation"]
    cluster_text, samples = "perlmutter:nodes=8", 16
    cluster = find_cluster(cluster_text)
    model = gpt_model(published["model"], samples)
    aware = rank_grids(model, cluster, published["gpus"], OPTIONS)
    agnostic = rank_grids(model, cluster, published["gpus"], replace(OPTIONS, aware=False))
    aware, agnostic = _possible(aware, samples), _possible(agnostic, samples)
    tried = aware[:NEAR] if quick else aware
    times = {
        one.grid: steps_of(
            published["model"], samples, one.mesh, cluster_text, ["cache_all_gather"]
        )["cache_all_gather"].time_s
        for one in tried
    }
    fastest = sorted(times, key=lambda grid: times[grid])
    found: dict[str, Any] = {"num_grids": len(times), "best": fastest[0]}
    for name, ranking in (("aware", aware), ("agnostic", agnostic)):
        grids = [one.grid for one in ranking]
        found[f"{name}_hits_in_top5"] = len(set(grids[:NEAR]) & set(fastest[:NEAR]))
        found[f"rank_of_best_{name}"] = grids.index(fastest[0]) + 1
    printed = as_printed(model, cluster, aware)
    found["rank_of_best_printed"] = printed.index(fastest[0]) + 1
    return found | {"published": published}


def as_printed(model: Model, cluster: Cluster, grids: Sequence[Ranked]) -> list[tuple[int, ...]]:
    """Some grids in the order of the paper's equations as they are printed, memory aside."""
    among = {one.grid for one in grids}
    devices = math.prod(grids[0].grid)
    return [one.grid for one in rank_literally(model, cluster, devices) if one.grid in among]


def _possible(ranked: Sequence[Ranked], samples: int) -> list[Ranked]:
    """The grids that divide a batch."""
    return [one for one in ranked if samples % (one.grid[2] * one.grid[3]) == 0]


def figure_10(quick: bool) -> dict[str, Any]:
    """GPT-80B on 1,024 dies of Frontier: communication that nothing hides, in seconds."""
    scaling = tables()["weak_scaling"]
    samples, cluster_text = scaling["batch_tokens"] // scaling["seq_len"], "frontier:nodes=128"
    cluster = find_cluster(cluster_text)
    ranked = rank_grids(gpt_model("GPT-80B", samples), cluster, 1024, OPTIONS)
    tried = ranked[: 1 if quick else 3]
    order = "cache_all_gather"
    steps = [steps_of("GPT-80B", samples, one.mesh, cluster_text, [order])[order] for one in tried]
    best = min(range(len(steps)), key=lambda index: steps[index].time_s)
    zero = {"data": 1, "z": 1024, "y": 1, "x": 1}
    sharded = "overlap_all_gather"
    return {
        "grid": tried[best].mesh,
        "AxoNN": asdict(steps[best]),
        "ZeRO-3": asdict(steps_of("GPT-80B", samples, zero, cluster_text, [sharded])[sharded]),
        "published_exposed_s": tables()["fig10_frontier_80B_1024_nonoverlapped_comm_s"],
    }


def unet_row(row: Mapping[str, Any], tries: int) -> dict[str, Any]:
    """A U-Net of Table II in AxoNN's order: the fastest of the first few grids by the model."""
    setup = tables()["unet_setup"]
    cluster_text = f"perlmutter:nodes={row['gpus'] // 4}"
    cluster = find_cluster(cluster_text)
    spec = (
        f"unet:channels={row['channels'] // 2},size={setup['image'][0]},batch={setup['batch']},"
        f"levels={setup['levels']},blocks={setup['resblocks_per_level']}"
    )
    with FakeTensorMode():
        example = build_example(spec, dtype=torch.bfloat16)
    program = capture(example.module, kwargs=example.kwargs)
    plan = plan_axonn(program, None, cluster=cluster, precision="bf16-mixed", top=tries)
    (device,) = cluster.devices.values()
    found: list[tuple[float, dict[str, Any]]] = []
    for candidate in plan.candidates:
        grid = {axis.name: axis.size for axis in Mesh.parse(candidate.name).axes}
        local = local_program(program, grid, NO_DELETION)
        step = step_of(local, FULL, cluster_text)
        share = sum(local.stats().flops.values()) / step.time_s / device.flops["bfloat16"]
        found.append((step.time_s, {"grid": grid, **asdict(step), "utilisation_pct": 100 * share}))
    parameters = sum(one.numel() for one in example.module.parameters())
    return {
        "model": row["model"],
        "gpus": row["gpus"],
        "parameters": parameters,
        **min(found, key=lambda pair: pair[0])[1],
    }


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Figure 3: the gain of every overlap, the paper's beside ours."""
    table = Table(title="GPT-20B on 16 GPUs of Perlmutter: what each overlap gains")
    for title in ("step", "seconds", "of it exposed", "gain, %", "paper, %", "in all, %"):
        table.add_column(title)
    for row in rows:
        paper = row["published_pct"]
        table.add_row(
            row["step"],
            f"{row['time_s']:.2f}",
            f"{row['exposed_s']:.2f}",
            f"{row['gain_pct']:.0f}",
            "" if paper is None else str(paper),
            f"{row['total_pct']:.0f}",
        )
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the arguments of every subcommand suffice."""


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Simulate everything, print it; what `--json` writes."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    breakdown = figure_3()
    console.print(table_of(breakdown["rows"]))
    ranking, frontier = figure_7(options.quick), figure_10(options.quick)
    for title, found in (("Figure 7", ranking), ("Figure 10", frontier)):
        console.print(f"{title}: {found}", highlight=False)
    rows: list[dict[str, Any]] = []
    for row in tables()["table2_unet"][: 1 if options.quick else None]:
        rows.append(unet_row(row, 1 if options.quick else 3))
        console.print(rows[-1], highlight=False)
    return {"figure_3": breakdown, "figure_7": ranking, "figure_10": frontier, "table_2": rows}
