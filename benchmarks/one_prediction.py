"""Compare what each command says of a plan: time, memory and messages of 60 random problems.

`python benchmarks/one_prediction.py [--count N] [--seed N] [--quick] [--json OUT]` draws a model, a
cluster, and a planner, a point of the joint space or a plan by hand, and prints what the plan
predicts beside the simulations of `simulate --plan`, of `report` and of the step's program, which
is verified. `search` is what a point's step was while `auto` searched, by a few blocks of a deep
model. With `--explained` it plans models on clusters with `auto` instead, and holds the order of
the plans that `--explain` lists, and what it says choices are worth, to simulations of their whole
programs. OUT holds both, and a run goes on behind the rows that it finds there.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import combinations, product
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardweave.benchmarks.fuzz_plans import mixed_point, program_of, with_fields
from shardweave.driver.report.reshards import local_with_reshards
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.verify.program import check
from shardweave.passes.notes import unheard
from shardweave.passes.pipeline import run_passes
from shardweave.planners.auto.planner import AutoOptions, best_plan, joint_search, proposed
from shardweave.planners.auto.search import JointSearch
from shardweave.planners.auto.space.point import JointPoint
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

QUICK = 6

WITHIN = 0.01
"""Largest relative difference between two numbers of a plan."""

MODELS = (
    "gpt:layers=4,hidden=256,heads=8,vocab=512,seq=64,batch=16",
    "gpt:layers=12,hidden=512,heads=8,vocab=1024,seq=128,batch=32",
    "hf:llama:tiny,batch=16",
    "hf:llama:tiny,num_hidden_layers=10,hidden_size=256,batch=32,seq=64",
    "hf:bert:tiny,num_hidden_layers=9,batch=16,seq=64",
    "hf:t5:tiny,batch=16,seq=16",
    "unet:channels=32,size=16,levels=1,batch=16",
    "gpt:layers=4,hidden=64,heads=4,vocab=64,seq=32,batch=16,experts=4,choices=2",
)
CLUSTERS = ("h100-pod:nodes=1", "dgx-a100:nodes=2", "oases-3090", "amp-het-cluster")
PLANNERS: Mapping[str, Mapping[str, int]] = {
    "megatron": {},
    "amp": {},
    "axonn": {},
    "oases": {},
    "oppa": {"trials": 8},
    "auto": {"simulate": 4},
}
"""All planners, with options that shorten their searches."""


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
def search_of(spec: str, place: str) -> tuple[JointSearch, list[JointPoint]]:
    """A search that has not begun, and its space's points under one order each."""
    search = joint_search(program_of(spec), None, find_cluster(place), place)
    return search, [*search.space.all_points()]


def drawn(rng: random.Random) -> Row | None:
    """A row of a problem that is drawn; None for one that is refused."""
    spec, place = rng.choice(MODELS), rng.choice(CLUSTERS)
    draw = rng.choice((_of_planner, _of_space, _of_hand))
    try:
        return draw(rng, spec, place)
    except ValueError as error:
        print(f"refused: {error}", file=sys.stderr)
        return None


