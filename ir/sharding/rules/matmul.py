"""Rules of matrix products."""

from __future__ import annotations

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.sharding.rules.base import Notation, Rule, rule

PRODUCTS = {
    "aten.mm": "i k, k j -> i j",
    "aten.bmm": "b i k, b k j -> b i j",
    "aten.mv": "i k, k -> i",
    "aten.dot": "k, k ->",
}

ADDED_PRODUCTS = {
    "aten.addmm": "i k, k j -> i j",
    "aten.addmv": "i k, k -> i",
    "aten.baddbmm": "b i k, b k j -> b i j",
}
"""Products to which operand 0 is added, broadcast to the result."""


@rule(*PRODUCTS)
def product(op: AtenOp) -> Rule:
    """`i k, k j -> i j`: the contracted k reduces."""
    return Notation(op, PRODUCTS[op.name]).rule()


@rule(*ADDED_PRODUCTS)
def added_product(op: AtenOp) -> Rule:
    """`j, i k, k j -> i j`: k cannot be cut, for each shard would add operand 0 once more.

    Capture splits an addmm into mm and add where a plan may cut it (see `canonical`).
    """
    text = ADDED_PRODUCTS[op.name]
    names, shape = text.partition("->")[2].split(), shape_of(op.results[0])
    added = shape_of(op.operands[0])
    offset = len(shape) - len(added)
    bias = [names[offset + d] if n == shape[offset + d] else "." for d, n in enumerate(added)]
    return Notation(op, f"{' '.join(bias)}, {text}").rule(reductions={"k": None})
