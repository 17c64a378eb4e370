"""Rules of fused attention: samples and heads pass, positions and head dims stay whole."""

from __future__ import annotations

from xdsl.ir import SSAValue

from shardweave.ir.aten import AtenOp
from shardweave.ir.sharding.rules.base import Notation, Rule, rule
from shardweave.ir.types import shape_of

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"


@rule(FLASH)
def flash_attention(op: AtenOp) -> Rule:
    """`b (k g) . ., b k . ., b k . . -> b (k g) . ., b (k g) .`; a mask is `b (k g) . .`.

    The mask is broadcast. k counts the heads of keys and values, g the query heads that share one.
    """
    heads = _Heads(op, *op.operands[:2])
    operands = ", ".join([heads.query, heads.key, heads.key, *heads.mask])
    return Notation(op, f"{operands} -> {heads.query}, {heads.row}", heads.sizes).rule()


@rule(f"{FLASH}_backward")
def flash_attention_backward(op: AtenOp) -> Rule:
    """grad, q, k, v, out, logsumexp, and a mask -> gradients of q, k, v; dims as forward.

    The gradients of keys and values are sums over g.
    """
    heads = _Heads(op, *op.operands[1:3])
    q, k = heads.query, heads.key
    operands = ", ".join([q, q, k, k, q, heads.row, *heads.mask])
    return Notation(op, f"{operands} -> {q}, {k}, {k}", heads.sizes).rule()


def first_of_attention(op: AtenOp) -> int:
    """The place of the queries among an attention's operands; keys and values follow."""
    return int(op.name != FLASH)


def shares_key_heads(op: AtenOp) -> bool:
    """Whether queries share the heads of several keys in an attention, forward or backward."""
    if op.name not in (FLASH, f"{FLASH}_backward"):
        return False
    first = first_of_attention(op)
    return 1 < shape_of(op.operands[first + 1])[1] < shape_of(op.operands[first])[1]


def queries_rule(op: AtenOp) -> Rule:
    """The rule of a forward attention whose key heads are repeated for queries (`repeat_heads`)."""
    heads = _Heads(op, op.operands[0], op.operands[0])
    operands = ", ".join([heads.query, "b . . .", "b . . .", *heads.mask])
    return Notation(op, f"{operands} -> {heads.query}, {heads.row}", heads.sizes).rule()


class _Heads:
    """The dims of queries, of keys and values, of a value per query, and of a mask."""

    def __init__(self, op: AtenOp, query: SSAValue, key: SSAValue) -> None:
        samples, heads = shape_of(query)[:2]
        key_heads = shape_of(key)[1]
        self.sizes = {"k": key_heads, "g": heads // key_heads}
        of_query = "(k g)" if heads > key_heads else "k"
        self.query, self.key, self.row = f"b {of_query} . .", "b k . .", f"b {of_query} ."
        self.mask: list[str] = []
        mask = op.tensor("attn_mask")
        if isinstance(mask, SSAValue):
            shape = shape_of(mask)
            named = ["b" if shape[0] == samples else ".", of_query if shape[1] == heads else "."]
            lead = named if len(shape) == 4 else ["."] * (len(shape) - 2)
            self.mask = [" ".join([*lead, ".", "."])]
