"""Plans of other planners, which the search prices like its own points."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.amp.planner import plan_amp
from shardweave.planners.auto.evaluate import Evaluator
from shardweave.planners.auto.reader import Depths
from shardweave.planners.axonn.planner import best_grid, plan_axonn
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.workload import workload_of
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.oases.planner import plan_oases
from shardweave.planners.plan.plan import Plan

AMP = "amp"
"""The planner whose stages may differ in devices and in shares of the batch; its plan is always
simulated with all blocks."""

MOST_OASES = 2
"""Most meshes that Oases plans for: those of the fastest points with a tensor axis."""

Make = Callable[[Program], Plan]
"""Function that plans the program, or a version of it with fewer blocks, in the same way."""


def proposals(
    evaluator: Evaluator, cluster: Cluster, mesh: Mesh | None, precision: str, meshes: list[Mesh]
) -> Iterator[tuple[str, Make]]:
    """Yield planners as (name, function that plans). meshes: meshes with a tensor axis, for Oases.

    For a deep model, AMP is asked only if devices differ, and Megatron only if the devices do not
    divide the batch, because the space otherwise holds their plans; Oases is not asked, because
    its degrees, which differ by block, do not extrapolate from a few blocks.
    """
    if mesh is None or set(mesh.names) <= {"x", "y", "z", "data"}:
        yield "axonn", _axonn(evaluator.depths, cluster, mesh, precision)
    is_deep = evaluator.depths.is_deep
    if not is_deep or len({node.device for node in cluster.nodes}) > 1:
        if mesh is None or set(mesh.names) <= {"pipeline", "data", "tensor"}:
            yield AMP, _amp(evaluator, cluster, mesh, precision)
    batch = evaluator.maker.estimator.reader.batch
    if not is_deep or batch % cluster.num_devices:
        yield (
            "megatron",
            lambda program: replace(
                plan_megatron(program, mesh, cluster=cluster), precision=precision
            ),
        )
    if is_deep:
        return
    for tensor_mesh in meshes[:MOST_OASES]:
        yield (
            f"oases on {tensor_mesh}",
            lambda program, on=tensor_mesh: plan_oases(
                program, on, cluster=cluster, precision=precision
            ),
        )


def _amp(evaluator: Evaluator, cluster: Cluster, mesh: Mesh | None, precision: str) -> Make:
    return lambda program: plan_amp(
        evaluator.lowerings(program), mesh, cluster=cluster, precision=precision
    )


def _axonn(depths: Depths, cluster: Cluster, mesh: Mesh | None, precision: str) -> Make:
    """Return a function that plans any depth by AxoNN, on a grid chosen for the whole model."""

    @cache
    def grid() -> Mesh:
        work = depths.deepened(workload_of(depths.read, cluster, Mesh()))
        return best_grid(depths.read, cluster, work, precision, depths.copies)

    return lambda program: plan_axonn(program, mesh or grid(), cluster=cluster, precision=precision)
