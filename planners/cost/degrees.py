"""Degrees of parallelism: the divisors of a number, and those that a user's mesh asks for."""

from __future__ import annotations

from collections.abc import Sequence

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.suggest import did_you_mean
from shardweave.planners.plan.plan_parts import PlanError


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def asked_degrees(mesh: Mesh | None, axes: Sequence[str], planner: str) -> dict[str, int]:
    """Axis sizes of `mesh` by name; {} for None. Raises PlanError for an axis not in `axes`."""
    sizes = {} if mesh is None else {axis.name: axis.size for axis in mesh.device_axes}
    unknown = [name for name, size in sizes.items() if name not in axes and size > 1]
    if unknown:
        raise PlanError(
            f"the mesh has an axis '{unknown[0]}', but planner '{planner}' plans the axes "
            f"{', '.join(axes)} only; {did_you_mean(unknown[0], axes)}rename the axis, or give "
            "no mesh."
        )
    return sizes
