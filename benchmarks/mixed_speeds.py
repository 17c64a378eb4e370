"""Plans for devices of two speeds: what a plan that knows them gains, measured and simulated.

    python benchmarks/mixed_speeds.py [--quick] [--json FILE]

Four processes, of which the last two are held to half the processor time of the first two: each
sleeps until a device of its speed would be done (`throttle.py`), so that two processes share a core
without disturbing each other. Two pairs of plans: pipelines of four stages, equal ones and AMP's;
and four replicas, with equal micro-batches and in proportion to the speeds. The cluster is what
`profile_machine` measures on two cores, slowed down alike; with --quick it is made up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from rank_processes import rows_of_ranks
from throttle import slowed_device

import shardweave as sw
from shardweave.driver.models.models import build_example
from shardweave.driver.profile.profile import profile_machine
from shardweave.ir.program.program import Program
from shardweave.planners.cost.cluster import Cluster, DeviceType, NodeType
from shardweave.planners.cost.cluster_file import save_cluster
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.partition import partition
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline

WORKER = Path(__file__).with_name("mixed_speeds_worker.py")
MODEL = "gpt:layers=16,hidden=256,heads=8,vocab=256,seq=64,batch=24,tie=false"
QUICK = "gpt:layers=8,hidden=32,heads=4,vocab=64,seq=16,batch=12,tie=false"

FACTORS = (2.0, 2.0, 4.0, 4.0)
"""How many times its processor time each process takes: together they leave a quarter of two cores
idle."""

PAIRS = (("equal stages", "amp"), ("equal shares", "shares in proportion"))
"""The plans that are compared."""


def main() -> int:
    options = parse_options()
    console = Console(width=max(120, Console().width))
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    found = [gain(rows, *pair) for pair in PAIRS]
    console.print(table_of(rows, found))
    if options.json:
        result = {"machine": options.machine, "model": options.model, "rounds": options.rounds,
                  "factors": FACTORS, "rows": rows, "gains": found}  # fmt: skip
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="", help="a GPT of at least eight layers")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each row")
    parser.add_argument("--machine", default="2-core x86-64 CPU, torch CPU build")
    parser.add_argument("--json", default="", help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="a small model, two rounds")
    options = parser.parse_args()
    options.model = options.model or (QUICK if options.quick else MODEL)
    if options.quick:
        options.rounds = 2
    return options


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Plan, start one process per rank, and read the rows that rank 0 writes."""
    example = build_example(options.model)
    program = sw.capture(example.module, kwargs=example.kwargs)
    base = find_cluster("testbed") if options.quick else profiled(program)
    cluster = slowed(base)
    save_cluster(cluster, folder / "cluster.yaml")
    plans = plans_of(program, cluster)
    for name, plan in plans.items():
        plan.save(folder / f"{name}.json")
    settings = {
        "model": options.model,
        "rounds": options.rounds,
        "factors": FACTORS,
        "cluster": str(folder / "cluster.yaml"),
        "plans": {name: str(folder / f"{name}.json") for name in plans},
    }
    return rows_of_ranks(WORKER, settings, len(FACTORS), "", timeout_s=1800)


def profiled(program: Program) -> Cluster:
    """This machine, with a process on each of two cores."""
    plan = pipeline_plan(program, Pipeline(balanced_stages(program, 4), 12))
    return profile_machine(2, [partition(program, sw.Mesh(**plan.mesh), plan)])


def slowed(cluster: Cluster) -> Cluster:
    """Devices as fast as the processes are, two of each speed, with the links of the cluster."""
    (device, *_), (node, *_) = cluster.devices.values(), cluster.nodes
    devices: dict[str, DeviceType] = {}
    nodes: list[NodeType] = []
    for name, factor in (("fast", FACTORS[0]), ("slow", FACTORS[-1])):
        devices[name] = slowed_device(device, factor, name)
        link = node.bandwidth_bytes_s or node.nic_bandwidth_bytes_s
        nodes.append(NodeType(name, 1, FACTORS.count(factor), nic_bandwidth_bytes_s=link))
    latency_s = node.latency_s or cluster.network_latency_s
    return replace(
        cluster,
        name="two speeds",
        devices=devices,
        nodes=tuple(nodes),
        network_latency_s=latency_s,
        collectives=(),
    )


def plans_of(program: Program, cluster: Cluster) -> dict[str, Plan]:
    """The plans that are compared, those of a pair with as many micro-batches."""
    ranks = len(FACTORS)
    amp = sw.plan(program, sw.Mesh(pipeline=ranks), "amp", cluster=cluster)
    assert amp.pipeline is not None
    equal = Pipeline(balanced_stages(program, ranks), amp.pipeline.micro_batches)
    shares = {"equal shares": (3, 3, 3, 3), "shares in proportion": (4, 4, 2, 2)}
    replicas = {
        name: pipeline_plan(program, Pipeline((("*",),), sum(own), shares=(own,)))
        for name, own in shares.items()
    }
    return {"equal stages": pipeline_plan(program, equal), "amp": amp, **replicas}


def pipeline_plan(program: Program, pipeline: Pipeline) -> Plan:
    mesh = sw.Mesh(stage=pipeline.num_places)
    return replace(plan_megatron(program, mesh), pipeline=pipeline)


def gain(rows: list[dict[str, Any]], plain: str, knowing: str) -> dict[str, Any]:
    """How many times faster the second plan is than the first."""
    by_name = {row["name"]: row for row in rows}
    before, after = by_name[plain], by_name[knowing]
    measured = statistics.median(before["times_s"]) / statistics.median(after["times_s"])
    simulated = before["simulated_s"] / after["simulated_s"]
    return {"plans": [plain, knowing], "measured": measured, "simulated": simulated}


def table_of(rows: list[dict[str, Any]], gains: list[dict[str, Any]]) -> Table:
    caption = "; ".join(
        f"{one['plans'][1]} is {one['measured']:.2f} times as fast as {one['plans'][0]}, simulated "
        f"{one['simulated']:.2f}"
        for one in gains
    )
    table = Table(title="four processes of two speeds", caption=caption)
    for name in ("plan", "time", "simulated", "measured / simulated", "micro-batches", "layers"):
        table.add_column(name, justify="left" if name in ("plan", "layers") else "right")
    for row in rows:
        time_s = statistics.median(row["times_s"])
        table.add_row(
            row["name"],
            f"{time_s * 1e3:.0f} ms",
            f"{row['simulated_s'] * 1e3:.0f} ms",
            f"{time_s / row['simulated_s']:.2f}",
            row["micro_batches"],
            row["layers"],
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
