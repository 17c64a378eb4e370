"""The planner `auto`: plans a program for a cluster by a joint search."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.text import without_gc
from shardweave.planners.auto.estimate import Estimator
from shardweave.planners.auto.evaluate import Evaluator
from shardweave.planners.auto.plans import PlanMaker
from shardweave.planners.auto.proposals import AMP, proposals
from shardweave.planners.auto.reader import CostReader, Depths
from shardweave.planners.auto.search import JointSearch
from shardweave.planners.auto.space.constraints import Constraints, point_of, with_memory
from shardweave.planners.auto.space.point import BUCKETS
from shardweave.planners.auto.space.space import joint_space
from shardweave.planners.auto.worth import looked_at, over_own, why_empty, worth
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.memory import check_plan_precision
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.cost.quantity import counted, gib
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Candidate, PlanError, Predicted
from shardweave.planners.predict.predict import check_some_fit, with_candidates
from shardweave.planners.trials.trials import Host


@dataclass(frozen=True)
class AutoOptions:
    """simulate: most points to simulate (four times as many while none fits, and a few more to
    recompute fewer layers); 0: 64, for a deep model 16. time_limit_s: seconds after which the
    search returns the best plan so far, or simulates the best estimate if nothing was simulated
    yet; 0: no limit. fix, forbid: values of dimensions, such as `tensor=8,zero=1`. memory: usable
    memory of each device, such as 70GiB; empty: all of it. propose: also price other planners'
    plans. precision, expert_load, update: as in `Plan`. top: number of candidates in the plan.
    """

    simulate: int = 0
    time_limit_s: float = 0.0
    fix: str = ""
    forbid: str = ""
    memory: str = ""
    propose: bool = True
    precision: str = ""
    expert_load: float = 1.0
    update: str = ""
    top: int = 5


SIMULATED, SIMULATED_DEEP = 64, 16
"""Default numbers of simulated points. Simulating a small model takes about 0.1 s, a few layers of
a large one a second."""

MOST_WHOLE = 3
"""Simulations of a deep model with all its blocks, per candidate that the plan lists."""

CLOSE = 0.03
"""Relative difference up to which plans are compared by simulations of the whole model, if it has a
few more layers than `DEEP`: extrapolated steps of a GPT of 12 layers under ZeRO 3 took 2.4% less
than whole ones."""

FEW_LAYERS, MANY_LAYERS = 16, 48
"""Most blocks for which all listed plans are simulated in full, and most for which plans with
stages are: ten blocks take a second, three with stages."""

AUTO_DEFAULTS = AutoOptions()


@without_gc()
def plan_auto(
    program: Program,
    mesh: Mesh | None,
    *,
    cluster: Cluster,
    cluster_name: str = "",
    host: Host | None = None,
    options: AutoOptions = AUTO_DEFAULTS,
) -> Plan:
    """Find the fastest plan over all dimensions jointly, priced by one cost model.

    Objective: simulated seconds of a step, with the update of `options.update`, among plans that
    fit into memory with that optimizer's state (or Adam's in the plan's precision). Space:
    `JointSpace` on all devices of the cluster, or on those of `mesh`, and other planners' plans.
    Exact within the space if the search ends by itself, as far as its bounds hold (`search`); the
    plan's reasons say whether it did. Time: one partition for each distinct (tensor degree,
    sequence parallelism, rows per micro-batch), about 50 us per point, and one lowering per
    simulated point. For a model of more than eight equal blocks, a few blocks are partitioned and
    the step is extrapolated, so that the time does not grow with depth.

    Raises PlanError if no point meets the constraints or none fits, with the smallest shortfall.
    """
    search = joint_search(program, mesh, cluster, cluster_name, host, options)
    search.run()
    rivals: list[Rival] = []
    try:
        for rival in proposed(search, options):
            rivals.append(rival)
    except KeyboardInterrupt:
        search.stopped = "it was interrupted"
    return best_plan(search, rivals, options)


def joint_search(
    program: Program,
    mesh: Mesh | None,
    cluster: Cluster,
    cluster_name: str = "",
    host: Host | None = None,
    options: AutoOptions = AUTO_DEFAULTS,
) -> JointSearch:
    """Prepare the search of `plan_auto`, which takes the same arguments."""
    check_plan_precision(options.precision)
    start_s = time.monotonic()
    cluster = with_memory(cluster, options.memory)
    constraints = Constraints.parse(options.fix, options.forbid)
    depths = Depths.of(program)
    reader = CostReader(depths, cluster, options.expert_load)
    estimator = Estimator(reader, options.precision, options.update)
    name = _name_of(cluster, cluster_name, options)
    limit_s = options.time_limit_s
    return JointSearch(
        space=joint_space(reader, mesh, constraints, has_list=bool(name) and not depths.is_deep),
        estimator=estimator,
        evaluator=Evaluator(PlanMaker(estimator, name, options.precision, options.update)),
        capacity=float(min(d.memory_bytes for d in cluster.device_types(cluster.num_devices))),
        simulate=options.simulate or (SIMULATED_DEEP if depths.is_deep else SIMULATED),
        deadline_s=start_s + limit_s if limit_s else float("inf"),
        tell=host.tell if host else None,
    )


def _name_of(cluster: Cluster, name: str, options: AutoOptions) -> str:
    """Name of the cluster in a plan, for schedule `list`; empty if no name or file denotes it."""
    if name or options.memory:
        return name
    try:
        return cluster.name if find_cluster(cluster.name) == cluster else ""
    except ValueError:
        return ""


Rival = tuple[str, Callable[[], Plan], Predicted]
"""Another planner's plan: a name, a function that plans the whole program, a prediction."""


