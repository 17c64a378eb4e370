"""What `auto` loses against the best of everything: every plan of its space, simulated in full.

`python benchmarks/auto_regret.py [--models NAME ..] [--places NAME ..] [--forbid ..]
[--sweeps FOLDER] [--json OUT]`
takes four models on one node of four devices, on two nodes of two with a slow link, and on the one
node with so little memory that no plan without recomputation fits. All points of the space that
`auto` searches are simulated, under each order of messages and micro-batches; then `auto` plans.
Its regret is its step over the fastest of those that fit. `list`, whose orders take long to find,
is left out of both, as is what `--forbid` names beside it. Sweeps take minutes: those in a folder
are read, and others are written there.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardweave.driver.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.program import Program
from shardweave.ir.text import without_gc
from shardweave.planners.auto import plan_auto
from shardweave.planners.auto.constraints import Constraints
from shardweave.planners.auto.estimate import Estimator
from shardweave.planners.auto.evaluate import Evaluator
from shardweave.planners.auto.planner import AutoOptions
from shardweave.planners.auto.plans import PlanMaker
from shardweave.planners.auto.point import JointPoint
from shardweave.planners.auto.reader import CostReader, Depths
from shardweave.planners.auto.space import joint_space
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.presets import find_cluster

MODELS = {
    "gpt": "gpt:layers=2,hidden=512,heads=8,vocab=2048,seq=256,batch=4",
    "llama": "hf:llama:num_hidden_layers=2,hidden_size=512,num_attention_heads=8,"
    "num_key_value_heads=8,intermediate_size=1024,vocab_size=2048,batch=4,seq=256",
    "bert": "hf:bert:num_hidden_layers=2,hidden_size=512,num_attention_heads=8,"
    "intermediate_size=2048,vocab_size=2048,max_position_embeddings=256,batch=4,seq=256",
    "unet": "unet:channels=64,size=32,batch=4,levels=2",
}

PLACES = ("one node", "slow link", "tight")
SLOW_BYTES_S = 1.25e9
"""Of the link between two nodes: 10 Gbit/s."""

LEFT_OUT = "schedule=list,pipeline=list"
COLLECT_EACH = 32
"""Simulations between two collections of garbage, which take longer the more is alive."""


@dataclass(frozen=True)
class Step:
    """What a point takes."""

    time_s: float
    peak_bytes: float


Sweep = Mapping[JointPoint, Step]


def cluster_of(place: str, devices: int) -> Cluster:
    """The cluster of a place; the memory of a tight one is chosen later (`tight_memory`)."""
    found = find_cluster("perlmutter:nodes=1")
    node = replace(found.nodes[0], devices=devices)
    if place == "slow link":
        node = replace(
            node, devices=devices // 2, count=2, nics=1, nic_bandwidth_bytes_s=SLOW_BYTES_S
        )
    return replace(found, name=place, nodes=(node,))


def all_points(program: Program, cluster: Cluster, forbid: str) -> Sweep:
    """Every point of the joint space, simulated; what cannot be partitioned is left out."""
    reader = CostReader(Depths.of(program), cluster)
    evaluator = Evaluator(PlanMaker(Estimator(reader)))
    space = joint_space(reader, None, Constraints.parse("", forbid), has_list=False)
    cut = (point for tensor in space.tensor for point in space.sequence_points(tensor))
    points = {v: None for point in (*space.points(), *cut) for v in space.variants(point)}

    def partition(point: JointPoint) -> tuple[object, ...]:
        return (
            point.tensor, point.context, point.data, point.sequence_parallel, point.sub_batches,
            point.micro_batches, point.stages, point.zero, point.recompute, point.pipeline,
            point.schedule,
        )  # fmt: skip

    with without_gc():
        for number, point in enumerate(sorted(points, key=partition)):
            evaluator.predict(point)
            if number % COLLECT_EACH == 0:
                gc.collect()
    return {p: Step(one.time_s, one.peak_bytes) for p, one in evaluator.found.items()}


def read_sweep(path: Path) -> Sweep:
    rows = json.loads(path.read_text())
    return {JointPoint(**row["point"]): Step(**row["step"]) for row in rows}


def write_sweep(path: Path, sweep: Sweep) -> None:
    rows = [{"point": asdict(point), "step": asdict(step)} for point, step in sweep.items()]
    path.write_text(json.dumps(rows) + "\n")


def sweep_of(
    program: Program, cluster: Cluster, forbid: str, folder: Path | None, name: str
) -> Sweep:
    """The sweep of that name in a folder, made and put there if it is not."""
    path = folder and folder / f"{name.replace(' ', '-')}.json"
    if path and path.exists():
        return read_sweep(path)
    found = all_points(program, cluster, forbid)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sweep(path, found)
    return found


def tight_memory(sweep: Sweep) -> int:
    """Bytes into which the leanest plan without recomputation does not fit, and others do."""
    lean = {
        is_none: min(
            one.peak_bytes for point, one in sweep.items() if (point.recompute == "none") == is_none
        )
        for is_none in (True, False)
    }
    return int((lean[False] + lean[True]) / 2) if lean[False] < lean[True] else int(lean[True])


def row_of(program: Program, cluster: Cluster, sweep: Sweep, forbid: str) -> dict[str, Any]:
    """What `auto` finds, beside the best of a sweep that fits into the cluster's memory."""
    memory = min(one.memory_bytes for one in cluster.devices.values())
    fitting = {p: one.time_s for p, one in sweep.items() if one.peak_bytes <= memory}
    best = min(fitting, key=lambda point: fitting[point])
    start_s = time.process_time()
    plan = plan_auto(
        program, None, cluster=cluster, options=AutoOptions(forbid=forbid, propose=False)
    )
    assert plan.predicted is not None, "a plan of auto is simulated"
    return {
        "points": len(sweep),
        "fit": len(fitting),
        "best": str(best),
        "best_s": fitting[best],
        "auto": plan.candidates[0].name,
        "auto_s": plan.predicted.time_s,
        "regret": plan.predicted.time_s / fitting[best] - 1,
        "processor_s": time.process_time() - start_s,
    }


def problems(options: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for model in options.models:
        example = build_example(MODELS[model])
        program = capture(example.module, kwargs=example.kwargs)
        sweeps: dict[str, Sweep] = {}
        for place in options.places:
            cluster = cluster_of(place, options.devices)
            like = "one node" if place == "tight" else place
            if like not in sweeps:
                sweeps[like] = sweep_of(
                    program, cluster, options.forbid, options.sweeps, f"{model} {like}"
                )
            if place == "tight":
                memory = tight_memory(sweeps[like])
                devices = {n: replace(d, memory_bytes=memory) for n, d in cluster.devices.items()}
                cluster = replace(cluster, devices=devices)
            yield model, place, row_of(program, cluster, sweeps[like], options.forbid)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--forbid", default=LEFT_OUT)
    parser.add_argument("--sweeps", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {"devices": options.devices, "forbid": options.forbid, "problems": {}}
    for model, place, row in problems(options):
        record["problems"][f"{model}, {place}"] = row
        print(
            f"{model}, {place}: {row['points']} plans, {row['fit']} fit; best {row['best']} in "
            f"{1e3 * row['best_s']:.3f} ms; auto {row['auto']}, regret {row['regret']:.2%}, "
            f"{row['processor_s']:.1f} s",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    worst = max(row["regret"] for row in record["problems"].values())
    print(f"worst regret {worst:.2%}")
    return 0 if worst <= 0.02 else 1


if __name__ == "__main__":
    sys.exit(main())
