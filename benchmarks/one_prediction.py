"""Compare what each command says of a plan: time, memory and messages of 60 random problems.

`python benchmarks/one_prediction.py [--count N] [--seed N] [--quick] [--json OUT]` draws a model, a
cluster and a point of the joint space or a planner, and prints what the plan predicts beside the
simulations of `simulate --plan`, of `report` and of the step's program, which is verified. A deep
model's plan comes from a few of its blocks (`planners/predict/pipeline/deep.py`), the others from
all. With `--explained` it plans each model on each cluster with `auto` instead, and holds the order
of the plans that `--explain` lists to simulations of their whole programs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations, product
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.driver.models.models import build_example
from shardweave.driver.report.reshards import local_with_reshards
from shardweave.ir.capture.capture import capture
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.verify.program import check
from shardweave.passes.notes import unheard
from shardweave.passes.pipeline import run_passes
from shardweave.planners.auto.estimate import Estimator
from shardweave.planners.auto.evaluate import Evaluator
from shardweave.planners.auto.plans import PlanMaker
from shardweave.planners.auto.reader import CostReader, Depths
from shardweave.planners.auto.space.constraints import Constraints
from shardweave.planners.auto.space.point import JointPoint
from shardweave.planners.auto.space.space import joint_space
from shardweave.planners.call import call_planner
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import RECENT, Lowerings
from shardweave.planners.lowering.plan_passes import plan_passes
from shardweave.planners.lowering.stages.choose import with_pipeline
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import PlanError, Predicted
from shardweave.planners.planning import on_cluster, with_update
from shardweave.planners.predict.predict import TIE, predict_plan, predicted_of, simulate_step

SEARCH = "search"
"""What `auto` sees of a point while it searches; of what it returns it says what the others say."""

WITHIN = 0.01
"""Largest relative difference between two numbers of a plan."""

MODELS = (
    "gpt:layers=4,hidden=256,heads=8,vocab=512,seq=64,batch=16",
    "gpt:layers=12,hidden=512,heads=8,vocab=1024,seq=128,batch=32",
    "hf:llama:tiny,batch=16",
    "unet:channels=32,size=16,levels=1,batch=16",
)
CLUSTERS = ("h100-pod:nodes=1", "dgx-a100:nodes=2", "oases-3090", "amp-het-cluster")
PLANNERS = ("megatron", "amp", "axonn")


@dataclass(frozen=True)
class Numbers:
    """Numbers of a step: seconds, bytes at the peak, and seconds of messages."""

    time_s: float
    peak_bytes: float
    messages_s: float

    @staticmethod
    def of(of_plan: Predicted) -> Numbers:
        return Numbers(of_plan.time_s, of_plan.peak_bytes, sum(of_plan.communication_s.values()))

    def apart(self, other: Numbers) -> float:
        """The largest share by which a number differs from another's."""
        pairs = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return max(abs(a - b) / max(a, b, 1e-12) for a, b in pairs)


def numbers_of(program: Program, plan: Plan, cluster: Cluster) -> dict[str, Numbers]:
    """Collect what each command says of a plan.

    Raises ValueError for a plan that cannot be lowered, PlanError for an invalid program.
    """
    said = on_cluster(program, plan, cluster)
    assert said.predicted is not None
    staged = with_pipeline(plan, program, Mesh(**plan.mesh))
    with unheard():
        step = run_passes(program.clone(), plan_passes(staged))
        reported, _ = local_with_reshards(program, plan)
    check(step)
    return {
        "plan": Numbers.of(said.predicted),
        "simulate --plan": Numbers.of(predicted_of(simulate_step(program, cluster, plan=plan))),
        "report": _simulated(reported, plan, cluster),
        "step": _simulated(step, plan, cluster),
    }


def _simulated(program: Program, plan: Plan, cluster: Cluster) -> Numbers:
    return Numbers.of(
        predicted_of(
            simulate_step(
                program,
                cluster,
                optimizer_multiplier=None,
                precision=plan.precision,
                update=plan.update,
            )
        )
    )


@dataclass(frozen=True)
class Row:
    """A problem, and what was said of it by each command."""

    model: str
    cluster: str
    plan: str
    numbers: Mapping[str, Numbers]

    @property
    def apart(self) -> float:
        """By how much what commands say of the plan differs."""
        first, *others = (n for name, n in self.numbers.items() if name != SEARCH)
        return max(first.apart(other) for other in others)

    @property
    def search_apart(self) -> float:
        """By how much what the search saw of the plan, maybe by a few blocks, differs from it."""
        return self.numbers["step"].apart(self.numbers.get(SEARCH, self.numbers["step"]))


@cache
def program_of(spec: str) -> Program:
    with FakeTensorMode():
        example = build_example(spec, dtype=torch.float32)
    return capture(example.module, kwargs=example.kwargs)


@cache
def evaluator_of(spec: str, place: str) -> Evaluator:
    reader = CostReader(Depths.of(program_of(spec)), find_cluster(place))
    return Evaluator(PlanMaker(Estimator(reader), place))


