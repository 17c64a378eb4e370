"""Which values of a program are ragged: the rows of a device's own groups, of any number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.dist import DistOp
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.sharding.rules.lookup import rule_of


def ragged_values(ops: Iterable[Operation]) -> frozenset[SSAValue]:
    """The values whose first dim counts, in types, as many rows as balanced groups give.

    They begin and end at ops that say so, and pass through ops that keep rows; a function of a
    stage may have them as arguments and results. Linear in the ops.
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
    """The values of an op that have the same rows, if any of them has."""
    if isinstance(op, DistOp):
        yield from map(list, zip(op.operands, op.results, strict=False))
    elif isinstance(op, AtenOp):
        rule = rule_of(op)
        rows: dict[int, list[SSAValue]] = {}
        values = zip((*op.operands, *op.results), (*rule.operands, *rule.results), strict=True)
        for value, dims in values:
            if dims and len(dims[0]) == 1:
                rows.setdefault(dims[0][0], []).append(value)
        yield from rows.values()
