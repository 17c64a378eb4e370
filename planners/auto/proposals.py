"""Plans of other planners, which the search prices as it does its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from shardweave.ir.mesh import Mesh
from shardweave.planners.amp import plan_amp
from shardweave.planners.auto.evaluate import Evaluator
from shardweave.planners.axonn import plan_axonn
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.megatron import plan_megatron
from shardweave.planners.oases import plan_oases
from shardweave.planners.plan import Plan

MOST_OASES = 2
"""How many meshes Oases plans for: those of the fastest points with a tensor axis."""


def proposals(
    evaluator: Evaluator, cluster: Cluster, mesh: Mesh | None, precision: str, meshes: list[Mesh]
) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Planners by name, each as a function that plans. meshes: with a tensor axis, for Oases.

    Of a deep model AxoNN's alone: Megatron's rule and AMP's cuts are in the space, and the degrees
    of Oases' blocks, which may differ, do not follow from a few.
    """
    program = evaluator.depths.program
    if mesh is None or set(mesh.names) <= {"x", "y", "z", "data"}:
        yield "axonn", lambda: plan_axonn(program, mesh, cluster=cluster, precision=precision)
    if evaluator.depths.is_deep:
        return
    yield (
        "megatron",
        lambda: replace(plan_megatron(program, mesh, cluster=cluster), precision=precision),
    )
    if mesh is None or set(mesh.names) <= {"pipeline", "data", "tensor"}:
        lowerings = evaluator.lowerings(program)
        yield (
            "amp",
            lambda: plan_amp(lowerings, mesh, cluster=cluster, precision=precision, simulate=1),
        )
    for one in meshes[:MOST_OASES]:
        yield (
            f"oases on {one}",
            lambda one=one: plan_oases(program, one, cluster=cluster, precision=precision),
        )
