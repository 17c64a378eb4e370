"""Lowering: from a global program and a plan to the program of each rank.

What carries a plan out stands here once, as data: names of passes with their options.
`local_program` runs the functions behind them, so that planners price the program that runs; the
driver runs the passes of the same names (`planners.lowering.plan_passes`), with verification and
observers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardweave.ir.by_identity import ByIdentity
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.dead_code import remove_dead_ops
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import MICRO, parts_of
from shardweave.ir.program.text import without_gc
from shardweave.passes.memory.rematerialize import rematerialize
from shardweave.passes.messages.bucket_collectives import bucket_collectives
from shardweave.passes.messages.delete_redundant_collectives import delete_redundant_collectives
from shardweave.passes.messages.merge_collectives import BUCKET_BYTES, merge_all_reduces
from shardweave.passes.messages.start_collectives import start_collectives
from shardweave.passes.partition.insert_collectives import partition
from shardweave.passes.partition.propagate_shardings import ForwardPass, propagate
from shardweave.passes.partition.unroll_time_axes import unroll_time_axes
from shardweave.passes.prepare.add_pending_sums import add_pending_sums
from shardweave.passes.prepare.cse import merge_equal_ops
from shardweave.passes.prepare.repeat_key_heads import repeat_key_heads
from shardweave.passes.prepare.split_addmm import split_addmms
from shardweave.passes.prepare.split_attention import split_attention
from shardweave.passes.prepare.split_batch import split_batch
from shardweave.passes.prepare.split_projections import split_projections
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.workload import Workload, workload_of
from shardweave.planners.lowering.apply_plan import annotate
from shardweave.planners.lowering.stages.cut_stages import cut_stages, store_stages
from shardweave.planners.overlap.overlap_communication import reschedule
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline, PlanError
from shardweave.planners.schedules.uneven import shares_text

PARTITIONING = (
    "split-addmm",
    "repeat-key-heads",
    "add-pending-sums",
    "propagate-shardings",
    "insert-collectives",
)
CLEANING = ("cse", "dce")

FINISHING = ("bucket-collectives", "start-collectives")
DEFAULT_SCHEDULE = "in-order"

FUNCTIONS: Mapping[str, Callable[..., object]] = {
    "split-batch": split_batch,
    "split-projections": split_projections,
    "split-addmm": split_addmms,
    "repeat-key-heads": repeat_key_heads,
    "split-attention": split_attention,
    "add-pending-sums": add_pending_sums,
    "propagate-shardings": propagate,
    "insert-collectives": partition,
    "unroll-time-axes": unroll_time_axes,
    "cse": merge_equal_ops,
    "cut-stages": cut_stages,
    "dce": remove_dead_ops,
    "delete-redundant-collectives": delete_redundant_collectives,
    "merge-collectives": merge_all_reduces,
    "rematerialize": rematerialize,
    "bucket-collectives": bucket_collectives,
    "start-collectives": start_collectives,
    "overlap-communication": reschedule,
}
"""What the passes that carry plans out do, with the passes' options."""

WITH_FORWARD_PASS = frozenset({"repeat-key-heads", "add-pending-sums", "propagate-shardings"})
"""Those that read a propagation's forward pass: where they follow each other they share it."""

Lowering = list[tuple[str, dict[str, Any]]]
"""Names of passes with their options, in order."""


def annotation_steps(plan: Plan) -> Lowering:
    """What follows `apply-plan` before propagation."""
    micro_batches = plan.pipeline.micro_batches if plan.pipeline else 1
    steps: Lowering = []
    if micro_batches > 1:
        steps.append(("split-batch", {"n": micro_batches, "axis": MICRO}))
    if plan.batch_split > 1:
        steps.append(("split-batch", {"n": plan.batch_split}))
    return steps


def lowering_of(plan: Plan) -> Lowering:
    """What follows `apply-plan`, from the annotated program to the one that follows the plan.

    Raises PlanError for a schedule that needs a cluster without one.
    """
    return partitioning_of(plan) + recomputation_of(plan) + finishing_of(plan)


