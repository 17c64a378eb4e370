"""Sharding of mixtures of experts by expert: each expert is on one device, undivided.

The experts of a layer are linear maps with their weights in one parameter, experts x inputs x
outputs: a batched product, or one product whose features are those of all experts. Either is
sharded over the experts as a linear map is over its features (`planners.structure.structure`), up
to where outputs are summed over the experts. Grouped products, of rows sorted by expert, need no
such sum: each device computes the rows of its experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Placement
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.program import Program
from shardweave.planners.structure.linear_maps import Cut, LinearMap, linear_maps
from shardweave.planners.structure.structure import parallel_pairs


@dataclass(frozen=True)
class ExpertCut:
    """Shardings of parameters over the expert axis.

    stacked: for each linear map whose output features belong to several experts, one expert after
    another, the number of experts.
    """

    parameters: dict[SSAValue, Cut] = field(default_factory=dict[SSAValue, Cut])
    stacked: dict[AtenOp, int] = field(default_factory=dict[AtenOp, int])
    notes: tuple[str, ...] = ()


def expert_cut(program: Program, mesh: Mesh, axis: str) -> ExpertCut:
    """Shard the experts' parameters over `axis`; the result has notes if nothing can be sharded."""
    if axis not in mesh.names or mesh.size(axis) == 1:
        return ExpertCut()
    size = mesh.size(axis)
    maps = dict(_expert_maps(program, axis, size))
    cuts = parallel_pairs(program, axis, size, among=maps) | dict(_grouped(program, axis, size))
    stacked = {
        m.op: _experts(m)
        for m in maps
        if m.parameter in cuts and m.rule.factors[m.produced].size > _experts(m)
    }
    return ExpertCut(cuts, stacked, () if cuts else (_why_idle(program, f"{axis}={size}"),))


def _grouped(program: Program, axis: str, size: int) -> Iterator[tuple[SSAValue, Cut]]:
    """Yield each parameter of grouped products, with its sharding into undivided experts."""
    for m in linear_maps(program):
        if spec_of(m.op).grouped and _experts(m) >= size:
            yield m.parameter, ((Placement(axis, size, -(-_experts(m) // size)),), (), ())


def _why_idle(program: Program, axis: str) -> str:
    counts = {_experts(m) for m in linear_maps(program) if _is_of_experts(m)}
    why = (
        f"{max(counts)} experts cannot be sharded over {axis}"
        if counts
        else "no product reads a parameter of experts x inputs x outputs (one that is looked up "
        "for each token, as by Hugging Face's batched_mm, is none)"
    )
    return f"axis '{axis.partition('=')[0]}' of the mesh is idle: {why}"


def _experts(linear: LinearMap) -> int:
    return shape_of(linear.parameter)[0]


def _is_of_experts(linear: LinearMap) -> bool:
    """True if a map is a matrix product with a parameter of three dims; a convolution is none."""
    return len(shape_of(linear.parameter)) == 3 and bool(spec_of(linear.op).notation)


def _expert_maps(program: Program, axis: str, size: int) -> Iterator[tuple[LinearMap, int]]:
    """Yield the linear maps of experts, each with the number of features on the first device. The
    `produced` factor of these maps is the experts' factor."""
    for m in linear_maps(program):
        if not _is_of_experts(m) or _experts(m) < size:
            continue
        first = -(-_experts(m) // size)
        factors = m.factors_in(((Placement(axis, size, first),), (), ()))
        if not factors:
            continue
        ((factor, placement),) = ((f, p) for f, dim in enumerate(factors) for p in dim)
        if any(factor in names for names in m.rule.results[0]):
            yield replace(m, produced=factor), placement.stride
