"""The space of plans without stages, ZeRO or micro-batches, which the baselines search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import ClassVar

from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.degrees import asked_degrees, divisors
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import PAPERS_RECOMPUTE
from shardweave.planners.trials.space import Configuration

AXES = ("data", "tensor")
SUB_BATCH_SCHEDULES = ("none", "sub-batch", "cross-pass")
MAX_SUB_BATCHES = 4


@dataclass(eq=False)
class PlainPlans:
    """The plan of a configuration: Megatron's shardings, and what the configuration adds."""

    planner: str
    program: Program
    cluster: Cluster
    mesh: Mesh | None
    space: ClassVar[str] = "plain"
    _bases: dict[tuple[int, int, bool], Plan] = field(
        default_factory=dict[tuple[int, int, bool], Plan]
    )

    def configurations(self) -> list[Configuration]:
        """All of them, always in the same order, of which every axis cuts something."""
        mesh = self.mesh
        sizes = asked_degrees(mesh, AXES, self.planner)
        asked = sizes.get("data", 1), sizes.get("tensor", 1)
        devices = self.cluster.num_devices if mesh is None else mesh.num_devices
        return [
            configuration
            for configuration in _space(self.program, devices)
            if (mesh is None or asked == (configuration.data, configuration.tensor))
            and self._is_useful(configuration)
        ]

    def plan(self, configuration: Configuration) -> Plan:
        return replace(
            self._base(configuration.data, configuration.tensor, configuration.sequence_parallel),
            recompute=configuration.recompute,
            batch_split=configuration.micro_batches,
            schedule="" if configuration.schedule == "none" else configuration.schedule,
        )

    def _base(self, data: int, tensor: int, sequence_parallel: bool) -> Plan:
        key = (data, tensor, sequence_parallel)
        if key not in self._bases:
            mesh = Mesh(data=data, tensor=tensor)
            plan = plan_megatron(self.program, mesh, sequence_parallel=sequence_parallel)
            self._bases[key] = replace(plan, planner=self.planner)
        return self._bases[key]

    def _is_useful(self, configuration: Configuration) -> bool:
        base = self._base(configuration.data, configuration.tensor, configuration.sequence_parallel)
        is_cut = (configuration.data == 1 or base.inputs) and (
            configuration.tensor == 1 or base.parameters
        )
        return bool(is_cut and (not configuration.sequence_parallel or base.activations))


def _space(program: Program, devices: int) -> Iterator[Configuration]:
    """What backends run on so many devices.

    The data degree divides the batch, and sub-batches a replica's share of it. Without two
    sub-batches there is nothing to alternate between, and without a tensor axis no sequence to cut.
    """
    inputs = [shape_of(slot.value) for slot in program.arguments if slot.kind == "input"]
    batch = max((shape[0] for shape in inputs if shape), default=1)
    for tensor in divisors(devices & -devices):
        data = devices // tensor
        if batch % data:
            continue
        counts = [n for n in divisors(batch // data) if n <= MAX_SUB_BATCHES]
        sequences = (False, True) if tensor > 1 else (False,)
        for count, recompute, sequence in product(counts, PAPERS_RECOMPUTE, sequences):
            for schedule in SUB_BATCH_SCHEDULES if count > 1 else ("none",):
                yield Configuration(
                    data=data,
                    tensor=tensor,
                    micro_batches=count,
                    recompute=recompute,
                    schedule=schedule,
                    sequence_parallel=sequence,
                )
