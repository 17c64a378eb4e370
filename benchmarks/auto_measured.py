"""The plan that `auto` chooses for this machine, measured beside all its neighbours.

    python benchmarks/auto_measured.py [--rate 500mbit] [--ranks 2,4] [--quick] [--json FILE]

The machine is profiled, with the model's ops as ranks run them, `auto` plans for it, and steps of
its choice and of all plans that differ in one dimension (the degrees are one) are timed in turn by
the same processes. Plans whose ranks run one program, as where a schedule of messages finds none,
are one row, of which all steps count; by how much these differ is printed. With `--rate` every
process has a network of its own whose link the kernel limits (root, ip and tc). `--ranks 4` does
the same with four processes; where they are more than the cores, each is held to a share of one,
and `auto` plans for devices as slow (`throttle.py`); with `--slow 1` they share the cores. Printed
are the seconds simulated and measured, and the rank of the choice by what was measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

import shaped_link
from rank_processes import rows_of_ranks
from throttle import factor_for, slowed_cluster

from shardweave.driver.models.models import build_example
from shardweave.driver.profile.profile import profile_machine
from shardweave.ir.capture.capture import capture
from shardweave.ir.program.program import Program
from shardweave.planners.auto.estimate import Estimator
from shardweave.planners.auto.evaluate import Evaluator
from shardweave.planners.auto.planner import AutoOptions, plan_auto
from shardweave.planners.auto.plans import PlanMaker
from shardweave.planners.auto.reader import CostReader, Depths
from shardweave.planners.auto.space.constraints import Constraints, point_of
from shardweave.planners.auto.space.point import DIMENSIONS, MESH, JointPoint
from shardweave.planners.auto.space.space import JointSpace, joint_space
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.cluster_file import save_cluster
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.plan.plan import Plan

WORKER = Path(__file__).with_name("auto_measured_worker.py")
MODEL = "gpt:layers=4,hidden=256,heads=8,vocab=1024,seq=128,batch=8"
QUICK = "gpt:layers=1,hidden=32,heads=4,vocab=64,seq=16,batch=2"
FEW = 2
"""Neighbours of a quick run: those that are simulated to be the fastest."""


@dataclass(frozen=True)
class Row:
    """A plan, the seconds that its step takes in the simulator, and a digest of the program."""

    name: str
    plan: Plan
    simulated_s: float
    program: str


def rows_of(
    program: Program, cluster: Cluster, cluster_name: str, most: int | None = None
) -> list[Row]:
    """The choice of `auto`, then its neighbours, the fastest in the simulator first.

    cluster_name: by which plans with schedule `list` find the cluster, a preset or a file. most:
    neighbours; None: all. What cannot be partitioned is left out.
    """
    options = AutoOptions(propose=False)
    plan = plan_auto(program, None, cluster=cluster, cluster_name=cluster_name, options=options)
    reader = CostReader(Depths.of(program), cluster)
    evaluator = Evaluator(PlanMaker(Estimator(reader), cluster_name))
    space = joint_space(reader, None, Constraints.parse("", ""))

    def row(point: JointPoint) -> Row | None:
        found = evaluator.predict(point)
        if found is None or not found.fits:
            return None
        near = evaluator.maker.plan(point, program)
        return Row(str(point), near, found.time_s, local_program(program, near).digest()[:12])

    choice = row(point_of(plan))
    assert choice is not None, "the choice was simulated, and fits"
    near = [one for one in map(row, neighbours(point_of(plan), space)) if one is not None]
    return [choice, *sorted(near, key=lambda one: one.simulated_s)[:most]]


def neighbours(point: JointPoint, space: JointSpace) -> list[JointPoint]:
    """The points of a space that differ in one dimension; the degrees, of which the product is
    given, are one, and with them the order of micro-batches, which needs stages."""
    every = {v: None for one in space.points() for v in space.variants(one)}
    return [one for one in every if one != point and len(_changed(one, point)) == 1]


def _changed(one: JointPoint, other: JointPoint) -> set[str]:
    found = {n for n in DIMENSIONS if one.value(n) != other.value(n)}
    if one.stages != other.stages:
        found.discard("pipeline")
    return {"degrees" if name in MESH else name for name in found}


def main() -> int:
    options = parse_options()
    console = Console(width=max(140, Console().width))
    record: dict[str, Any] = {
        "machine": options.machine, "rate": options.rate, "rounds": options.rounds,
        "model": options.model, "results": [],
    }  # fmt: skip
    with shaped_link.shaped_link(max(options.ranks), options.rate):
        for ranks in options.ranks:
            result = measured(options, ranks)
            record["results"].append(result)
            console.print(table_of(result, options))
            console.print(f"{verdict(result['rows'])}; {spread(result['rows'])}")
            if options.json:
                Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="", help="rate of each process's link, as tc writes it")
    parser.add_argument("--ranks", default="2", help="how many processes, in turn")
    parser.add_argument(
        "--slow", type=float, default=0.0, help="a core's share, as 1/F; 1: processes share cores"
    )
    parser.add_argument("--model", default="")
    parser.add_argument("--cluster", default="", help="instead of profiling: a preset or a file")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each plan")
    parser.add_argument("--machine", default="2-core x86-64 CPU, torch CPU build")
    parser.add_argument("--json", default="", help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="a small model, a few neighbours")
    options = parser.parse_args()
    options.ranks = [int(ranks) for ranks in options.ranks.split(",")]
    options.model = options.model or (QUICK if options.quick else MODEL)
    if options.quick:
        options.rounds = 3
    return options


def measured(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """The rows of so many processes, the choice first."""
    example = build_example(options.model)
    program = capture(example.module, kwargs=example.kwargs)
    launcher = shaped_link.launcher() if options.rate else None
    slow = options.slow or factor_for(ranks)
    with tempfile.TemporaryDirectory() as folder:
        found = options.cluster and find_cluster(options.cluster)
        cluster = slowed_cluster(
            found or profile_machine(ranks, [program], launcher=launcher), slow
        )
        name = str(Path(folder, "cluster.yaml"))
        save_cluster(cluster, name)
        rows = rows_of(program, cluster, name, FEW if options.quick else None)
        files = [Path(folder, f"{number}.json") for number in range(len(rows))]
        for path, row in zip(files, rows, strict=True):
            row.plan.save(path)
        settings = {
            "model": options.model,
            "rounds": options.rounds,
            "slow": slow,
            "plans": {row.name: str(path) for row, path in zip(rows, files, strict=True)},
        }
        what = f"a worker of {ranks}"
        times = rows_of_ranks(WORKER, settings, ranks, options.rate, timeout_s=3600, what=what)
    entries = [
        {
            "name": row.name,
            "simulated_s": row.simulated_s,
            "program": row.program,
            "times_s": one["times_s"],
        }
        for row, one in zip(rows, times, strict=True)
    ]
    return {"ranks": ranks, "cluster": cluster.name, "slow": slow, "rows": entries}


def median_s(row: dict[str, Any]) -> float:
    return statistics.median(row["times_s"])


def table_of(result: dict[str, Any], options: argparse.Namespace) -> Table:
    slow = f", each held to 1/{result['slow']:g} of a core" if result["slow"] > 1 else ""
    table = Table(title=f"{result['ranks']} processes{slow}, {options.rate or 'unshaped'} link")
    table.add_column("plan", overflow="fold")
    for name in ("simulated", "measured", "simulated / measured", "measured / choice"):
        table.add_column(name, justify="right", min_width=9)
    choice, *_ = rows = programs_of(result["rows"])
    for row in sorted(rows, key=median_s):
        mark = " (chosen)" if row is choice else ""
        table.add_row(
            row["name"] + mark,
            f"{1e3 * row['simulated_s']:.1f} ms",
            f"{1e3 * median_s(row):.1f} ms",
            f"{row['simulated_s'] / median_s(row):.2f}",
            f"{median_s(row) / median_s(choice):.3f}",
        )
    return table


def programs_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each program, in the order of the first plan that has it, with all its steps."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        one = found.setdefault(row["program"], row | {"times_s": [], "names": []})
        one["times_s"] += row["times_s"]
        one["names"].append(row["name"])
    for one in found.values():
        others = len(one["names"]) - 1
        one["name"] += f" (and {others} more of this program)" if others else ""
    return list(found.values())


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """The rank of the choice, which is the first row, and how far it is from the fastest."""
    choice, *_ = programs = programs_of(rows)
    order = sorted(programs, key=median_s)
    excess = median_s(choice) / median_s(order[0]) - 1
    return (
        f"the choice is {1 + order.index(choice)} of {len(order)} as measured, {excess:.1%} above "
        "the fastest"
    )


def spread(rows: Sequence[dict[str, Any]]) -> str:
    """By how much plans that run one program differ as measured, which is no matter of plans."""
    medians: dict[str, list[float]] = {}
    for row in rows:
        medians.setdefault(row["program"], []).append(median_s(row))
    most = max(max(found) / min(found) - 1 for found in medians.values())
    return f"plans of one program differ by up to {most:.1%}"


if __name__ == "__main__":
    sys.exit(main())
