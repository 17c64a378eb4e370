"""The planner that tries every plan of a small space; the baseline that others are judged by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.auto.reader import REPEATING
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.degrees import asked_degrees, divisors
from shardweave.planners.cost.memory import check_plan_precision
from shardweave.planners.cost.quantity import counted
from shardweave.planners.cost.workload import Workload, batch_of, workload_of
from shardweave.planners.lowering.lower import RECENT, Lowerings
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import RECOMPUTE, Candidate, PlanError, Predicted
from shardweave.planners.plan.zero import DIVIDED
from shardweave.planners.predict.predict import check_some_fit, predict_plan, with_candidates

SPLITS = (1, 2, 4)
SPLIT_SCHEDULE = "cross-pass"
"""Where there are sub-batches, one's communication runs beside another's compute."""


@dataclass(frozen=True)
class GridPoint:
    """One point of the space."""

    data: int
    tensor: int
    sequence_parallel: bool
    recompute: str
    batch_split: int

    def __str__(self) -> str:
        words = [f"data={self.data},tensor={self.tensor}"]
        words += ["sequence parallel"] if self.sequence_parallel else []
        words += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        words += [f"{self.batch_split} sub-batches"] if self.batch_split > 1 else []
        return ", ".join(words)

    @property
    def base(self) -> GridPoint:
        """The same shardings and whole batches, without recomputation that `estimated` adds."""
        recompute = "none" if self.recompute in REPEATING else self.recompute
        return replace(self, recompute=recompute, batch_split=1)


def plan_exhaustive(
    program: Program,
    mesh: Mesh | None,
    *,
    cluster: Cluster,
    zero: int = 0,
    precision: str = "",
    simulate: int = 24,
    top: int = 5,
) -> Plan:
    """The fastest of all: data x tensor x sequence parallelism x recomputation x sub-batches.

    Space: degrees of data and tensor whose product is the cluster's devices, or those of a mesh,
    cut by Megatron's rule; sequence parallelism or not; each of the four policies of recomputation;
    1 sub-batch under schedule `in-order`, 2 or 4 under `cross-pass`. Nothing else varies: there is
    one stage, no micro-batch, no axis of sequences or of experts, buckets are as usual and ZeRO as
    it is given; `auto` searches all of that. Objective: simulated seconds of a step, of plans that
    fit into memory. Exact in that space if it has at most `simulate` plans: each is partitioned and
    simulated. Of a larger one every sharding is partitioned, the rest of the space is estimated
    from its blocks (`estimated`), and the best `simulate` are simulated; a reason says so. `top`:
    candidates that the plan lists. `zero`: the ZeRO stage of plans with replicas. `precision`: as
    of a plan. Time: a partition for each plan simulated.

    Raises PlanError if none can be made or none fits, with the smallest shortfall of memory.
    """
    check_plan_precision(precision)
    if zero not in range(len(DIVIDED)) or simulate < 1:
        raise PlanError(
            f"exhaustive: zero is {zero} and simulate {simulate}; give a stage of ZeRO, 0 to "
            f"{len(DIVIDED) - 1}, and 1 plan or more."
        )
    plans = {
        one: replace(plan, zero=zero if one.data > 1 else 0, precision=precision)
        for one, plan in _plans(program, mesh, cluster)
    }
    if not plans:
        raise PlanError(
            f"no mesh of data x tensor has {cluster.num_devices} devices and divides the batch of "
            "this program; change the batch, or give a mesh."
        )
    space = _Space(Lowerings(program, most=RECENT), cluster)
    chosen = list(plans)
    every = f"all {len(plans)} plans were" if len(plans) > 1 else "the only plan was"
    reason = f"{every} partitioned and simulated"
    if len(plans) > simulate:
        chosen = _best_estimates(plans, space)[:simulate]
        best = f"best {simulate} were" if simulate > 1 else "best was"
        reason = f"{counted(len(plans), 'plan', 'was')} estimated by block; the {best} simulated"
    found = [
        Candidate(str(one), predicted)
        for one in chosen
        if (predicted := space.predict(plans[one])) is not None
    ]
    check_some_fit(found, cluster, space.problem)
    # A sort is stable: of plans that take as long, the simpler comes first.
    found.sort(key=lambda row: (not row.predicted.fits, row.predicted.time_s))
    plan = next(plan for one, plan in plans.items() if str(one) == found[0].name)
    return with_candidates(replace(plan, reasons=(reason,)), found[: max(1, top)])


def _plans(
    program: Program, mesh: Mesh | None, cluster: Cluster
) -> Iterator[tuple[GridPoint, Plan]]:
    """The space. Shardings that equal another one are left out, and sub-batches that do not
    divide a device's samples."""
    batch = batch_of(program)
    seen: list[Plan] = []
    for data, tensor in _degrees(mesh, cluster):
        for sequence_parallel in (False, True):
            goal = Mesh(data=data, tensor=tensor)
            plan = plan_megatron(program, goal, sequence_parallel=sequence_parallel)
            is_idle = (data > 1 and not plan.inputs) or (tensor > 1 and not plan.parameters)
            if is_idle or replace(plan, notes=()) in seen:
                continue
            seen.append(replace(plan, notes=()))
            plan = replace(plan, planner="exhaustive")
            splits = [n for n in SPLITS if batch // data % n == 0]
            for policy, split in product(RECOMPUTE, splits):
                choice = GridPoint(data, tensor, sequence_parallel, policy, split)
                schedule = SPLIT_SCHEDULE if split > 1 else ""
                yield choice, replace(plan, recompute=policy, batch_split=split, schedule=schedule)


def _degrees(mesh: Mesh | None, cluster: Cluster) -> list[tuple[int, int]]:
    if mesh is None:
        devices = cluster.num_devices
        return [(devices // n, n) for n in divisors(devices)]
    sizes = asked_degrees(mesh, ("data", "tensor"), "exhaustive")
    return [(sizes.get("data", 1), sizes.get("tensor", 1))]


@dataclass(eq=False)
class _Space:
    """Partitions and simulates. problem: why the first plan that could not be partitioned could
    not, for those to know whose plans all cannot."""

    lowerings: Lowerings
    cluster: Cluster
    problem: str = ""

    def predict(self, plan: Plan) -> Predicted | None:
        """None for what cannot be partitioned, such as a batch that does not divide further."""
        try:
            return predict_plan(self.lowerings, plan, self.cluster)
        except ValueError as error:
            self.problem = self.problem or str(error)
            return None


def _best_estimates(plans: Mapping[GridPoint, Plan], space: _Space) -> list[GridPoint]:
    """All choices, those that fit into memory by their estimate first, then by its seconds."""
    works: dict[GridPoint, tuple[Predicted, Workload]] = {}
    for one in dict.fromkeys(choice.base for choice in plans):
        predicted = space.predict(plans[one])
        if predicted is not None:
            local = space.lowerings.local(replace(plans[one], zero=0))
            works[one] = predicted, workload_of(local, space.cluster)
    # The device type with the least arithmetic.
    types = space.cluster.devices.values()
    device = min(types, key=lambda device: max(device.flops.values())).name
    found = {one: estimated(*works[one.base], one, device) for one in plans if one.base in works}
    return sorted(found, key=lambda one: (not found[one].fits, found[one].time_s))


def estimated(base: Predicted, work: Workload, choice: GridPoint, device: str) -> Predicted:
    """What recomputation and sub-batches change of a step that has neither, in closed form.

    base: the simulated step. work: its blocks. Recomputation by one of `REPEATING` runs the
    repeated blocks' forward pass again (`layer`: with its communication) and keeps what enters
    them, and of the block at hand all; by another policy it is part of the base. With n
    sub-batches, all but 1/n of the tensor axis' communication can hide behind all but 1/n of the
    compute.
    """
    repeated = [one for one in work.blocks if one.is_repeated]
    compute_s, communication = base.compute_s, dict(base.communication_s)
    memory = dict(base.memory_bytes)
    if choice.recompute in REPEATING:
        compute_s += sum(one.forward_s[device] for one in repeated)
        dropped = sum(one.kept_bytes for one in repeated)
        dropped -= max((one.kept_bytes for one in repeated), default=0)
        dropped -= sum(one.crossing_bytes for one in repeated)
        memory["activations"] = memory.get("activations", 0) - max(0, dropped)
    if choice.recompute == "layer":
        for one in repeated:
            for (axes, phase), seconds in one.communication_s.items():
                if phase == "forward":
                    communication[",".join(axes)] += seconds
    exposed_s = sum(communication.values())
    inside_s, later = communication.get("tensor", 0.0), 1 - 1 / choice.batch_split
    exposed_s -= min(inside_s * later, compute_s * later)
    return replace(
        base,
        time_s=compute_s + exposed_s,
        compute_s=compute_s,
        communication_s=communication,
        exposed_s=exposed_s,
        memory_bytes=memory,
        source="estimated",
    )
