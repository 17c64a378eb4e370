"""Which ops of a block give attention's stored scores."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.ir import Block, Operation

from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.storage import storage_of


def multiplies_weight(op: Operation) -> bool:
    """Whether an op is a product with a parameter."""
    return spec_of(op).product is not None and any(
        isinstance(storage_of(value).owner, Block) for value in op.operands
    )


def making_scores(ops: Sequence[Operation]) -> set[Operation]:
    """Of a block's forward ops, those from a product of two activations on up to another one, with
    no product of a weight between them."""
    products = {op for op in ops if spec_of(op).product is not None and not multiplies_weight(op)}
    behind: set[Operation] = set()
    for op in ops:
        follows = any(value.owner in behind for value in op.operands)
        if op in products or (follows and not multiplies_weight(op)):
            behind.add(op)
    found: set[Operation] = set()
    for op in reversed(ops):
        users = {use.operation for result in op.results for use in result.uses}
        if op in behind and users & (found | products):
            found.add(op)
    return found
