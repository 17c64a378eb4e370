"""What `auto` loses against the best of everything: every plan of its space, simulated in full.

`python benchmarks/auto_regret.py [--problems NAME ..] [--forbid ..] [--sweeps FOLDER] [--quick]
[--json OUT]` takes four models on one node of four devices, on two nodes of two with a slow link,
and on the one node with so little memory that no plan without recomputation fits; and a wide GPT in
bf16 on two nodes of Perlmutter, with all their memory and with 1 GiB of each device. All points of
the space that `auto` searches are simulated, under each order of messages and micro-batches, and
the plans of the planners that choose by a model of their own; then `auto` plans. Its regret is its
step over the fastest of those that fit. `list`, whose orders take long to find, is left out of
both, as is what `--forbid` names beside it. Sweeps take minutes: those in a folder are read, and
others are written there.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.benchmarks.auto_bounds import Bounds
from shardweave.benchmarks.baselines.exhaustive import plan_exhaustive
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.text import without_gc
from shardweave.planners.auto.estimate import Estimator
from shardweave.planners.auto.evaluate import Evaluator
from shardweave.planners.auto.planner import AutoOptions, plan_auto
from shardweave.planners.auto.plans import PlanMaker
from shardweave.planners.auto.reader import CostReader, Depths
from shardweave.planners.auto.space.constraints import Constraints, with_memory
from shardweave.planners.auto.space.point import JointPoint
from shardweave.planners.auto.space.space import joint_space
from shardweave.planners.call import call_planner
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.degrees import divisors
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import RECENT, Lowerings
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Predicted
from shardweave.planners.predict.predict import predict_plan

MODELS = {
    "gpt": ("gpt:layers=2,hidden=512,heads=8,vocab=2048,seq=256,batch=4", torch.float32),
    "llama": (
        "hf:llama:num_hidden_layers=2,hidden_size=512,num_attention_heads=8,"
        "num_key_value_heads=8,intermediate_size=1024,vocab_size=2048,batch=4,seq=256",
        torch.float32,
    ),
    "bert": (
        "hf:bert:num_hidden_layers=2,hidden_size=512,num_attention_heads=8,intermediate_size=2048,"
        "vocab_size=2048,max_position_embeddings=256,batch=4,seq=256",
        torch.float32,
    ),
    "unet": ("unet:channels=64,size=32,batch=4,levels=2", torch.float32),
    "wide gpt": (
        "gpt:layers=2,hidden=2048,heads=16,vocab=50304,seq=1024,batch=32",
        torch.bfloat16,
    ),
}
"""A model as `build_example` reads it, and its dtype."""

PROBLEMS: Mapping[str, tuple[str, str]] = {
    f"{model}, {place}": (model, place)
    for model in MODELS
    for place in (
        ("two nodes", "1 GiB") if model == "wide gpt" else ("one node", "slow link", "tight")
    )
}
"""A model and a place by name."""

LIKE = {"tight": "one node"}
"""Places that differ from another in memory alone, and share its sweep."""

BOUNDED = ("two nodes", "1 GiB")
"""Places of many points, where those are not simulated that by their bounds cannot be the best."""

DEVICES = 4
SLOW_BYTES_S = 1.25e9
"""Of the link between two nodes: 10 Gbit/s."""

QUICK = "unet, one node"
"""The problem of a quick run, the one with the fewest plans."""

LEFT_OUT = "schedule=list,pipeline=list"
TOLD_EACH = 500
"""Points of a sweep between two lines that say how far it is."""

COLLECT_EACH = 32
"""Simulations between two collections of garbage, which take longer the more is alive."""


@dataclass(frozen=True)
class Step:
    """What a point takes; is_bound: at least, which is too much to be the best."""

    time_s: float
    peak_bytes: float
    is_bound: bool = False


Sweep = Mapping[JointPoint, Step]


def cluster_of(place: str) -> Cluster:
    """The cluster of a place; the memory of a tight one is chosen later (`tight_memory`)."""
    if place in ("two nodes", "1 GiB"):
        found = find_cluster("perlmutter:nodes=2")
        return with_memory(found, "1GiB") if place == "1 GiB" else found
    found = find_cluster("perlmutter:nodes=1")
    node = replace(found.nodes[0], devices=DEVICES)
    if place == "slow link":
        node = replace(
            node, devices=DEVICES // 2, count=2, nics=1, nic_bandwidth_bytes_s=SLOW_BYTES_S
        )
    return replace(found, name=place, nodes=(node,))


def all_points(
    program: Program, cluster: Cluster, forbid: str, *, bound_s: float | None = None
) -> Sweep:
    """Every point of the joint space, simulated; what cannot be partitioned is left out.

    bound_s: seconds of a plan that fits. Points are left out that by their bounds (`auto_bounds`)
    are slower than it and than the best that fits so far, or do not fit.
    """
    is_bounded = bound_s is not None
    reader = CostReader(Depths.of(program), cluster)
    evaluator = Evaluator(PlanMaker(Estimator(reader)))
    bounds = Bounds(evaluator.maker)
    space = joint_space(reader, None, Constraints.parse("", forbid), has_list=False)
    points = {v: None for point in space.all_points() for v in space.variants(point)}

    def partition(point: JointPoint) -> tuple[object, ...]:
        return (
            is_bounded and point.is_staged,
            point.tensor, point.context, point.replica, point.data, point.sequence_parallel,
            point.sub_batches, point.micro_batches, point.stages, point.zero, point.recompute,
            point.pipeline,
            point.schedule,
        )  # fmt: skip

    memory, best_s = memory_of(cluster), bound_s or math.inf
    sweep: dict[JointPoint, Step] = {}
    with without_gc():
        for number, point in enumerate(sorted(points, key=partition)):
            if number % TOLD_EACH == 0:
                told = f"sweep: {number} of {len(points)} points, the best {1e3 * best_s:.3f} ms"
                print(told, file=sys.stderr, flush=True)
            least_s, least_bytes = bounds.of(point) if is_bounded else (0.0, 0.0)
            if least_s > best_s or least_bytes > memory:
                sweep[point] = Step(least_s, least_bytes, is_bound=True)
                continue
            found = evaluator.predict(point)
            if found is not None:
                if is_bounded:
                    bounds.check(point, found)
                sweep[point] = Step(found.time_s, found.peak_bytes)
                best_s = min(best_s, found.time_s if found.peak_bytes <= memory else math.inf)
            if number % COLLECT_EACH == 0:
                gc.collect()
    return sweep


def memory_of(cluster: Cluster) -> float:
    """Bytes of the smallest device."""
    return float(min(one.memory_bytes for one in cluster.devices.values()))


def read_sweep(path: Path) -> Sweep:
    rows = json.loads(path.read_text())
    return {JointPoint(**row["point"]): Step(**row["step"]) for row in rows}


def write_sweep(path: Path, sweep: Sweep) -> None:
    rows = [{"point": asdict(point), "step": asdict(step)} for point, step in sweep.items()]
    path.write_text(json.dumps(rows) + "\n")


def sweep_of(
    program: Program, cluster: Cluster, options: argparse.Namespace, model: str, place: str
) -> Sweep:
    """The sweep of that name in a folder, made and put there if it is not."""
    path = options.sweeps and options.sweeps / f"{f'{model} {place}'.replace(' ', '-')}.json"
    if path and path.exists():
        return read_sweep(path)
    bound_s = None
    if place in BOUNDED:
        bound_s = predicted(auto(program, cluster, options.forbid)).time_s
    found = all_points(program, cluster, options.forbid, bound_s=bound_s)
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


def others(program: Program, cluster: Cluster) -> dict[str, Predicted]:
    """What the plans of other planners take, by name; those that have none are left out."""
    lowerings = Lowerings(program, most=RECENT)
    meshes = [
        Mesh(data=cluster.num_devices // n, tensor=n)
        for n in divisors(cluster.num_devices)
        if n > 1
    ]
    asked = [(name, None) for name in ("megatron", "exhaustive", "amp", "axonn")]
    found: dict[str, Predicted] = {}
    for name, mesh in (*asked, *(("oases", mesh) for mesh in meshes)):
        try:
            if name == "exhaustive":
                plan = plan_exhaustive(program, mesh, cluster=cluster)
            else:
                plan = call_planner(name, program, mesh, cluster=cluster)
            found[f"{name} on {mesh}" if mesh else name] = predict_plan(lowerings, plan, cluster)
        except ValueError:
            continue
    return found


def row_of(program: Program, cluster: Cluster, sweep: Sweep, forbid: str) -> dict[str, Any]:
    """What `auto` finds, beside the best that fits of a sweep and of other planners' plans."""
    memory = memory_of(cluster)
    simulated = {point: one for point, one in sweep.items() if not one.is_bound}
    bounded = [one for one in sweep.values() if one.is_bound]
    fitting = {str(p): one.time_s for p, one in simulated.items() if one.peak_bytes <= memory}
    rivals = {name: one.time_s for name, one in others(program, cluster).items() if one.fits}
    everything = fitting | rivals
    best = min(everything, key=lambda name: everything[name])
    start_s = time.process_time()
    plan = auto(program, cluster, forbid)
    processor_s, auto_s = time.process_time() - start_s, predicted(plan).time_s
    least_s = min((one.time_s for one in bounded if one.peak_bytes <= memory), default=math.inf)
    if min(auto_s, everything[best]) > least_s:
        raise ValueError("the sweep leaves out what may be the best now; delete it to sweep anew")
    return {
        "points": len(sweep),
        "bounded": len(bounded),
        "fit": len(fitting),
        "best": best,
        "best_s": everything[best],
        "others_s": rivals,
        "auto": plan.candidates[0].name,
        "auto_s": auto_s,
        "regret": auto_s / everything[best] - 1,
        "processor_s": processor_s,
    }


