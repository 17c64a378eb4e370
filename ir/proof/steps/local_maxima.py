"""Recognize a sum of exponentials that was computed from a shard's own maximum and rescaled.

Let m be the maximum of a rank's x along some dims, and M that of all ranks'. On each rank

    sum exp(x - m) * exp(m - M)  =  sum exp(x - M)

since exp(m - M) is the same for all terms of a sum. This also holds for infinite values: if m is
-inf, so is all of this x; the sum, NaN then, is replaced by 1, so that both sides are 0, or NaN if
M is -inf too. If m is inf or NaN, so is M, and both sides are NaN; if only M is, both sides are 0
or both NaN. The sharding of x does not matter: after the match, the walk relates the sum as if the
rank computed exp(x - M), by the rules of its ops.

All three uses of m must read one value, the maximum of this x. The relation of a partial maximum
tells this, by the id of its split (`Held.terms`): values sharded in another way have other maxima.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.ir import Block, Operation, SSAValue

from shardweave.ir.dialects.annotations import annotate, set_sharding_attrs, sharding_attrs_of
from shardweave.ir.dialects.aten import AtenOp, create
from shardweave.ir.dialects.literals import Literal, to_attribute, to_python
from shardweave.ir.dialects.types import dtype_of_value, shape_of, tensor_type
from shardweave.ir.proof.relations.held import Local, Relation, Shape, Value

SCALED = "aten.mul.Tensor"
"""The op that scales a sum by its distance to the maximum of all ranks."""


@dataclass(frozen=True)
class SumInOne:
    """Ops, outside any program, that compute sum exp(x - M) and the maximum of x. read: relations
    of their inputs. own: the relation that the maximum must have."""

    read: dict[SSAValue, Value]
    ops: tuple[Operation, ...]
    own: Relation

    @property
    def results(self) -> tuple[SSAValue, SSAValue]:
        return self.ops[0].results[0], self.ops[-1].results[0]


def sum_in_one(op: AtenOp, operands: Sequence[Value]) -> SumInOne | None:
    """Return a SumInOne for an op that rescales a sum of exponentials; None for other ops."""
    if op.name != SCALED or not all(isinstance(value, Local) for value in operands):
        return None
    part, scale = [value for value in operands if isinstance(value, Local)]
    shared = part.leaves & scale.leaves
    if not len(part.leaves) == len(scale.leaves) == len(shared) + 1 == 2:
        return None
    (own,), (x,), (highest,) = shared, part.leaves - shared, scale.leaves - shared
    total = part.operands[0]
    shape = x.held.local_shape
    if not isinstance(total, Local) or shape is None or highest.held.number != own.held.number:
        return None
    along = {name: to_python(attribute) for name, attribute in total.arguments}
    if not _is_broadcast_back(along):
        return None
    if tuple(operands) != _in_two(x, own, highest, (shape, shape_of(op.results[0])), along):
        return None
    return _in_one(op, x, own, highest, shape, along)


def _is_broadcast_back(along: dict[str, Literal]) -> bool:
    """True if the result of a reduction broadcasts against its operand along the reduced dims."""
    dims = along.get("dim")
    is_first = isinstance(dims, list) and dims == list(range(len(dims)))
    return along.keys() <= {"dim", "keepdim"} and (along.get("keepdim") is True or is_first)


def _in_two(
    x: Relation,
    own: Relation,
    highest: Relation,
    shapes: tuple[Shape, Shape],
    along: dict[str, Literal],
) -> tuple[Local, Local]:
    """Build the two operands that `sum_in_one` recognizes. shapes: of x and of its maximum."""
    wide, row = [((shape, "float"),) for shape in shapes]
    mask = _local("aten.eq.Scalar", (own,), ((shapes[1], "torch.bool"),), other=-math.inf)
    power = _local("aten.exp", (_local("aten.sub.Tensor", (x, own), wide),), wide)
    total = _local("aten.sum.dim_IntList", (power,), row, **along)
    away = _local("aten.sub.Tensor", (own, highest), row)
    filled = _local("aten.masked_fill.Scalar", (total, mask), row, value=1.0)
    return filled, _local("aten.exp", (away,), row)


def _local(
    name: str, operands: tuple[Value, ...], types: tuple[tuple[Shape, str], ...], **values: Literal
) -> Local:
    arguments = frozenset((key, to_attribute(value)) for key, value in values.items())
    return Local(name, arguments, operands, types)


def _in_one(
    op: AtenOp,
    x: Relation,
    own: Relation,
    highest: Relation,
    shape: Shape,
    along: dict[str, Literal],
) -> SumInOne:
    dtype = dtype_of_value(op.results[0])
    wide, row = tensor_type(shape, dtype), op.results[0].type
    block = Block(arg_types=[wide, row])
    first, second = block.args
    peak = create("aten.amax", [first], [row], along)
    away = create("aten.sub.Tensor", [first, second], [wide])
    power = create("aten.exp", [away.results[0]], [wide])
    total = create("aten.sum.dim_IntList", [power.results[0]], [row], along)
    for step in (peak, away, power, total):
        annotate(step, op)
    set_sharding_attrs(total, sharding_attrs_of(op))
    return SumInOne({first: x, second: highest}, (peak, away, power, total), own)
