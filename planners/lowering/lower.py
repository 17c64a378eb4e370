"""Lowering of a global program by a plan to the program of each rank, for planners.

Planners run the passes of a plan (`planners.lowering.plan_passes`) as the driver does, without
verification, observers and notes, so that they price the program that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from xdsl.passes import ModulePass

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.text import without_gc
from shardweave.passes.pipeline import PassPipeline
from shardweave.planners.lowering.apply_plan import annotate_shardings
from shardweave.planners.lowering.plan_passes import PlanPasses
from shardweave.planners.lowering.stages.cut_stages import store_stages
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline

Passes = Iterable[ModulePass | str]


def local_program(program: Program, plan: Plan) -> Program:
    """Lower a program by a plan to each rank's program, unverified. ValueError for a misfit."""
    return lowered(program, plan, PlanPasses.of(plan).passes)


RECENT = 8
"""Most programs that a search caches. Consecutive plans differ little; programs of large models
take about 50 MB each."""


@dataclass(frozen=True)
class Lowerings:
    """Cache of the local programs of one global program, by plan.

    Plans that differ only in recomputation, offloading, stages, decomposed products, and orders of
    messages and micro-batches share the partitioned program; plans that differ only in the order of
    messages also share the staged program. The cache keeps the `most` programs used last; None:
    all.
    """

    program: Program
    most: int | None = None
    made: dict[str, Program] = field(default_factory=dict[str, Program])

    @staticmethod
    def of(program: Program | Lowerings) -> Lowerings:
        """Return `program` if it is a Lowerings, else a new one of it, which keeps all programs."""
        return program if isinstance(program, Lowerings) else Lowerings(program)

    def local(self, plan: Plan) -> Program:
        """Cached `local_program`. The caller must not change the result."""
        plan = _bare(plan)
        key = plan.to_json()
        return self._remembered(key, lambda: self._lowered(plan, PlanPasses.of(plan).finishing))

    def blocking(self, plan: Plan) -> Program:
        """Cached local program of a plan without its schedule: all its collectives block."""
        plan = _bare(plan)
        if plan.schedule:
            return self.local(plan)
        return self._remembered(
            f"blocking {plan.to_json()}", lambda: self._lowered(plan, PlanPasses.of(plan).own_last)
        )

    def _remembered(self, key: str, make: Callable[[], Program]) -> Program:
        self.made[key] = self.made.pop(key, None) or make()
        if self.most is not None and len(self.made) > self.most:
            del self.made[next(iter(self.made))]
        return self.made[key]

    def _lowered(self, plan: Plan, finishing: Sequence[ModulePass]) -> Program:
        plain = _bare(replace(plan, schedule="", alone_bytes=0))
        cut = self._remembered(f"cut {plain.to_json()}", lambda: self._cut(plain))
        return _further(cut, finishing)

    def _cut(self, plan: Plan) -> Program:
        passes = PlanPasses.of(plan)
        base = replace(
            plan, recompute="none", recompute_in=(), offload="none", decompose=(), cluster=""
        )
        # A user's own pass may read the stages.
        base = base if plan.passes else replace(base, pipeline=_uncut(plan.pipeline))
        partitioned = self._remembered(
            f"partitioned {base.to_json()}",
            lambda: lowered(self.program, base, passes.partitioning),
        )
        if not passes.recomputation:
            return partitioned
        target = partitioned.clone()
        if plan.is_pipeline and plan.pipeline is not None:
            store_stages(target, plan.pipeline.stages)
        PassPipeline(passes.recomputation).change(target)
        return target


def _uncut(pipeline: Pipeline | None) -> Pipeline | None:
    """Reduce a pipeline to the fields that partitioning depends on: whether it has stages, the
    number of micro-batches, and the devices of stages."""
    if pipeline is None:
        return None
    is_placed = pipeline.ranks or pipeline.devices or pipeline.shares
    stages = pipeline.stages if is_placed else (("*",),) * min(2, len(pipeline.stages))
    return replace(pipeline, stages=stages, schedule=Pipeline.schedule)


def _bare(plan: Plan) -> Plan:
    """Copy a plan without the fields that do not affect its program."""
    cluster = plan.cluster if plan.schedule or plan.orders_stages else ""
    return replace(
        plan, cluster=cluster, precision="", predicted=None, reasons=(), notes=(), candidates=(),
        planner=Plan.planner,
    )  # fmt: skip


def lowered(program: Program, plan: Plan, passes: Passes) -> Program:
    """Copy a global program, annotate it by a plan, and run `passes` on the copy."""
    target = program.clone()
    target.set_mesh(Mesh(**plan.mesh))
    with without_gc():
        annotate_shardings(plan, target)
    PassPipeline(passes).change(target)
    return target


def _further(program: Program, passes: Sequence[ModulePass]) -> Program:
    if not passes:
        return program
    target = program.clone()
    PassPipeline(passes).change(target)
    return target
