"""Conversion of points of the search space to plans, with Megatron's shardings and AMP's cuts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from shardweave.ir.program.program import Program
from shardweave.planners.amp.partition import Problem, exact_cuts
from shardweave.planners.auto.estimate import Estimator, recomputed_share
from shardweave.planners.auto.reader import PieceCost
from shardweave.planners.auto.space.point import BUCKETS, JointPoint
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline, PlanError

Stages = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class PlanMaker:
    """Turns points of the search space into plans. cluster: the name that plans record if list
    scheduling on that cluster orders their messages. precision, update: as in `Plan`."""

    estimator: Estimator
    cluster: str = ""
    precision: str = ""
    update: str = ""

    def plan(self, point: JointPoint, program: Program) -> Plan:
        """Make a point's plan. program: the program, or one with fewer blocks. Raises PlanError."""
        base = self.estimator.reader.base(program, point.data, point.cut, point.replica)
        pipeline = self._pipeline(point) if point.is_staged else None
        mesh = {"pipeline": point.stages} if point.stages > 1 else {}
        return replace(
            base,
            planner="auto",
            mesh={**mesh, **base.mesh},
            recompute=point.recompute,
            recompute_in=self._recomputed(point, pipeline),
            batch_split=point.sub_batches,
            loss_chunks=point.loss_chunks,
            offload=point.offload,
            decompose=("*",) if point.decompose and point.chooses("decompose") else (),
            schedule="" if point.schedule == "in-order" else point.schedule,
            cluster=self.cluster if "list" in (point.schedule, point.pipeline) else "",
            zero=point.zero,
            alone_bytes=0 if point.buckets == BUCKETS[0] else point.buckets * 2**20,
            precision=self.precision,
            update=self.update,
            pipeline=pipeline,
        )

    def _recomputed(self, point: JointPoint, pipeline: Pipeline | None) -> tuple[str, ...]:
        """The first `recompute_layers` blocks of each stage; empty if these are all blocks."""
        if not point.recompute_layers:
            return ()
        blocks = [b.name for b in self.estimator.cost_of(point).blocks if b.is_repeated]
        stages = pipeline.stages if pipeline is not None and point.stages > 1 else (tuple(blocks),)
        known = set(blocks)
        each = ([name for name in names if name in known] for names in stages)
        chosen = tuple(name for names in each for name in names[: point.recompute_layers])
        return chosen if len(chosen) < len(blocks) else ()

    def _pipeline(self, point: JointPoint) -> Pipeline:
        if point.stages == 1:
            return Pipeline((("*",),), point.micro_batches)
        return Pipeline(self._stages(point), point.micro_batches, schedule=point.pipeline)

    def _stages(self, point: JointPoint) -> Stages:
        cost = self.estimator.cost_of(point)
        count = point.stages * point.stages_each
        partition = exact_cuts(_problem(point, cost, count))
        if partition is None:
            raise PlanError(
                f"{count} stages, but the program has {len(cost.blocks)} blocks; use fewer."
            )
        return tuple(
            tuple(name for block in cost.blocks[left:right] for name in block.plan_names)
            for left, right in pairwise(partition.cuts)
        )


def _problem(point: JointPoint, cost: PieceCost, count: int) -> Problem:
    share = recomputed_share(point, cost)
    times = point.sub_batches * np.array(cost.passes_s(point.recompute, share))[None]
    crossing = np.array([0.0, *(float(block.crossing_bytes) for block in cost.blocks)])
    # A small weight on the bytes that cross a cut: it decides between cuts of equal time.
    weight = 1e-3 * float(times.sum()) / max(1.0, float(crossing.max()) * len(cost.blocks))
    boundary = np.repeat(weight * crossing[None], count - 1, axis=0)
    return Problem(times, (0,) * count, boundary, float(point.micro_batches - 1))
