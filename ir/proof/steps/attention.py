"""Relate attention over a block of keys to attention over all keys.

Its output and log-sum-exp are terms of a reduction, `lse`: merging two disjoint blocks of keys
gives the result for both, and merging all blocks the model's result. In the backward pass, a block
gives its slice of the gradients of keys and values, and a term of the gradient of queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.placement import Placement, Reduction, Sharding
from shardweave.ir.ops.registry import first_of_attention, global_name
from shardweave.ir.proof.model.expressions import Expressions
from shardweave.ir.proof.model.local_forms import FormsOf, OpForm
from shardweave.ir.proof.relations.held import (
    SUB_BATCH,
    Coordinates,
    RankNumber,
    Relation,
    Value,
    stands_for,
)
from shardweave.ir.proof.steps.masks import first_of_range
from shardweave.ir.sharding.rules.attention import POSITIONS


@dataclass(frozen=True)
class KeyCut:
    """An attention on one of several blocks of keys. parts: its operands as if it had all keys."""

    form: OpForm
    parts: tuple[Relation, ...]
    placement: Placement
    coordinate: int


def on_part_of_keys(
    op: AtenOp, operands: Sequence[Value], forms: FormsOf, table: Expressions
) -> Iterator[KeyCut]:
    """Yield each attention of the global program whose part on one block of keys `op` may be."""
    first = first_of_attention(op)
    has_mask = isinstance(op.tensor("attn_mask"), SSAValue)
    count = (6 if first else 3) + has_mask
    parts = [part for part in operands[:count] if isinstance(part, Relation)]
    if len(parts) < count or any(part.held.layout is not None for part in parts):
        return
    cuts = parts[first + 1].held.sharding.dims[POSITIONS]
    if len(cuts) != 1 or not cuts[0].axis.startswith(SUB_BATCH):
        return
    (cut,) = cuts
    size = parts[first + 1].held.shape[POSITIONS]
    coordinates = dict(parts[first + 1].at)[cut.axis]
    if len(coordinates) != 1 or cut.stride * cut.size != size:
        return
    (coordinate,) = coordinates
    dims = dict.fromkeys((first + 1, first + 2), POSITIONS)
    if has_mask and parts[-1].held.shape[-1] > 1:
        dims[count - 1] = len(parts[-1].held.shape) - 1
    whole = [
        _of_all(part, dims[index], cut, coordinate) if index in dims else part
        for index, part in enumerate(parts)
    ]
    related = tuple([part for part in whole if part is not None])
    if len(related) < count or any(cut.axis in part.held.sharding.axes for part in related):
        return
    numbers = tuple([part.held.number for part in related])
    for form in forms(global_name(op), numbers):
        places = operands[count:]
        if form.op.value("scale") == op.value("scale") and _are_positions(
            form.op, places, related[first], coordinate * cut.stride, table
        ):
            yield KeyCut(form, related, cut, coordinate)


def _of_all(part: Relation, dim: int, cut: Placement, coordinate: int) -> Relation | None:
    """Undo the split of `dim` into blocks of keys; None if the value is of another block."""
    sharding, at = part.held.sharding, dict(part.at).get(cut.axis)
    is_own = cut in sharding.dims[dim]
    if not stands_for(sharding.dims[dim], (cut,)) or (is_own and at != frozenset({coordinate})):
        return None
    held = replace(part.held, sharding=sharding.with_dim(dim, ()))
    return Relation(held, tuple([item for item in part.at if item[0] != cut.axis]))


def _are_positions(
    form: AtenOp, places: Sequence[Value], query: Relation, start: int, table: Expressions
) -> bool:
    """True if query positions start at 0 and key positions at `start` (none if not causal)."""
    if not form.value("is_causal"):
        return not places
    rows, columns = places
    if not isinstance(rows, Relation) or rows.held.layout is not None:
        return False
    whole = Relation(replace(rows.held, sharding=Sharding.replicated(1)))
    is_from_0 = first_of_range(whole, table) == RankNumber(())
    dims, times = query.held.sharding.dims, {axis for axis, _ in rows.at}
    return (
        is_from_0
        and rows.held.shape == query.held.shape[POSITIONS : POSITIONS + 1]
        and rows.held.sharding.dims == dims[POSITIONS : POSITIONS + 1]
        and rows.at == tuple([item for item in query.at if item[0] in times])
        and first_of_range(columns, table) == RankNumber((), start)
    )


def of_part(
    cut: KeyCut, wholes: Sequence[Value], op: AtenOp, terms: int
) -> tuple[Value, ...] | None:
    """Relate the results of an attention on one block of keys. wholes: the relations with all keys.
    terms: id of the split into terms, one for each block (`Held.terms`)."""
    related = [whole for whole in wholes if isinstance(whole, Relation)]
    if first_of_attention(op):
        if related[0].held.sharding.unreduced:
            return None
        query, *keys = related
        return (_term(cut, query, "sum", terms), *(_block(cut, whole) for whole in keys))
    shapes = [part.held.local_shape for part in related]
    if shapes != [shape_of(result) for result in op.results]:
        return None
    return tuple([_term(cut, whole, "lse", terms) for whole in related])


def _term(cut: KeyCut, whole: Relation, reduction: Reduction, terms: int) -> Relation:
    """Relate one block's term of a value that is reduced over all blocks of keys."""
    sharding = replace(whole.held.sharding, unreduced=(cut.placement.axis,), reduction=reduction)
    return Relation(replace(whole.held, sharding=sharding, terms=terms), _at(cut, whole))


def _block(cut: KeyCut, whole: Relation) -> Relation:
    """Relate one block's slice of the gradient of keys or values."""
    sharding = whole.held.sharding.with_dim(POSITIONS, (cut.placement,))
    return Relation(replace(whole.held, sharding=sharding), _at(cut, whole))


def _at(cut: KeyCut, whole: Relation) -> Coordinates:
    return tuple(sorted((*whole.at, (cut.placement.axis, frozenset({cut.coordinate})))))