def auto(program: Program, cluster: Cluster, forbid: str) -> Plan:
    return plan_auto(program, None, cluster=cluster, options=AutoOptions(forbid=forbid))


def predicted(plan: Plan) -> Predicted:
    assert plan.predicted is not None, "a plan of auto is simulated"
    return plan.predicted


def rows(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each problem asked for with its row; a model is captured, and a place swept, once."""
    wanted = {name: PROBLEMS[name] for name in options.problems}
    for model in dict.fromkeys(model for model, _ in wanted.values()):
        program = captured(model)
        sweeps: dict[str, Sweep] = {}
        for name, place in ((name, place) for name, (one, place) in wanted.items() if one == model):
            cluster, like = cluster_of(place), LIKE.get(place, place)
            if like not in sweeps:
                sweeps[like] = sweep_of(program, cluster_of(like), options, model, like)
            if place == "tight":
                cluster = with_memory(cluster, f"{tight_memory(sweeps[like])}B")
            yield name, row_of(program, cluster, sweeps[like], options.forbid)


def captured(model: str) -> Program:
    spec, dtype = MODELS[model]
    with FakeTensorMode():
        example = build_example(spec, dtype=dtype)
        return capture(example.module, kwargs=example.kwargs)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--forbid", default=LEFT_OUT)
    parser.add_argument("--sweeps", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK}")
    options = parser.parse_args(arguments)
    if options.quick:
        options.problems = [QUICK]
    record: dict[str, Any] = {"devices": DEVICES, "forbid": options.forbid, "problems": {}}
    for name, row in rows(options):
        record["problems"][name] = row
        print(
            f"{name}: {row['points']} plans, {row['fit']} fit; best {row['best']} in "
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