@cache
def points_of(spec: str, place: str) -> tuple[list[JointPoint], list[JointPoint]]:
    """All points of a space, without and with stages or micro-batches."""
    reader = evaluator_of(spec, place).maker.estimator.reader
    space = joint_space(reader, None, Constraints())
    points = [found for point in space.all_points() for found in space.variants(point)]
    return [p for p in points if not p.is_staged], [p for p in points if p.is_staged]


def drawn(chosen: random.Random) -> Row | None:
    """A row of a problem that is drawn; None for one that is refused."""
    spec, place = chosen.choice(MODELS), chosen.choice(CLUSTERS)
    program, cluster = program_of(spec), find_cluster(place)
    if chosen.random() < 0.25:
        planner = chosen.choice(PLANNERS)
        mesh = Mesh(data=cluster.num_devices) if planner == "megatron" else None
        try:
            plan = call_planner(planner, program, mesh, cluster=cluster)
        except PlanError:
            return None
        plan = with_update(plan, chosen.choice(("", "AdamW", "Muon")))
        return Row(spec, place, planner, numbers_of(program, plan, cluster))
    evaluator, pools = evaluator_of(spec, place), points_of(spec, place)
    point = chosen.choice(pools[chosen.random() < 0.7] or pools[0])
    predicted = evaluator.predict(point)
    if predicted is None:
        return None
    plan = evaluator.maker.plan(point, program)
    numbers = numbers_of(program, plan, cluster)
    return Row(spec, place, str(point), numbers | {SEARCH: Numbers.of(predicted)})


def rows_of(count: int, seed: int) -> Iterator[Row]:
    chosen = random.Random(seed)
    found = 0
    while found < count:
        row = drawn(chosen)
        if row is not None:
            found += 1
            yield row


def explained(spec: str, place: str) -> list[tuple[str, float, float]]:
    """The plans that `auto` lists, each with its step as it says and as its whole program takes."""
    program, cluster = program_of(spec), find_cluster(place)
    plan = call_planner("auto", program, None, cluster=cluster, options={"propose": False})
    space = joint_space(evaluator_of(spec, place).maker.estimator.reader, None, Constraints())
    points = {str(v): v for point in space.all_points() for v in space.variants(point)}
    lowerings = Lowerings(program, most=RECENT)
    found: list[tuple[str, float, float]] = []
    for one in plan.candidates:
        if one.name in points:
            own = evaluator_of(spec, place).maker.plan(points[one.name], program)
            whole_s = predict_plan(lowerings, own, cluster).time_s
            found.append((one.name, one.predicted.time_s, whole_s))
    return found


def misplaced(rows: Sequence[tuple[str, float, float]]) -> list[str]:
    """Pairs that are said to differ by more than a tie, and are the other way round."""
    return [
        f"{first} before {second}"
        for (first, said_s, whole_s), (second, other_s, other_whole_s) in combinations(rows, 2)
        if other_s - said_s > TIE * said_s and other_whole_s < whole_s
    ]


def check_explained(models: Sequence[str], clusters: Sequence[str]) -> int:
    num_pairs, wrong = 0, list[str]()
    for spec, place in product(models, clusters):
        try:
            rows = explained(spec, place)
        except PlanError as error:
            print(f"{spec} on {place}: {error}")
            continue
        num_pairs += len(rows) * (len(rows) - 1) // 2
        wrong += misplaced(rows)
        apart = max((abs(whole_s / said_s - 1) for _, said_s, whole_s in rows), default=0.0)
        print(f"{spec} on {place}: {len(rows)} plans, at most {apart:.2%} off", flush=True)
    print("\n".join([f"{num_pairs} pairs, {len(wrong)} the other way round", *wrong]))
    return 1 if wrong else 0


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(box=None)
    for name in ("model", "cluster", "plan"):
        table.add_column(name, overflow="fold")
    for name in ("time", "memory", "apart", "search"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        step = row.numbers["step"]
        table.add_row(
            row.model.partition(",")[0].replace(":", " "), row.cluster, escape(row.plan),
            f"{1e3 * step.time_s:.2f} ms", f"{step.peak_bytes / 2**20:.1f} MiB", f"{row.apart:.2%}",
            f"{row.search_apart:.2%}",
        )  # fmt: skip
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="six problems")
    parser.add_argument("--explained", action="store_true", help="the order of --explain instead")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.explained:
        return check_explained(
            *((MODELS[1:2], CLUSTERS[:1]) if options.quick else (MODELS, CLUSTERS))
        )
    rows: list[Row] = []
    for row in rows_of(6 if options.quick else options.count, options.seed):
        rows.append(row)
        words = f"{row.apart:.3%}, while searching {row.search_apart:.3%}"
        print(f"{row.model} on {row.cluster}: {row.plan}: {words}", file=sys.stderr)
        if options.json:
            records = [asdict(row) | {"apart": row.apart} for row in rows]
            options.json.write_text(json.dumps({"within": WITHIN, "rows": records}, indent=1))
    Console(width=140).print(table_of(rows))
    off = [row for row in rows if row.apart > WITHIN]
    print(f"{len(rows) - len(off)} of {len(rows)} agree within {WITHIN:.0%}")
    near = sum(row.search_apart <= WITHIN for row in rows)
    print(f"{near} of {len(rows)} are within {WITHIN:.0%} of what the search sees")
    return 1 if off else 0


if __name__ == "__main__":
    raise SystemExit(main())