def partitioning_of(plan: Plan) -> Lowering:
    """The first part of `lowering_of`: to a local program that waits for every message."""
    steps = annotation_steps(plan)
    if plan.projections:
        steps.append(("split-projections", {}))
    steps += [(name, dict[str, Any]()) for name in PARTITIONING]
    if plan.attention_parts > 1:
        at = PARTITIONING.index("repeat-key-heads") - len(PARTITIONING) + 1
        steps.insert(len(steps) + at, ("split-attention", {"parts": plan.attention_parts}))
    if plan.batch_split > 1:
        steps.append(("unroll-time-axes", {"keep": MICRO} if plan.is_pipeline else {}))
    steps += [(name, {}) for name in CLEANING]
    if not plan.is_pipeline:
        steps.append(("merge-collectives", {}))
    if plan.zero in (1, 2):
        steps.append(("delete-redundant-collectives", {}))
    return steps


def recomputation_of(plan: Plan) -> Lowering:
    """The part of `lowering_of` that computes values again, and cuts what is then there."""
    steps: Lowering = []
    if plan.recompute != "none":
        options = {"policy": plan.recompute}
        options |= {"blocks": ",".join(plan.recompute_in)} if plan.recompute_in else {}
        steps.append(("rematerialize", options))
    if plan.is_pipeline and plan.pipeline is not None:
        # Behind it every pass works on one function at a time.
        options = {"schedule": plan.pipeline.schedule, "zero": plan.zero or 3}
        if plan.pipeline.shares:
            options["shares"] = shares_text(plan.pipeline.shares)
        if plan.orders_stages and plan.cluster:
            options["cluster"] = plan.cluster
        steps += [("cut-stages", options), ("merge-collectives", {})]
    return steps


def finishing_of(plan: Plan) -> Lowering:
    """The last part of `lowering_of`: which messages there are, and when they travel."""
    if plan.schedule == "list" and not plan.cluster:
        raise PlanError(
            "the plan's schedule 'list' orders ops for a cluster, and the plan names none; "
            "give 'cluster', a preset's name or a file, or another schedule."
        )
    options = {"schedule": plan.schedule or DEFAULT_SCHEDULE}
    if plan.schedule and plan.cluster:
        options["cluster"] = plan.cluster
    # The papers' schedules are as they are there.
    names = FINISHING if options["schedule"] in (DEFAULT_SCHEDULE, "list") else FINISHING[1:]
    steps: Lowering = [
        (name, _buckets_of(plan) if name == "bucket-collectives" else {}) for name in names
    ]
    return [*steps, ("overlap-communication", options)]


def _buckets_of(plan: Plan) -> dict[str, Any]:
    """Options of `bucket-collectives`: buckets hold what does not travel alone."""
    if not plan.alone_bytes:
        return {}
    return {"bytes": max(BUCKET_BYTES, plan.alone_bytes), "alone_bytes": plan.alone_bytes}


def local_program(program: Program, plan: Plan) -> Program:
    """The program of each rank of the plan's mesh, from a global one, which stays as it is.

    Raises ValueError (PlanError) if the plan does not fit. Nothing is verified.
    """
    return lowered(program, plan, lowering_of(plan))


RECENT = 8
"""Programs that a search remembers. Plans that follow each other differ in little; programs of
large models take some 50 MB each."""