def proposed(search: JointSearch, options: AutoOptions) -> Iterator[Rival]:
    """Yield other planners' plans, priced under a few schedules; planners that fail are skipped."""
    if not options.propose or search.stopped.startswith("it "):
        return
    wide = [point for point, _ in search.seen if point.tensor > 1 and point.stages == 1]
    meshes = [Mesh(data=point.replicas, tensor=point.tensor) for point in wide]
    others = proposals(
        search.evaluator,
        search.estimator.cluster,
        search.space.mesh,
        options.precision,
        list(dict.fromkeys(meshes)),
    )
    depths, joined = search.evaluator.depths, _joined_bytes(search)
    for name, make in others:
        if time.monotonic() > search.deadline_s:
            return
        search.say(f"asking {name}")
        try:
            is_whole = name == AMP
            plans = [make(p) for p in ((depths.program,) if is_whole else depths.priced)]
        except ValueError:
            continue
        first = plans[0]
        orders = dict.fromkeys(((first.schedule, 0), ("", joined), ("cross-pass", 0)))
        for schedule, size in [*orders][: 1 if is_whole and depths.is_deep else None]:

            def whole(plan: Plan, schedule: str = schedule, size: int = size) -> Plan:
                return replace(_bare(plan, schedule, size), update=options.update)

            point = point_of(whole(first))
            if not search.space.constraints.allows(point) or (
                search.space.whole and point.micro_batches > 1
            ):
                continue
            try:
                predicted = search.evaluator.predict_plans([whole(plan) for plan in plans])
            except ValueError:
                continue
            words = f"{name}, {schedule or 'in-order'}"
            words += f", buckets of {size // 2**20} MiB" if size else ""
            yield words, lambda make=make, whole=whole: whole(make(depths.program)), predicted


def _joined_bytes(search: JointSearch) -> int:
    """Bucket bytes of the fastest fitting point with other buckets than the default; 0 if none."""
    sizes = (point.buckets for point, predicted in search.seen if predicted.fits)
    return next((size * 2**20 for size in sizes if size != BUCKETS[0]), 0)


def _bare(plan: Plan, schedule: str, alone_bytes: int) -> Plan:
    """Set a plan's schedule and buckets, and drop its planner's prediction and reasons."""
    return replace(
        plan, schedule=schedule, alone_bytes=alone_bytes, predicted=None, candidates=(), reasons=()
    )


