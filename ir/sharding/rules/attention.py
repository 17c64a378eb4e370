"""Rules of fused attention: samples, heads and queries pass; keys and head dims stay whole.

A query needs all keys, so keys are gathered where queries are sharded along the sequence, and the
gradients of keys are sums over these shards. A causal mask depends on a query's global position:
the local op is `dist.attention`, which reads the positions of its queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.library.positional_attention import ATTENTION, ATTENTION_BACKWARD
from shardweave.ir.ops.registry import first_of_attention, is_attention, is_positional
from shardweave.ir.sharding.rules.base import Localize, Localizer, Notation, Rule, rule

POSITIONS = 2
"""The sequence dim of queries, keys and values."""


@rule
def attention(op: AtenOp) -> Rule:
    """`b (k g) q ., b k . ., b k . . -> b (k g) q ., b (k g) q`; a mask is `b (k g) q .`.

    The mask is broadcast. k counts the heads of keys and values, g the query heads that share one.
    Operands that hold positions have the dims `q` (of queries) and `.` (of keys).
    """
    heads = _Heads(op, *op.operands[:2])
    operands = ", ".join([heads.query, heads.key, heads.key, *heads.more])
    return Notation(op, f"{operands} -> {heads.query}, {heads.row}", heads.sizes).rule(
        localize=heads.localize
    )


@rule
def attention_backward(op: AtenOp) -> Rule:
    """grad, q, k, v, out, logsumexp, mask, positions -> gradients of q, k, v; dims as forward. The
    gradients of keys and values are sums over g and q."""
    heads = _Heads(op, *op.operands[1:3])
    q, k = heads.query, heads.key
    operands = ", ".join([q, q, k, k, q, heads.row, *heads.more])
    return Notation(op, f"{operands} -> {q}, {k}, {k}", heads.sizes).rule(localize=heads.localize)


def shares_key_heads(op: AtenOp) -> bool:
    """True if an attention op is grouped-query with several key heads, fewer than query heads."""
    if not is_attention(op):
        return False
    first = first_of_attention(op)
    return 1 < shape_of(op.operands[first + 1])[1] < shape_of(op.operands[first])[1]


def queries_rule(op: AtenOp) -> Rule:
    """The rule of a forward attention whose key heads are repeated for their queries."""
    heads = _Heads(op, op.operands[0], op.operands[0])
    operands = ", ".join([heads.query, "b . . .", "b . . .", *heads.more])
    return Notation(op, f"{operands} -> {heads.query}, {heads.row}", heads.sizes).rule()


class _Heads:
    """Notation for an attention's queries, keys and values, row per query, mask and positions."""

    def __init__(self, op: AtenOp, query: SSAValue, key: SSAValue) -> None:
        heads, key_heads = shape_of(query)[1], shape_of(key)[1]
        self.sizes = {"k": key_heads, "g": heads // key_heads}
        self.of_query = "(k g)" if heads > key_heads else "k"
        self.query, self.key = f"b {self.of_query} q .", "b k . ."
        self.row = f"b {self.of_query} q"
        self.more = [*self._mask(op, shape_of(query))]
        self.localize: Localize | None = None
        if is_positional(op):
            self.more += ["q", "."] if op.tensor("query_positions") is not None else []
        elif op.value("is_causal"):
            # Factors are numbered in the order of the query's dims.
            self.localize = _causal_by_positions(3 if heads > key_heads else 2)

    def _mask(self, op: AtenOp, query: tuple[int, ...]) -> list[str]:
        mask = op.tensor("attn_mask")
        if not isinstance(mask, SSAValue):
            return []
        shape = shape_of(mask)
        named = ["b" if shape[0] == query[0] else ".", "."]
        named[1] = self.of_query if len(shape) == 4 and shape[1] == query[1] else "."
        lead = named if len(shape) == 4 else ["."] * (len(shape) - 2)
        rows = ["q" if shape[-2] == query[POSITIONS] else "."] if len(shape) > 1 else []
        return [" ".join([*lead, *rows, "."])]


@cache
def _causal_by_positions(queries: int) -> Localize:
    """Make the `localize` of causal attention. queries: index of the query positions' factor."""

    def localize(local: Localizer) -> Sequence[SSAValue]:
        placements = local.placements[queries]
        if not placements:
            return local.clone()
        op = local.op
        first = first_of_attention(op)
        num_queries, num_keys = (shape_of(v)[POSITIONS] for v in op.operands[first : first + 2])
        (keys,) = local.emit("aten.arange.start_step", [], ((num_keys,), torch.int64), start=0)
        rows = keys
        if num_queries != num_keys:
            (rows,) = local.emit(
                "aten.arange.start_step", [], ((num_queries,), torch.int64), start=0
            )
        rows = local.shard(rows, placements)
        num_more = 0 if op.tensor("attn_mask") is None else 1
        given = list(local.operands)
        mask = given.pop() if num_more else None
        dtypes = [dtype_of_value(result) for result in op.results]
        return local.emit(
            ATTENTION_BACKWARD if first else ATTENTION,
            [*given, mask, rows, keys],
            *((local.result_shape(i), dtype) for i, dtype in enumerate(dtypes)),
            scale=op.value("scale"),
        )

    return localize
