"""The search space of `auto`, as configurations that `oppa` searches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.auto.estimate import Estimator
from shardweave.planners.auto.plans import PlanMaker
from shardweave.planners.auto.reader import CostReader, Depths
from shardweave.planners.auto.space.constraints import Constraints
from shardweave.planners.auto.space.point import JointPoint
from shardweave.planners.auto.space.space import JointSpace, joint_space
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.plan.plan import Plan
from shardweave.planners.trials.space import Configuration


@dataclass(eq=False)
class JointPlans:
    """The plan of each point of `auto`'s joint space, by its configuration.

    The space has all policies of recomputation, and all schedules except `list`, whose orders take
    long to find; micro-batches if they can run one by one; policy `layer` in all blocks of a stage,
    or in quarters of them.
    """

    planner: str
    program: Program
    cluster: Cluster
    mesh: Mesh | None
    space: ClassVar[str] = "joint"
    _maker: PlanMaker = field(init=False)
    _points: dict[Configuration, JointPoint] = field(init=False)

    def __post_init__(self) -> None:
        reader = CostReader(Depths.of(self.program), self.cluster)
        space = joint_space(reader, self.mesh, Constraints(), has_list=False)
        self._maker = PlanMaker(Estimator(reader))
        points = every_point(space)
        self._points = {configuration_of(point, space.layers): point for point in points}

    def configurations(self) -> list[Configuration]:
        """Return all configurations, always in the same order."""
        return list(self._points)

    def plan(self, configuration: Configuration) -> Plan:
        """Make a configuration's plan. PlanError if the model has too few blocks for its stages."""
        plan = self._maker.plan(self._points[configuration], self.program)
        return replace(plan, planner=self.planner)


def every_point(space: JointSpace) -> Iterator[JointPoint]:
    """Yield each point with each order and each policy of recomputation; policy `layer` also for
    some blocks of each stage only."""
    points: dict[JointPoint, None] = {}
    for point in space.all_points():
        for variant in space.variants(point):
            points[variant] = None
            points |= dict.fromkeys(space.keeping_products(variant))
            points |= dict.fromkeys(_in_some_layers(space, variant))
    yield from points


def _in_some_layers(space: JointSpace, point: JointPoint) -> list[JointPoint]:
    """Variants of a point that recomputes all blocks: a quarter, half and three quarters of each
    stage's blocks, where these are distinct whole numbers."""
    if point.recompute != "layer" or point.recompute_layers:
        return []
    fewer = {p.recompute_layers: p for p in space.fewer_layers(point)}
    count = -(-space.layers // (point.stages * point.stages_each))
    asked = dict.fromkeys(count * quarters // 4 for quarters in (1, 2, 3))
    return [fewer[number] for number in asked if number in fewer]


def configuration_of(point: JointPoint, layers: int) -> Configuration:
    """Convert a point to a `Configuration`. layers: number of equal blocks of the model."""
    recomputed = point.recompute_layers * point.stages * point.stages_each
    bucket = point.buckets if point.joins_messages else 1
    return Configuration(
        data=point.replicas,
        replica=point.replica,
        tensor=point.tensor,
        pipeline=point.stages,
        zero=point.zero,
        data_bucket_mib=1 if point.zero else bucket,
        zero_bucket_mib=bucket if point.zero else 1,
        micro_batches=point.micro_batches,
        chunks=point.stages_each,
        recompute=point.recompute,
        schedule=point.schedule,
        sequence_parallel=point.sequence_parallel,
        context=point.context,
        sub_batches=point.sub_batches,
        order=point.pipeline,
        recomputed_share=recomputed / layers if recomputed else 1.0,
    )
