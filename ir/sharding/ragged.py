"""Finding ragged values (rows of a device's own groups, whose number varies) and row-wise ops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.annotations import wanted_attrs_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.dist import DistOp
from shardweave.ir.dialects.dist_rows import AddRowsOp, FetchRowsOp
from shardweave.ir.ops.registry import is_random, spec_of
from shardweave.ir.sharding.rules.base import Rule
from shardweave.ir.sharding.rules.lookup import rule_of


def ragged_values(ops: Iterable[Operation]) -> frozenset[SSAValue]:
    """Find values with a varying number of rows; their types state the number for balanced groups.

    `OpSpec.ragged` marks the ops at which ragged rows begin and end; ops that keep rows pass them
    on. A stage function may take and return them. Takes time linear in the ops.
    """
    ops = [op for op in ops if op.operands or op.results]
    seeds = {value for op in ops for value in _seeds(op)}
    if not seeds:
        return frozenset()
    near: dict[SSAValue, set[SSAValue]] = {}
    for op in ops:
        for group in _alike(op):
            for value in group:
                near.setdefault(value, set()).update(group)
    ragged, left = set(seeds), list(seeds)
    while left:
        new = near.get(left.pop(), set[SSAValue]()) - ragged
        ragged |= new
        left.extend(new)
    return frozenset(ragged)


def _seeds(op: Operation) -> Iterator[SSAValue]:
    if not isinstance(op, AtenOp):
        return
    spec = spec_of(op)
    if spec.ragged == "begin":
        yield op.results[0]
    elif spec.ragged == "end":
        yield op.operands[0]
    elif spec.grouped and op.tensor("bounds") is not None:
        yield op.operands[0]
        yield op.results[0] if spec.grouped == "rows" else op.operands[1]


def _alike(op: Operation) -> Iterator[list[SSAValue]]:
    """Yield groups of an op's operands and results that are ragged together."""
    if isinstance(op, FetchRowsOp):
        yield [op.operands[1], op.results[0]]
    elif isinstance(op, AddRowsOp):
        yield list(op.operands[:2])
    elif isinstance(op, DistOp):
        yield from map(list, zip(op.operands, op.results, strict=False))
    elif isinstance(op, AtenOp):
        rule = rule_of(op)
        rows: dict[int, list[SSAValue]] = {}
        values = zip((*op.operands, *op.results), (*rule.operands, *rule.results), strict=True)
        for value, dims in values:
            if dims and len(dims[0]) == 1:
                rows.setdefault(dims[0][0], []).append(value)
        yield from rows.values()


def with_rows(rule: Rule, index: int) -> set[int]:
    """Indices of the operands whose first dim has the same factors as operand `index`."""
    first = rule.operands[index][:1]
    return {other for other, dims in enumerate(rule.operands) if dims[:1] == first}


def _row_of(op: AtenOp, rule: Rule, index: int) -> int | None:
    """The factor of operand `index`'s first dim, if the op treats its rows independently."""
    first = rule.operands[index][:1]
    if len(first) != 1 or len(first[0]) != 1 or is_random(op) or wanted_attrs_of(op):
        return None
    row = first[0][0]
    limits, dims = rule.factors[row], (*rule.operands, *rule.results)
    leads = all(value[0] == (row,) for value in dims if value and row in value[0])
    is_inside = any(row in names for value in dims for names in value[1:])
    is_bound = limits.contiguous or limits.whole or limits.even
    return row if leads and not is_inside and not is_bound else None


def is_by_row(op: AtenOp, rule: Rule, index: int) -> bool:
    """True if an op computes row i of each result from row i of operand `index`."""
    row = _row_of(op, rule, index)
    if row is None or (rule.localize and not spec_of(op).is_lookup):
        return False
    return all(dims[:1] == ((row,),) for dims in rule.results)


def adds_rows(op: AtenOp, rule: Rule, index: int) -> bool:
    """True if an op sums over the rows of operand `index`."""
    row = _row_of(op, rule, index)
    is_gone = not any(row in names for dims in rule.results for names in dims)
    return row is not None and is_gone and rule.factors[row].reduction == "sum"
