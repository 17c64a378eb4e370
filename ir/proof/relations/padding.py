"""Padding: elements past the end of unevenly sharded dims, and their values as far as known.

An op that keeps a dim works on each index alone, so that padding stays there. One that reduces
over it gives the model's result only if all padding that it reads is what the reduction leaves as
it is: 0 for a sum, the lowest number for a maximum. That is known of arguments, of what masks have
filled, and of ops that make zeros of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.mesh.placement import is_even
from shardweave.ir.ops.registry import gives_zero, spec_of
from shardweave.ir.proof.relations.held import (
    Cuts,
    Fill,
    Held,
    ProofAxes,
    RankNumber,
    Refusal,
    Relation,
    Value,
)
from shardweave.ir.sharding.rules import Rule


def rank_position(
    names: Sequence[str], axes: ProofAxes, at: dict[str, frozenset[int]]
) -> RankNumber:
    """A rank's position on axes, the first slowest; those of sub-batches have a coordinate."""
    position, weight = RankNumber(()), 1
    for name in reversed(names):
        if name in at:
            (coordinate,) = at[name]
            position = position.plus(RankNumber((), coordinate * weight))
        elif axes.size(name) > 1:
            position = position.plus(RankNumber(((name, weight),)))
        weight *= axes.size(name)
    return position


def index_of(op: AtenOp, operands: Sequence[Value | None]) -> RankNumber | None:
    """The integer that an op computes from integers that a rank knows of itself."""
    if op.name == "aten.full" and shape_of(op.results[0]) == ():
        constant = op.value("fill_value")
        return RankNumber((), constant) if type(constant) is int else None
    numbers = [value for value in operands if isinstance(value, RankNumber)]
    if len(numbers) != len(operands) or not numbers:
        return None
    if op.name == "aten.add.Tensor":
        return numbers[0].plus(numbers[1]) if op.value("alpha") == 1 else None
    if op.name not in ("aten.mul.Scalar", "aten.add.Scalar"):
        return None
    other = op.value("other")
    if type(other) is not int:
        return None
    if op.name == "aten.mul.Scalar":
        return numbers[0].times(other)
    return numbers[0].plus(RankNumber((), other)) if op.value("alpha") == 1 else None


FILL = "aten.masked_fill.Scalar"


@lru_cache(maxsize=65536)
def uneven_factors(rule: Rule, cuts: Cuts) -> frozenset[int]:
    """The factors of a rule that are cut unevenly."""
    pairs = enumerate(zip(rule.factors, cuts, strict=True))
    return frozenset(index for index, (factor, cut) in pairs if not is_even(cut, factor.size))


def problem_of_padding(
    op: AtenOp, rule: Rule, cuts: Cuts, parts: Sequence[Relation]
) -> Refusal | None:
    """Explain why padding of an op's operands would show in its results; None if it does not."""
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
    is_index = spec_of(op).has_indices and index > 0 and not dtype.is_floating_point
    for dim, names in enumerate(rule.operands[index]):
        for factor in uneven.intersection(names):
            is_lost = any(all(factor not in own for own in dims) for dims in rule.results)
            if is_index:
                yield dim, 0
            elif is_lost and not (spec_of(op).is_lookup and index == 0):
                yield dim, 0 if rule.factors[factor].reduction == "sum" else _lowest(dtype)


def _lowest(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return float("-inf")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def zeros_after(op: AtenOp, rule: Rule, cuts: Cuts, parts: Sequence[Relation]) -> list[Fill]:
    """The dims of each result of an op whose padding is 0."""
    uneven = uneven_factors(rule, cuts)
    zero = {factor for factor in uneven if _is_zero(op, rule, factor, parts, len(uneven))}
    return [
        Fill(0, frozenset(dim for dim, names in enumerate(dims) if zero.intersection(names)))
        for dims in rule.results
    ]


def _is_zero(
    op: AtenOp, rule: Rule, factor: int, parts: Sequence[Relation], num_uneven: int
) -> bool:
    """Whether an op gives 0 wherever an index is past the end of a factor."""
    known = {
        index: all(
            part.held.fill is not None and part.held.fill.value == 0 and dim in part.held.fill.dims
            for dim, names in enumerate(dims)
            if factor in names
        )
        for index, (dims, part) in enumerate(zip(rule.operands, parts, strict=True))
        if any(factor in names for names in dims)
    }
    if num_uneven != 1 and spec_of(op).zero in ("any", "dividend"):
        # An operand without the dim may be anything along the padding of another.
        return False
    return gives_zero(op, known)


# Ops that pad and cut off padding


def with_fill(old: Fill | None, value: float, dim: int) -> Fill:
    """The known padding after a dim's padding is filled."""
    dims = old.dims if old is not None and old.value == value else frozenset[int]()
    return Fill(value, dims | {dim})


def padded(held: Held, pad: Sequence[int], value: float | None) -> Held | None:
    """Pad a value at the end of one local dim, which no axis cuts."""
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
    return made and made.filled(with_fill(held.fill, float(value or 0), dim))


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