def _of_planner(rng: random.Random, spec: str, place: str) -> Row:
    planner, devices = rng.choice([*PLANNERS]), find_cluster(place).num_devices
    tensor = rng.choice((2, 4))
    mesh = Mesh(data=devices // tensor, tensor=tensor)
    plan = call_planner(
        planner,
        program_of(spec),
        mesh if planner in ("megatron", "oases") else None,
        cluster=place,
        options=PLANNERS[planner],
    )
    plan = with_update(plan, rng.choice(("", "AdamW", "Muon")))
    return Row(spec, place, planner, numbers_of(program_of(spec), plan, find_cluster(place)))


def _of_space(rng: random.Random, spec: str, place: str) -> Row:
    search, points = search_of(spec, place)
    is_staged = rng.random() < 0.7
    chosen = [point for point in points if point.is_staged == is_staged] or points
    point = rng.choice([*search.space.variants(rng.choice(chosen))])
    evaluator, program = search.evaluator, program_of(spec)
    predicted = evaluator.predict(point)
    if predicted is None:
        raise PlanError(evaluator.problems[point])
    plan = evaluator.maker.plan(point, program)
    numbers = numbers_of(program, plan, find_cluster(place))
    return Row(spec, place, str(point), numbers | {SEARCH: Numbers.of(predicted)})


def _of_hand(rng: random.Random, spec: str, place: str) -> Row:
    """Any mix of dimensions, and fields that no point has, as a person may write them."""
    cluster, program = find_cluster(place), program_of(spec)
    point = mixed_point(rng, cluster.num_devices)
    plan = with_fields(search_of(spec, place)[0].evaluator.maker.plan(point, program), program, rng)
    return Row(spec, place, f"by hand: {point}", numbers_of(program, plan, cluster))


def rows_in(path: Path) -> list[Row]:
    """The rows of the first problems, which a run has written before."""
    return [
        Row(
            row["model"], row["cluster"], row["plan"],
            {name: Numbers(**numbers) for name, numbers in row["numbers"].items()},
        )
        for row in json.loads(path.read_text()).get("rows", [])
    ]  # fmt: skip


def rows_of(numbers: Iterable[int], seed: int) -> Iterator[Row]:
    """Rows of problems, each drawn by its own number."""
    for number in numbers:
        rng = random.Random(f"{seed} {number}")
        row = None
        while row is None:
            row = drawn(rng)
        yield row


@dataclass(frozen=True)
class Explained:
    """What `auto` said of plans of a problem.

    times_s: by plan, the seconds that it said and those of the whole program. pairs: the plans that
    it orders, the faster first, where they differ by more than a tie.
    """

    model: str
    cluster: str
    times_s: Mapping[str, tuple[float, float]]
    pairs: Sequence[tuple[str, str]]

    @property
    def misplaced(self) -> list[str]:
        """Pairs that are the other way round."""
        whole_s = {name: whole for name, (_, whole) in self.times_s.items()}
        return [f"{a} before {b}" for a, b in self.pairs if whole_s[a] > whole_s[b]]

    @property
    def apart(self) -> float:
        return max(abs(whole / said - 1) for said, whole in self.times_s.values())


def explained(spec: str, place: str) -> Explained:
    """Simulate the whole programs of the plans that `auto` lists, and of those that it says a
    choice is worth something against."""
    program, cluster, options = program_of(spec), find_cluster(place), AutoOptions(simulate=16)
    search = joint_search(program, None, cluster, place, options=options)
    search.run()
    rivals = [*proposed(search, options)]
    plan = best_plan(search, rivals, options)
    own = {str(p): partial(search.evaluator.maker.plan, p) for p in search.evaluator.simulated}
    of_others = {name: make for name, make, _ in rivals}
    said_s = {c.name: c.predicted.time_s for c in plan.candidates}
    best, *_ = said_s
    pairs = [(a, b) for a, b in combinations(said_s, 2) if said_s[b] - said_s[a] > TIE * said_s[a]]
    for reason in plan.reasons:
        worth = re.search(r" is worth \S+ \S+ \((\S+)%\) against \S+: (.*)", reason)
        if worth:
            name = max(filter(worth[2].startswith, own), key=len)
            said_s.setdefault(name, said_s[best] * (1 + float(worth[1]) / 100))
            pairs.append((best, name))
    lowerings = Lowerings(program, most=RECENT)
    times_s: dict[str, tuple[float, float]] = {}
    for name, seconds in said_s.items():
        alternative = own[name](program) if name in own else of_others[name]()
        times_s[name] = seconds, predict_plan(lowerings, alternative, cluster).time_s
    return Explained(spec, place, times_s, pairs)


def explain_all(count: int, write: Callable[[Sequence[Explained]], None]) -> int:
    rows: list[Explained] = []
    problems = list(product(MODELS, CLUSTERS))
    random.Random(0).shuffle(problems)
    for spec, place in problems[:count]:
        try:
            row = explained(spec, place)
        except PlanError as error:
            print(f"{spec} on {place}: {error}")
            continue
        rows.append(row)
        write(rows)
        words = f"{len(row.times_s)} plans, at most {row.apart:.2%} off"
        print("\n  ".join([f"{spec} on {place}: {words}", *row.misplaced]), flush=True)
    wrong = sum(len(row.misplaced) for row in rows)
    print(f"{sum(len(row.pairs) for row in rows)} pairs, {wrong} the other way round")
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
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} problems")
    parser.add_argument("--explained", action="store_true", help="the order of --explain instead")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    count = QUICK if options.quick else options.count

    def write(name: str, rows: Sequence[Row | Explained]) -> None:
        """Write `rows` beside what the file says of the other question."""
        if options.json:
            old = json.loads(options.json.read_text()) if options.json.exists() else {}
            records = [asdict(row) | {"apart": row.apart} for row in rows]
            options.json.write_text(json.dumps(old | {name: records}, indent=1) + "\n")

    if options.explained:
        return explain_all(count, partial(write, "explained"))
    rows = rows_in(options.json) if options.json and options.json.exists() else []
    for row in rows_of(range(len(rows), count), options.seed):
        rows.append(row)
        words = f"{row.apart:.3%}, while searching {row.search_apart:.3%}"
        print(f"{row.model} on {row.cluster}: {row.plan}: {words}", file=sys.stderr)
        write("rows", rows)
    Console(width=140).print(table_of(rows))
    off = [row for row in rows if row.apart > WITHIN]
    print(f"{len(rows) - len(off)} of {len(rows)} agree within {WITHIN:.0%}")
    near = sum(row.search_apart <= WITHIN for row in rows)
    print(f"{near} of {len(rows)} are within {WITHIN:.0%} of what the search sees")
    return 1 if off else 0


if __name__ == "__main__":
    raise SystemExit(main())
