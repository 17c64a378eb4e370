"""What `compile` is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardweave.driver.models.models import Example
from shardweave.ir.capture.outputs import LossChoice
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.call import ClusterLike
from shardweave.planners.lowering.partition import Passes
from shardweave.planners.plan.plan import Plan
from shardweave.planners.planning import PlanLike


@dataclass(frozen=True)
class Request:
    """What to compile; the fields are as for `compile`."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    mesh: Mesh
    plan: PlanLike | None = None
    passes: Passes = ()
    train: bool | None = True
    sequence_parallel: bool = False
    zero: int = 0
    backend: str = "distributed"
    validate: bool = False
    prove: bool = False
    validate_limit: float | None = None
    twin: Callable[[], tuple[str, Example]] | None = None
    """Names and makes the model that passes are validated on where `model` is too large for it."""
    program: Program | None = None
    cuda_graph: bool = False
    loss: LossChoice = None
    only_loss: bool = False
    precision: str = ""
    seed: int | None = None
    cluster: ClusterLike | None = None
    """What the plan is made for; the mesh is then the planner's to choose if `is_mesh_open`."""
    is_mesh_open: bool = False

    def with_plan(self, plan: Plan) -> Request:
        """The same, on the mesh that a plan chose, if it was to choose one.

        Raises ValueError for a mesh of other than all devices: there is a process for each.
        """
        if not self.is_mesh_open:
            return self
        mesh = Mesh(**plan.mesh)
        if self.backend != "reference" and mesh.num_devices != self.mesh.num_devices:
            raise ValueError(
                f"the plan is for {mesh.num_devices} of the cluster's {self.mesh.num_devices} "
                "devices, each of which has a process; give the mesh that is wanted."
            )
        return replace(self, mesh=mesh, is_mesh_open=False)