@dataclass(frozen=True)
class Lowerings:
    """The local programs of one global program, each made once: plans may share them.

    Plans that differ only in what they recompute, where their stages begin and in the orders of
    messages and micro-batches are partitioned once; those that differ in the order of messages
    alone are cut into stages once.
    At most `most` programs are remembered, those asked for last; None: all.
    """

    program: Program
    most: int | None = None
    made: dict[str, Program] = field(default_factory=dict[str, Program])
    _works: ByIdentity[Workload] = field(default_factory=ByIdentity[Workload])

    @staticmethod
    def of(program: Program | Lowerings) -> Lowerings:
        """Those given, or new ones that remember all."""
        return program if isinstance(program, Lowerings) else Lowerings(program)

    def local(self, plan: Plan) -> Program:
        """`local_program`, remembered. What is returned must not be changed."""
        plan = _bare(plan)
        key = plan.to_json()
        return self._remembered(key, lambda: self._lowered(plan, finishing_of(plan)))

    def blocking(self, plan: Plan) -> Program:
        """The same, but without a schedule of the plan's every message is waited for at once."""
        plan = _bare(plan)
        if plan.schedule:
            return self.local(plan)
        return self._remembered(f"blocking {plan.to_json()}", lambda: self._lowered(plan, []))

    def workload(
        self, plan: Plan | None, cluster: Cluster, like: Hashable = None, mesh: Mesh | None = None
    ) -> Workload:
        """The blocks of a plan's `blocking` program, or of the global one, each read once.

        like: equal for clusters that are made of one, on which the blocks cost the same; `cluster`
        itself if None.
        """
        key = plan and plan.to_json(), like or id(cluster), mesh
        found = self._works.find(key)
        if found is None:
            program = self.blocking(plan) if plan else self.program
            found = self._works.keep(key, workload_of(program, cluster, mesh), cluster)
        return found

    def _remembered(self, key: str, make: Callable[[], Program]) -> Program:
        self.made[key] = self.made.pop(key, None) or make()
        if self.most is not None and len(self.made) > self.most:
            del self.made[next(iter(self.made))]
        return self.made[key]

    def _lowered(self, plan: Plan, finishing: Lowering) -> Program:
        plain = _bare(replace(plan, schedule="", alone_bytes=0))
        cut = self._remembered(f"cut {plain.to_json()}", lambda: self._cut(plain))
        return _further(cut, finishing)

    def _cut(self, plan: Plan) -> Program:
        base = replace(
            plan, recompute="none", recompute_in=(), cluster="", pipeline=_uncut(plan.pipeline)
        )
        partitioned = self._remembered(
            f"partitioned {base.to_json()}",
            lambda: lowered(self.program, base, partitioning_of(base)),
        )
        steps = recomputation_of(plan)
        if not steps:
            return partitioned
        target = partitioned.clone()
        if plan.is_pipeline and plan.pipeline is not None:
            store_stages(target, plan.pipeline.stages)
        _take_through(target, steps)
        return target


def _uncut(pipeline: Pipeline | None) -> Pipeline | None:
    """As far as partitioning sees it: whether there are stages, how many micro-batches there are,
    and which devices stages are on."""
    if pipeline is None:
        return None
    is_placed = pipeline.ranks or pipeline.devices or pipeline.shares
    stages = pipeline.stages if is_placed else (("*",),) * min(2, len(pipeline.stages))
    return replace(pipeline, stages=stages, schedule=Pipeline.schedule)


def _bare(plan: Plan) -> Plan:
    """The plan without what it says of itself, and what no program shows."""
    cluster = plan.cluster if plan.schedule or plan.orders_stages else ""
    return replace(
        plan, cluster=cluster, precision="", predicted=None, reasons=(), notes=(), candidates=(),
        planner=Plan.planner,
    )  # fmt: skip


def lowered(program: Program, plan: Plan, steps: Lowering) -> Program:
    """A copy of a global program, annotated by a plan and taken through some steps."""
    target = program.clone()
    target.set_mesh(Mesh(**plan.mesh))
    with without_gc():
        annotate(plan, target)
    _take_through(target, steps)
    return target


def _further(program: Program, steps: Lowering) -> Program:
    """A copy of a program, taken through some steps; the program itself if there are none."""
    if not steps:
        return program
    target = program.clone()
    _take_through(target, steps)
    return target


def _take_through(target: Program, steps: Lowering) -> None:
    forward = ForwardPass(target)
    with without_gc():
        for name, options in steps:
            if name in WITH_FORWARD_PASS:
                FUNCTIONS[name](target, forward, **options)
                continue
            forward.forget()
            for part in parts_of(target):
                FUNCTIONS[name](part, **options)
