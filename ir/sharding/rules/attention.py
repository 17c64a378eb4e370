"""Rules of fused attention: samples and heads pass, positions and head dims stay whole."""

from __future__ import annotations

from xdsl.ir import SSAValue

from shardweave.ir.aten import AtenOp
from shardweave.ir.sharding.rules.base import Notation, Rule, rule
from shardweave.ir.types import shape_of

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"


@rule(FLASH)
def flash_attention(op: AtenOp) -> Rule:
    """`b h . ., b h . ., b h . . -> b h . ., b h .`; a mask is `b h . .`, broadcast."""
    query, key = op.operands[0], op.operands[1]
    value, mask = _dims(op, query, key)
    row = value.removesuffix(" .")
    return Notation(op, f"{', '.join([value] * 3)}{mask} -> {value}, {row}").rule()


@rule(f"{FLASH}_backward")
def flash_attention_backward(op: AtenOp) -> Rule:
    """`(b h . .) x 5, b h . -> (b h . .) x 3` for grad, q, k, v, out, logsumexp; then a mask."""
    query, key = op.operands[1], op.operands[2]
    value, mask = _dims(op, query, key)
    row = value.removesuffix(" .")
    operands = f"{', '.join([value] * 5)}, {row}{mask}"
    return Notation(op, f"{operands} -> {', '.join([value] * 3)}").rule()


def _dims(op: AtenOp, query: SSAValue, key: SSAValue) -> tuple[str, str]:
    """The dims of a query, and those of the mask with a comma before them, if there is one."""
    samples, heads = shape_of(query)[:2]
    # Query heads that share a key head must stay with it.
    h = "h" if shape_of(key)[1] == heads else "."
    mask = op.tensor("attn_mask")
    if not isinstance(mask, SSAValue):
        return f"b {h} . .", ""
    shape = shape_of(mask)
    named = ["b" if shape[0] == samples else ".", h if shape[1] == heads else "."]
    lead = named if len(shape) == 4 else ["."] * (len(shape) - 2)
    return f"b {h} . .", f", {' '.join([*lead, '.', '.'])}"
