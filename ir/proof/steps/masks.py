"""Masks that fill padding, and the start of the index range that such a mask compares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from xdsl.ir import Attribute

from shardweave.ir.dialects.annotations import arguments_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.literals import to_python
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.placement import is_contiguous
from shardweave.ir.proof.model.expressions import Expressions
from shardweave.ir.proof.relations.held import RING, Local, ProofAxes, RankNumber, Relation, Value
from shardweave.ir.proof.relations.padding import rank_position, with_fill


def masked(
    op: AtenOp, operands: Sequence[Value], table: Expressions, axes: ProofAxes
) -> Value | None:
    """Relate a `masked_fill` that fills exactly the padding of one dim; None for other fills."""
    part, mask = operands
    column = shape_of(op.operands[1])
    if not isinstance(part, Relation) or part.held.layout is not None or not column:
        return None
    held, dim = part.held, len(shape_of(op.operands[0])) - len(column)
    if isinstance(mask, Local) and mask.name == "aten.view":
        (mask,) = mask.operands
    if not isinstance(mask, Local) or mask.name != "aten.ge.Scalar" or dim < 0:
        return None
    if any(size != 1 for size in column[1:]) or held.local_shape is None:
        return None
    cut, size = held.sharding.dims[dim], held.shape[dim]
    if any(placement.axis.startswith(RING) for placement in cut):
        return None
    is_end = to_python(dict(mask.arguments)["other"]) == size
    is_whole = column[0] == held.local_shape[dim] and is_contiguous(cut, size)
    shard = rank_position([placement.axis for placement in cut], axes, dict(part.at))
    start = shard.times(cut[-1].stride if cut else 1)
    if not is_end or not is_whole or first_of_range(mask.operands[0], table) != start:
        return None
    return Relation(held.filled(with_fill(held.fill, float(op.value("value")), dim)), part.at)


def first_of_range(value: Value, table: Expressions) -> RankNumber | None:
    """First integer of an `arange` of step 1, plus added rank coordinates; None for others."""
    name, given = "", frozenset[tuple[str, Attribute]]()
    if isinstance(value, Local):
        name, given = value.name, value.arguments
    elif isinstance(value, Relation) and value.held.layout is None:
        maker = table.makers[value.held.number]
        if isinstance(maker, AtenOp) and value.held.sharding.is_replicated:
            name, given = maker.name, arguments_of(maker)
    arguments = {key: to_python(attribute) for key, attribute in given}
    if name == "aten.arange.start_step":
        start = cast("int", arguments.get("start", 0))
        is_plain = type(start) is int and arguments.get("step", 1) == 1
        return RankNumber((), start) if is_plain else None
    if isinstance(value, Local) and name == "aten.add.Tensor" and arguments.get("alpha", 1) == 1:
        base, number = value.operands
        first = first_of_range(base, table)
        return first.plus(number) if first and isinstance(number, RankNumber) else None
    return None
