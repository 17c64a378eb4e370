"""Predictions of points by simulation, extrapolated for deep models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardweave.ir.program.blocks import blocks_of
from shardweave.ir.program.program import Program
from shardweave.planners.auto.plans import PlanMaker
from shardweave.planners.auto.reader import FEW, MORE, RECENT_FEW, Depths
from shardweave.planners.auto.space.point import JointPoint
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.lowering.lower import RECENT, Lowerings
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Predicted
from shardweave.planners.predict.pipeline.deep import (
    Deeper,
    deepened_stages,
    with_all_stages,
    with_few_blocks,
)
from shardweave.planners.predict.pipeline.runs import simulate_runs
from shardweave.planners.predict.pipeline.simulation import PipelineSimulation
from shardweave.planners.predict.predict import predict_plan, predicted_of


@dataclass(eq=False)
class Evaluator:
    """Simulates points, each once. problems: by point that cannot be simulated, the error."""

    maker: PlanMaker
    simulated: dict[JointPoint, Predicted] = field(default_factory=dict[JointPoint, Predicted])
    problems: dict[JointPoint, str] = field(default_factory=dict[JointPoint, str])
    _lowerings: dict[int, Lowerings] = field(default_factory=dict[int, Lowerings])

    @property
    def depths(self) -> Depths:
        return self.maker.estimator.reader.depths

    def predict(self, point: JointPoint) -> Predicted | None:
        """Simulate a point; None if it cannot be partitioned or scheduled (see `problems`)."""
        if point not in self.simulated and point not in self.problems:
            try:
                self.simulated[point] = self._simulated(point)
            except ValueError as error:
                self.problems[point] = str(error)
        return self.simulated.get(point)

    def predict_plans(self, plans: Sequence[Plan]) -> Predicted:
        """Predict another planner's plan, made for the whole program or for each of `Depths.priced`
        (where it must treat equal blocks alike). Raises ValueError if a plan does not fit."""
        if len(plans) > 1:
            return self._extrapolated(*plans)
        return predict_plan(self.lowerings(self.depths.program), plans[0], self._cluster)

    def lowerings(self, program: Program) -> Lowerings:
        """Return a program's cached lowerings; the cost reader's own lowerings for its program."""
        if program is self.depths.read:
            return self.maker.estimator.reader.lowerings
        if id(program) not in self._lowerings:
            most = RECENT if program is self.depths.program else RECENT_FEW
            self._lowerings[id(program)] = Lowerings(program, most=most)
        return self._lowerings[id(program)]

    @property
    def _cluster(self) -> Cluster:
        return self.maker.estimator.cluster

    def _simulated(self, point: JointPoint) -> Predicted:
        depths = self.depths
        plan = self.maker.plan(point, depths.read)
        if depths.more is None:
            return predict_plan(self.lowerings(depths.read), plan, self._cluster)
        if plan.recompute_in:
            return self._in_some_layers(point, len(plan.recompute_in))
        return self._extrapolated(plan, self.maker.plan(point, depths.more))

    def _in_some_layers(self, point: JointPoint, count: int) -> Predicted:
        """Predict a deep model's step that recomputes `count` blocks, by interpolating between none
        and all. Exact if every recomputed block adds the same."""
        whole = point.with_value(recompute_layers=0)
        keeping, again = self.predict(whole.with_value(recompute="none")), self.predict(whole)
        if keeping is None or again is None:
            raise ValueError(self.problems.get(whole, "the point cannot be without recomputation"))
        return extrapolated(keeping, again, count / len(self.depths.names) - 1)

    def _extrapolated(self, plan: Plan, more_plan: Plan) -> Predicted:
        """Predict a deep model's step from a plan for few of its blocks and a plan for more."""
        depths = self.depths
        assert depths.few is not None
        assert depths.more is not None
        lowerings = self.lowerings(depths.few)
        if plan.num_stages > 1:
            return predicted_of(self._deep_stages(plan, more_plan))
        few = predict_plan(lowerings, plan, self._cluster)
        more = predict_plan(self.lowerings(depths.more), more_plan, self._cluster)
        return extrapolated(few, more, (len(depths.names) - MORE) / (MORE - FEW))

    def _deep_stages(self, plan: Plan, more_plan: Plan) -> PipelineSimulation:
        """Simulate a deep model's stages, from programs with one and two blocks in a stage."""
        depths = self.depths
        staged: list[Program] = []
        sizes: list[list[int]] = []
        for program, p in zip(depths.priced, (plan, more_plan), strict=True):
            small, counts = with_few_blocks(p, depths.names, blocks_of(program).names)
            staged.append(with_all_stages(self.lowerings(program).local(small), plan))
            sizes.append(counts)
        deeper = Deeper(staged[1], deepened_stages(plan, depths.names, sizes[0], sizes[1]))
        return simulate_runs(
            staged[0],
            self._cluster,
            plan.pipeline,
            precision=plan.precision,
            deeper=deeper,
            update=plan.update,
        )


def extrapolated(few: Predicted, more: Predicted, times: float) -> Predicted:
    """Extrapolate a step linearly: `more` plus `times` the difference between `more` and `few`.

    Exact if every further block adds the same. Exposed communication never falls below `more`'s:
    more blocks may hide it better (for example a few large buckets), so that a line would soon be
    negative.
    """

    def beyond(less: float, greater: float) -> float:
        return greater + times * (greater - less)

    def each(less: Mapping[str, float], greater: Mapping[str, float]) -> dict[str, float]:
        names = dict.fromkeys((*greater, *less))
        return {n: max(0.0, beyond(less.get(n, 0.0), greater.get(n, 0.0))) for n in names}

    line_s = beyond(few.exposed_s, more.exposed_s)
    exposed_s = max(line_s, more.exposed_s) if times > 0 else line_s
    return replace(
        more,
        time_s=beyond(few.time_s, more.time_s) + exposed_s - line_s,
        compute_s=beyond(few.compute_s, more.compute_s),
        update_s=beyond(few.update_s, more.update_s),
        exposed_s=exposed_s,
        communication_s=each(few.communication_s, more.communication_s),
        memory_bytes=each(few.memory_bytes, more.memory_bytes),
    )
