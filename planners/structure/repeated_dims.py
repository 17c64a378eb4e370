"""Dims along which a value repeats itself, such as a mask of tokens expanded over heads."""

from __future__ import annotations

from collections.abc import Iterable

from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.sharding.rules import rule_of


def repeated_dims(ops: Iterable[AtenOp]) -> dict[SSAValue, set[int]]:
    """The dims of results along which all elements are equal, since something was expanded there.

    Such a dim is of no features of its own: a shard of it costs nothing. ops: in program order;
    one walk, which asks the rules of those ops alone that expand, or read what repeats itself.
    """
    found: dict[SSAValue, set[int]] = {}
    for op in ops:
        expands = spec_of(op).view == "expand"
        if not expands and found.keys().isdisjoint(op.operands):
            continue
        rule = rule_of(op)
        repeats: dict[int, bool] = {}
        for value, dims in zip(op.operands, rule.operands, strict=True):
            for dim, names in enumerate(dims):
                here = dim in found.get(value, ())
                repeats |= {name: here and repeats.get(name, True) for name in names}
        for result, dims in zip(op.results, rule.results, strict=True):
            alike = {
                dim
                for dim, names in enumerate(dims)
                if names and all(repeats.get(name, expands) for name in names)
            }
            if alike:
                found[result] = alike
    return found
