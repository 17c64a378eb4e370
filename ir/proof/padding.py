"""Padding: what stands behind the end of dims that are cut unevenly, and what may be known of it.

An op that keeps a dim works on each index alone, so that padding stays there. One that reduces
over it gives the model's result only if all padding that it reads is what the reduction leaves as
it is: 0 for a sum, the lowest number for a maximum. That is known of arguments, of what masks have
filled, and of ops that make zeros of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import cast

import torch
from xdsl.ir import Attribute

from shardweave.ir.annotations import arguments_of
from shardweave.ir.aten import AtenOp
from shardweave.ir.facts import facts_of
from shardweave.ir.literals import to_python
from shardweave.ir.placement import DimSharding, is_contiguous, is_even
from shardweave.ir.proof.cuts import Cuts, Refusal
from shardweave.ir.proof.expressions import Expressions
from shardweave.ir.proof.held import Fill, Held, Local, RankNumber, Relation, Value
from shardweave.ir.sharding.padding import INDEXED, MOVES, PRODUCTS, SUMS, ZERO_AT_ZERO
from shardweave.ir.sharding.rules import Rule
from shardweave.ir.types import dtype_of_value, shape_of

FILL = "aten.masked_fill.Scalar"

_ZERO_OF_ZEROS = frozenset(f"aten.{name}" for name in (*MOVES, *ZERO_AT_ZERO, *SUMS))
_PRODUCTS = frozenset(f"aten.{name}" for name in PRODUCTS)
_INDEXED = frozenset(f"aten.{name}" for name in INDEXED)


@lru_cache(maxsize=65536)
def uneven_factors(rule: Rule, cuts: Cuts) -> frozenset[int]:
    """The factors of a rule that are cut unevenly."""
    pairs = enumerate(zip(rule.factors, cuts, strict=True))
    return frozenset(index for index, (factor, cut) in pairs if not is_even(cut, factor.size))


def problem_of_padding(
    op: AtenOp, rule: Rule, cuts: Cuts, parts: Sequence[Relation]
) -> Refusal | None:
    """Why padding of an op's operands would show in its results; None if it does not."""
    uneven = uneven_factors(rule, cuts)
    if not uneven:
        return None
    for index, part in enumerate(parts):
        fill = part.held.fill
        for dim, wanted in _needed(op, rule, uneven, index):
            if fill is None or fill.value != wanted or dim not in fill.dims:
                return Refusal(f"has padding in dim {dim} that is not known to be {wanted}", index)
    return None


def _needed(
    op: AtenOp, rule: Rule, uneven: frozenset[int], index: int
) -> Iterator[tuple[int, float]]:
    """The dims of an operand whose padding matters, and what it has to be."""
    dtype = dtype_of_value(op.operands[index])
    is_index = op.name in _INDEXED and index > 0 and not dtype.is_floating_point
    for dim, names in enumerate(rule.operands[index]):
        for factor in uneven.intersection(names):
            is_lost = any(all(factor not in own for own in dims) for dims in rule.results)
            if is_index:
                yield dim, 0
            elif is_lost and not (facts_of(op).is_lookup and index == 0):
                yield dim, 0 if rule.factors[factor].reduction == "sum" else _lowest(dtype)


def _lowest(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return float("-inf")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def zeros_after(op: AtenOp, rule: Rule, cuts: Cuts, parts: Sequence[Relation]) -> list[Fill]:
    """Of each result of an op, the dims whose padding is 0."""
    uneven = uneven_factors(rule, cuts)
    zero = {factor for factor in uneven if _is_zero(op, rule, factor, parts, len(uneven))}
    return [
        Fill(0, frozenset(dim for dim, names in enumerate(dims) if zero.intersection(names)))
        for dims in rule.results
    ]


def _is_zero(
    op: AtenOp, rule: Rule, factor: int, parts: Sequence[Relation], num_uneven: int
) -> bool:
    """Whether an op gives 0 wherever an index is behind the end of a factor."""
    if op.name == "aten.full":
        return op.value("fill_value") == 0
    known = {
        index: all(
            part.held.fill is not None and part.held.fill.value == 0 and dim in part.held.fill.dims
            for dim, names in enumerate(dims)
            if factor in names
        )
        for index, (dims, part) in enumerate(zip(rule.operands, parts, strict=True))
        if any(factor in names for names in dims)
    }
    if op.name == "aten.where.self":
        return known.get(1, False) and known.get(2, False)
    if op.name == FILL:
        return op.value("value") == 0 and known.get(0, False)
    if op.name == "aten.div.Tensor":
        # Behind the end of another dim the divisor may be 0.
        return num_uneven == 1 and known == {0: True}
    if op.name in _PRODUCTS:
        return num_uneven == 1 and bool(known) and all(known.values())
    return op.name in _ZERO_OF_ZEROS and len(known) == len(parts) and all(known.values())


# Ops that pad, mask and cut off


def _with(old: Fill | None, value: float, dim: int) -> Fill:
    """What is known when a dim's padding has been filled."""
    dims = old.dims if old is not None and old.value == value else frozenset[int]()
    return Fill(value, dims | {dim})


def padded(held: Held, pad: Sequence[int], value: float | None) -> Held | None:
    """With more behind the end of one local dim, which no axis cuts."""
    layout = held.digits
    *others, before, more = pad
    at = len(layout or ()) - len(pad) // 2
    if layout is None or any(others) or before or more <= 0 or not 0 <= at < len(layout):
        return None
    if len(layout[at]) != 1:
        return None
    ((dim, stride, size),) = layout[at]
    if stride != 1 or size != held.shape[dim] or held.sharding.dims[dim]:
        return None
    longer = ((dim, 1, size + more),)
    made = held.laid_out((*layout[:at], longer, *layout[at + 1 :]))
    return made and made.filled(_with(held.fill, float(value or 0), dim))


def without_padding(held: Held, at: int, size: int) -> Held | None:
    """The first part of a local dim; None unless only padding is cut off."""
    layout = held.digits
    if layout is None or not layout[at]:
        return None
    (dim, stride, count), *rest = layout[at]
    inner = math.prod(own for _, _, own in rest)
    if stride * count <= held.shape[dim] or size % inner:
        return None
    shorter = ((dim, stride, size // inner), *rest)
    made = held.laid_out((*layout[:at], shorter, *layout[at + 1 :]))
    return made if made is not None and made.layout is None else None


def masked(op: AtenOp, operands: Sequence[Value], table: Expressions) -> Value | None:
    """A value whose padding in one dim has been filled: all that is behind the dim's end."""
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
    is_end = to_python(dict(mask.arguments)["other"]) == size
    is_whole = column[0] == held.local_shape[dim] and is_contiguous(cut, size)
    if not is_end or not is_whole or first_of_range(mask.operands[0], table) != _offset(cut, part):
        return None
    return Relation(held.filled(_with(held.fill, float(op.value("value")), dim)), part.at)


def _offset(cut: DimSharding, part: Relation) -> RankNumber:
    """The index of the first element of a rank's part of a dim."""
    found, at = RankNumber(()), dict(part.at)
    for placement in cut:
        if placement.axis in at:
            (coordinate,) = at[placement.axis]
            own = RankNumber((), coordinate * placement.stride)
        else:
            own = RankNumber(((placement.axis, placement.stride),))
        found = found.plus(own)
    return found


def first_of_range(value: Value, table: Expressions) -> RankNumber | None:
    """Where a range of whole numbers begins, step 1."""
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