def best_plan(search: JointSearch, rivals: list[Rival], options: AutoOptions) -> Plan:
    """Return the plan of the fastest point or rival, with the reasons for it. Raises PlanError if
    none fits."""
    seen = search.seen
    rows = [Candidate(str(point), predicted) for point, predicted in seen]
    rows += [Candidate(name, predicted) for name, _, predicted in rivals]
    _check_any(search, rows)
    rows.sort(key=_by_time)
    # Orders that change nothing give one program under several names.
    rows = list(
        {(row.predicted.time_s, row.predicted.peak_bytes): row for row in rows[::-1]}.values()
    )
    rows.reverse()
    reasons = [*looked_at(search)]
    depths = search.evaluator.depths
    points = {str(point): point for point, _ in seen}
    makers = {name: make for name, make, _ in rivals}

    def plan_of(name: str) -> Plan:
        if name in points:
            return search.evaluator.maker.plan(points[name], depths.program)
        plan = makers[name]()
        return replace(plan, notes=(*plan.notes, f"proposed by {name}"), planner="auto")

    rows = _with_whole_best(search, rows, plan_of, options.top)
    for row in rows:
        if row.name in points:
            search.evaluator.simulated[points[row.name]] = row.predicted
    best = rows[0]
    plan = plan_of(best.name)
    if best.name not in points:
        reasons += over_own(search, best)
    reasons += worth(search, points.get(best.name) or point_of(plan), best.predicted)
    if depths.is_deep:
        reasons.append(
            f"plans were simulated on a few of the {len(depths.names)} equal blocks, from which "
            "their steps follow; the best was then simulated whole"
        )
    return with_candidates(replace(plan, reasons=tuple(reasons)), rows[: max(1, options.top)])


def _with_whole_best(
    search: JointSearch, rows: list[Candidate], plan_of: Callable[[str], Plan], top: int
) -> list[Candidate]:
    """Re-rank a deep model's candidates after simulating the first one with all blocks, or if the
    model has at most `FEW_LAYERS` blocks all that are listed or `CLOSE` to the first.

    After `MOST_WHOLE` times as many simulations, other candidates that reach the top are dropped.
    Plans with stages keep extrapolated predictions if the model has more than `MANY_LAYERS` blocks.
    """
    depth = len(search.evaluator.depths.names) if search.evaluator.depths.is_deep else 0
    is_short = 0 < depth <= FEW_LAYERS
    count = max(1, top) if is_short else min(1, depth)
    whole = set[str]()
    while count:
        close = [row for row in rows[count:] if is_short and _is_close(row, rows[0])]
        left = (row for row in (*rows[:count], *close) if row.name not in whole)
        row = next(left, None)
        if row is None:
            break
        if len(whole) == MOST_WHOLE * count:
            rows.remove(row)
            continue
        whole.add(row.name)
        plan = plan_of(row.name)
        if plan.num_stages == 1 or depth <= MANY_LAYERS:
            search.say(f"simulating all blocks of {row.name}")
            predicted = search.evaluator.predict_plans([plan])
            rows[rows.index(row)] = replace(row, predicted=predicted)
            rows.sort(key=_by_time)
    return rows


def _is_close(row: Candidate, best: Candidate) -> bool:
    most_s = (1 + CLOSE) * best.predicted.time_s
    return row.predicted.fits and row.predicted.time_s <= most_s


def _by_time(row: Candidate) -> tuple[bool, float]:
    return not row.predicted.fits, row.predicted.time_s


def _too_early(search: JointSearch, rows: list[Candidate]) -> str:
    """Error message for a search that ended before any plan fitted, with the least memory seen."""
    nearest = min((row.predicted for row in rows), key=lambda p: p.peak_bytes, default=None)
    came = (
        ""
        if nearest is None
        else (
            f"; the smallest of them needs {gib(nearest.peak_bytes)} of "
            f"{gib(nearest.capacity_bytes)} GiB"
        )
    )
    return (
        f"no plan that fits was found yet: {search.stopped}, and "
        f"{counted(len(search.estimates), 'point', 'was')} estimated and {len(rows)} "
        f"simulated{came}. Give it more time (time_limit_s), or more points to simulate (simulate)."
    )


def _check_any(search: JointSearch, rows: list[Candidate]) -> None:
    problem = search.space.whole or next(iter(search.evaluator.problems.values()), "")
    if search.stopped and not any(row.predicted.fits for row in rows):
        raise PlanError(_too_early(search, rows))
    if not search.evaluator.simulated and not any(row.predicted.fits for row in rows):
        raise PlanError(why_empty(search))
    further = "or ask for less (fix, forbid, memory)"
    check_some_fit(rows, search.estimator.cluster, problem, further)
