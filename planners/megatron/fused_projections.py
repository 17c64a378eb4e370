"""Splitting of fused projections whose heads do not divide, so that each part can be sharded.

The outputs of queries, keys and values in one linear map are sharded in stripes if heads divide.
Else the plan computes each part by a linear map of its own, on a slice of the weight, and shards
these as other maps that do not divide. The weight is stored in plain shards and gathered for use.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.literals import to_attribute
from shardweave.ir.program.program import PARTS, Program
from shardweave.passes.prepare.projections import Place, fused_projections, projection_of
from shardweave.passes.prepare.split_projections import split_projections
from shardweave.planners.structure.linear_maps import Cut, back_through, linear_maps
from shardweave.planners.structure.structure import parallel_pairs, separable_maps


@dataclass(frozen=True)
class FusedCut:
    """Shardings of parameters after some fused projections are split.

    parameters: the shardings of all parameters of the program. weights: for each split weight, at
    the dim of its outputs, the sharding of each part. uneven: linear maps that stay replicated
    nevertheless, and why.
    """

    parameters: dict[SSAValue, Cut]
    weights: dict[Place, Cut]
    uneven: dict[AtenOp, str]


def fused_cut(program: Program, axis: str, size: int, whole: Collection[AtenOp]) -> FusedCut | None:
    """Shard parameters over an axis of `size` after splitting fused projections. Of the linear maps
    `whole`, otherwise replicated, it splits those whose parts can then be sharded; None if there
    are none."""
    weights: set[Place] = {
        projection.weight
        for op, count in fused_projections(program, whole).items()
        if (projection := projection_of(op, count)) is not None
    }
    indices = {value: index for index, value in enumerate(_values(program))}
    while weights:
        split = _split(program, weights)
        cuts = _cuts_of_parts(split, axis, size)
        kept: dict[Place, Cut] = {
            place: cut for place in weights if (cut := cuts.get(indices[place.value]))
        }
        if len(kept) == len(weights):
            uneven: dict[AtenOp, str] = {}
            pairs = parallel_pairs(split, axis, size, uneven)
            values = dict(zip(_values(split), _values(program), strict=True))
            return FusedCut({values[v]: cut for v, cut in pairs.items()}, kept, uneven)
        weights = set(kept)
    return None


def _cuts_of_parts(split: Program, axis: str, size: int) -> dict[int, Cut]:
    """Sharding of each split parameter's parts, by its index, if it is the same for all parts."""
    columns = separable_maps(split, axis, size)
    indices = {value: index for index, value in enumerate(_values(split))}
    cuts_of: dict[int, set[Cut | None]] = {}
    for m in linear_maps(split):
        if not m.views or m.views[-1].name != "aten.slice.Tensor":
            continue
        cut = columns.get(m.op)
        if cut is not None:
            factors = m.rule.factors_of(m.rule.results[0], cut)
            assert factors is not None, "the map's own cut"
            cut = m.rule.dims_of(m.rule.operands[m.weight], factors)
            cut = back_through(m.views[:-1], cut)
        cuts_of.setdefault(indices[m.parameter], set()).add(cut)
    alike = {index: next(iter(cuts)) for index, cuts in cuts_of.items() if len(cuts) == 1}
    return {index: cut for index, cut in alike.items() if cut is not None}


def _split(program: Program, weights: Collection[Place]) -> Program:
    indices = {value: index for index, value in enumerate(_values(program))}
    split = program.clone()
    parts = {indices[place.value]: to_attribute(place.count) for place in weights}
    split.set_argument_attributes(PARTS, parts)
    split_projections(split)
    return split


def _values(program: Program) -> list[SSAValue]:
    return [slot.value for slot in program.arguments]
