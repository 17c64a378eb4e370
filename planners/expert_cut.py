"""Where a plan cuts mixtures of experts: by the expert, each expert whole on some device.

The experts of a layer are linear maps with their weights in one parameter, experts x inputs x
outputs: a batched product, or one product whose features are those of all experts. Either is cut
along the experts as a linear map is along its features (`planners.structure`), to where outputs
are added up over the experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from xdsl.ir import SSAValue

from shardweave.ir.annotations import layer_of
from shardweave.ir.aten import AtenOp
from shardweave.ir.mesh import Mesh
from shardweave.ir.placement import Placement
from shardweave.ir.program import Program
from shardweave.ir.sharding.rules import rule_of
from shardweave.ir.types import shape_of
from shardweave.planners.linear_maps import Cut, LinearMap, linear_maps
from shardweave.planners.structure import parallel_pairs


@dataclass(frozen=True)
class ExpertCut:
    """How parameters are cut over the axis of experts.

    stacked: the linear maps whose features are those of so many experts, one after another.
    """

    parameters: dict[SSAValue, Cut] = field(default_factory=dict[SSAValue, Cut])
    stacked: dict[AtenOp, int] = field(default_factory=dict[AtenOp, int])
    notes: tuple[str, ...] = ()


def expert_cut(program: Program, mesh: Mesh, axis: str) -> ExpertCut:
    """The cut of each parameter of experts; nothing where the mesh has no such axis.

    A note says so where experts, or all that the axis is there for, stay whole.
    """
    if axis not in mesh.names or mesh.size(axis) == 1:
        return ExpertCut()
    size = mesh.size(axis)
    maps = dict(_expert_maps(program, axis, size))
    cuts = parallel_pairs(program, axis, size, among=maps)
    whole = [
        f"experts of '{layer_of(one.op)}' stay whole: {_experts(one)} of them cannot be cut over "
        f"{axis}={size}"
        for one in maps
        if one.parameter not in cuts
    ]
    if not cuts:
        why = (
            "no product reads a parameter of experts x inputs x outputs (one that is looked up for "
            "each token, as by Hugging Face's batched_mm, is none)"
        )
        whole += [f"axis '{axis}' of the mesh is idle: {why}"] if not maps else []
    stacked = {
        one.op: _experts(one)
        for one in maps
        if one.parameter in cuts and one.rule.factors[one.produced].size > _experts(one)
    }
    return ExpertCut(cuts, stacked, tuple(whole))


def _experts(one: LinearMap) -> int:
    return shape_of(one.parameter)[0]


def _expert_maps(program: Program, axis: str, size: int) -> Iterator[tuple[LinearMap, int]]:
    """The linear maps of experts, with the features of those experts that the first device has.

    Their `produced` factor is that of the experts.
    """
    for one in linear_maps(program):
        shape = shape_of(one.parameter)
        if len(shape) != 3 or shape[0] < size:
            continue
        first = -(-shape[0] // size)
        cut: Cut | None = ((Placement(axis, size, first),), (), ())
        for view in reversed(one.views):
            rule = rule_of(view)
            cut = cut and rule.carry(rule.operands[0], rule.results[0], cut)
        factors = cut and one.rule.factors_of(one.rule.operands[one.weight], cut)
        if not factors:
            continue
        ((factor, placement),) = ((f, p) for f, found in enumerate(factors) for p in found)
        if any(factor in names for names in one.rule.results[0]):
            yield replace(one, produced=factor), placement.stride
