"""The joint space of `auto` as configurations: what `-O space=joint` tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program
from shardweave.planners.auto.constraints import Constraints
from shardweave.planners.auto.estimate import Estimator
from shardweave.planners.auto.plans import PlanMaker
from shardweave.planners.auto.point import JointPoint
from shardweave.planners.auto.reader import CostReader, Depths
from shardweave.planners.auto.space import JointSpace, joint_space
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.oppa.space import Configuration
from shardweave.planners.plan import Plan


@dataclass(eq=False)
class JointPlans:
    """The plan of each point of the joint space, by its configuration.

    All policies of recomputation and both kinds of schedules are in it but `list`, whose orders
    take long to find; micro-batches where they can run one by one.
    """

    planner: str
    program: Program
    cluster: Cluster
    mesh: Mesh | None
    _maker: PlanMaker = field(init=False)
    _points: dict[Configuration, JointPoint] = field(init=False)

    def __post_init__(self) -> None:
        reader = CostReader(Depths.of(self.program), self.cluster)
        space = joint_space(reader, self.mesh, Constraints(), has_list=False)
        self._maker = PlanMaker(Estimator(reader))
        self._points = {configuration_of(point): point for point in every_point(space)}

    def configurations(self) -> list[Configuration]:
        """All of them, always in the same order."""
        return list(self._points)

    def plan(self, one: Configuration) -> Plan:
        """Raises PlanError if the model cannot be cut into so many stages."""
        found = self._maker.plan(self._points[one], self.program)
        return replace(found, planner=self.planner)


def every_point(space: JointSpace) -> Iterator[JointPoint]:
    """Each point under each order, with each policy of recomputation."""
    found: dict[JointPoint, None] = {}
    for point in space.all_points():
        for variant in space.variants(point):
            found[variant] = None
            found |= dict.fromkeys(space.keeping_products(variant))
    yield from found


def configuration_of(point: JointPoint) -> Configuration:
    """A point as OPPA's formulas see it: of the buckets that which is in use."""
    bucket = point.buckets if point.joins_messages else 1
    return Configuration(
        data=point.data,
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
    )
