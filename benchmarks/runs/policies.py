"""Recomputation as other frameworks do it, by the names that `frameworks` gives it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from xdsl.ir import Block, Operation

from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.storage import storage_of
from shardweave.passes.memory.rematerialize import Policy, products_of


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


def keeping_all_but_scores(
    ops: Sequence[Operation], messages: Collection[Operation]
) -> list[Operation]:
    """All ops but those that make attention's stored scores."""
    scores = making_scores(ops)
    return [op for op in ops if op not in scores]


def keeping_every_second(
    ops: Sequence[Operation], messages: Collection[Operation]
) -> list[Operation]:
    """What `after-products` keeps, but of products of a weight the first, third and so on alone."""
    dropped = set([op for op in ops if multiplies_weight(op)][1::2])
    return [op for op in products_of(ops, messages) if op not in dropped]


CHECKPOINT = "checkpoint"

POLICIES: Mapping[str, Policy] = {
    CHECKPOINT: Policy(is_whole=True, repeats_attention=True),
    "stored-scores": Policy(keeping_all_but_scores),
    "every-second-product": Policy(keeping_every_second),
}
"""`checkpoint` is `torch.utils.checkpoint` around a block. `stored-scores` runs again what gives
attention's stored scores (Korthikanti et al. 2022, Sec. 5), and nothing where one kernel stores
none. `every-second-product` is torchtitan's selective checkpoint of ops."""
