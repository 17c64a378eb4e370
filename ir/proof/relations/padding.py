"""Padding: elements past the end of unevenly sharded dims, and their values as far as known.

An op that keeps a dim works on each index alone, so that padding stays padding. An op that reduces
a dim gives the model's result only if the padding is the reduction's neutral element: 0 for a sum,
the lowest number for a maximum. Padding is known for arguments, for values that a mask filled, and
for results of ops that map zeros to zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

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
    Relation,
    Value,
)
from shardweave.ir.sharding.fit import Misfit
from shardweave.ir.sharding.padding import lowest_of
from shardweave.ir.sharding.rules import Rule


def rank_position(
    names: Sequence[str], axes: ProofAxes, at: dict[str, frozenset[int]]
) -> RankNumber:
    """Linear index of a rank on axes, the first axis major. at: coordinates of sub-batch axes."""
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
    """Return the integer that an op computes from rank coordinates; None for other ops."""
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
    """Indices of the factors of a rule that are sharded unevenly."""
    pairs = enumerate(zip(rule.factors, cuts, strict=True))
    return frozenset(index for index, (factor, cut) in pairs if not is_even(cut, factor.size))


def problem_of_padding(
    op: AtenOp, rule: Rule, cuts: Cuts, parts: Sequence[Relation]
) -> Misfit | None:
    """Explain why padding of an op's operands could change its results; None if it cannot."""
    uneven = uneven_factors(rule, cuts)
    if not uneven:
        return None
    for index, part in enumerate(parts):
        fill = part.held.fill
        for dim, wanted in _needed(op, rule, cuts, index):
            if fill is None or fill.value != wanted or dim not in fill.dims:
                return Misfit(f"has padding in dim {dim} that is not known to be {wanted}", index)
    return None


def _needed(op: AtenOp, rule: Rule, cuts: Cuts, index: int) -> Iterator[tuple[int, float]]:
    """Yield each dim of operand `index` whose padding affects the result, and its needed value."""
    dtype = dtype_of_value(op.operands[index])
    is_index = spec_of(op).has_indices and index > 0 and not dtype.is_floating_point
    for dim, names in enumerate(rule.operands[index]):
        for factor in uneven_factors(rule, cuts).intersection(names):
            is_lost = any(factor in rule.lost(dims, cuts) for dims in rule.results)
            if is_index:
                yield dim, 0
            elif is_lost and not (spec_of(op).is_lookup and index == 0):
                yield dim, 0 if rule.factors[factor].reduction == "sum" else lowest_of(dtype)


def zeros_after(op: AtenOp, rule: Rule, cuts: Cuts, parts: Sequence[Relation]) -> list[Fill]:
    """Return for each result of an op the dims whose padding is 0 after the op."""
    uneven = uneven_factors(rule, cuts)
    zero = {factor for factor in uneven if _is_zero(op, rule, factor, parts, len(uneven))}
    return [
        Fill(0, frozenset(dim for dim, names in enumerate(dims) if zero.intersection(names)))
        for dims in rule.results
    ]


def _is_zero(
    op: AtenOp, rule: Rule, factor: int, parts: Sequence[Relation], num_uneven: int
) -> bool:
    """True if an op's result is 0 at all indices past the end of `factor`."""
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
    """Return the known padding values after the padding of `dim` is overwritten with `value`."""
    dims = old.dims if old is not None and old.value == value else frozenset[int]()
    return Fill(value, dims | {dim})


def padded(held: Held, pad: Sequence[int], value: float | None) -> Held | None:
    """Relate an op that pads the end of one unsharded local dim; None for other pads."""
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
    """Keep the first `size` indices of local dim `at`; None unless this removes all its padding."""
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
