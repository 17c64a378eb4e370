"""Fused attention: of torch on the CPU, and by positions (`ir.library.positional_attention`)."""

from __future__ import annotations

import math

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.library.positional_attention import (
    ATTENTION,
    ATTENTION_BACKWARD,
    MERGE_ATTENTION,
)
from shardweave.ir.ops.spec import AttentionKind, OpSpec

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
FLASH_BACKWARD = f"{FLASH}_backward"


def _products(op: AtenOp, first: int, count: int) -> int:
    """`count` products of queries, operand `first`, by keys; a causal mask is not discounted."""
    query, key = shape_of(op.operands[first]), shape_of(op.operands[first + 1])
    return count * 2 * math.prod(query) * key[-2]


def _forward(name: str, global_name: str = "") -> OpSpec:
    return OpSpec(
        name,
        rule="attention",
        attention=AttentionKind(global_name=global_name),
        flops=lambda op: _products(op, 0, 2),
    )


def _backward(name: str, global_name: str = "") -> OpSpec:
    return OpSpec(
        name,
        rule="attention_backward",
        attention=AttentionKind(is_backward=True, global_name=global_name),
        flops=lambda op: _products(op, 1, 5),
    )


SPECS = (
    _forward(FLASH),
    _backward(FLASH_BACKWARD),
    _forward(ATTENTION, FLASH),
    _backward(ATTENTION_BACKWARD, FLASH_BACKWARD),
    OpSpec(MERGE_ATTENTION, notation="... ., ..., ... ., ... -> ... ., ...", merge="lse"),
)
