"""The rule of matrix products with an addition; plain products are notation alone."""

from __future__ import annotations

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.sharding.rules.base import Notation, Rule, rule


@rule
def added_product(op: AtenOp) -> Rule:
    """`j, i k, k j -> i j`: k cannot be cut, for each shard would add operand 0 once more.

    Capture splits an addmm into mm and add where a plan may cut it (see `canonical`).
    """
    text = spec_of(op).notation
    names, shape = text.partition("->")[2].split(), shape_of(op.results[0])
    added = shape_of(op.operands[0])
    offset = len(shape) - len(added)
    bias = [names[offset + d] if n == shape[offset + d] else "." for d, n in enumerate(added)]
    return Notation(op, f"{' '.join(bias)}, {text}").rule(reductions={"k": None})
