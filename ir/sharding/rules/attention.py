"""Rules of fused attention: samples, heads and queries pass; keys and head dims stay whole.

A query needs all keys, so keys are gathered where queries are sharded along the sequence, and the
gradients of keys are sums over these shards. A causal mask depends on a query's global position:
the local op is `dist.attention`, which reads the positions of its queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of, tensor_type
from shardweave.ir.library.positional_attention import ATTENTION, ATTENTION_BACKWARD
from shardweave.ir.ops.registry import first_of_attention, is_positional
from shardweave.ir.sharding.rules.base import Localize, Localizer, Notation, Rule, rule

HEADS, POSITIONS = 1, 2
"""The dims of heads and of the sequence in queries, keys and values, and the queries' factors."""


@rule
def attention(op: AtenOp) -> Rule:
    """`b h q ., b k . ., b k . . -> b h q ., b h q`; a mask, which is broadcast, is `b h q .`.

    k counts the heads of keys and values: groups of the query heads h, which share one. Operands
    that hold positions have the dims `q` (of queries) and `.` (of keys).
    """
    heads = _Heads(op, *op.operands[:2])
    operands = ", ".join([heads.query, heads.key, heads.key, *heads.more])
    return heads.rule(f"{operands} -> {heads.query}, {heads.row}")


@rule
def attention_backward(op: AtenOp) -> Rule:
    """grad, q, k, v, out, logsumexp, mask, positions -> gradients of q, k, v; dims as forward. The
    gradients of keys and values are sums over q and over the query heads of a group."""
    heads = _Heads(op, *op.operands[1:3])
    q, k = heads.query, heads.key
    operands = ", ".join([q, q, k, k, q, heads.row, *heads.more])
    return heads.rule(f"{operands} -> {q}, {k}, {k}")


class _Heads:
    """Notation of attention's queries, keys (and values), logsumexp (`row`), mask and positions."""

    def __init__(self, op: AtenOp, query: SSAValue, key: SSAValue) -> None:
        heads, key_heads = shape_of(query)[HEADS], shape_of(key)[HEADS]
        self.op, self.share = op, heads // key_heads
        self.query, self.row = "b h q .", "b h q"
        self.is_grouped = 1 < key_heads < heads
        of_key = "k" if self.is_grouped else "h" if self.share == 1 else "."
        self.key = f"b {of_key} . ."
        self.more = [*self._mask(op, shape_of(query))]
        if is_positional(op):
            self.more += ["q", "."] if op.tensor("query_positions") is not None else []

    def rule(self, text: str) -> Rule:
        groups = {"k": ("h", self.share)} if self.is_grouped else {}
        by_position = not is_positional(self.op) and bool(self.op.value("is_causal"))
        localize = _local_form(self.share, by_position) if groups or by_position else None
        return Notation(self.op, text).rule(localize=localize, groups=groups)

    def _mask(self, op: AtenOp, query: tuple[int, ...]) -> list[str]:
        mask = op.tensor("attn_mask")
        if not isinstance(mask, SSAValue):
            return []
        shape = shape_of(mask)
        named = ["b" if shape[0] == query[0] else ".", "."]
        named[1] = "h" if len(shape) == 4 and shape[1] == query[1] else "."
        lead = named if len(shape) == 4 else ["."] * (len(shape) - 2)
        rows = ["q" if shape[-2] == query[POSITIONS] else "."] if len(shape) > 1 else []
        return [" ".join([*lead, *rows, "."])]


@cache
def _local_form(share: int, by_position: bool) -> Localize:
    """Make the `localize` of attention. share: query heads per key head. by_position: whether the
    op is causal, so that shards need the global positions of their queries."""

    def attend(local: Localizer) -> list[SSAValue]:
        return _causal_by_positions(local) if by_position else local.clone()

    def localize(local: Localizer) -> Sequence[SSAValue]:
        crossing = [p for p in local.placements[HEADS] if p.stride % share and share % p.span]
        return _on_repeated_heads(local, share, attend) if crossing else attend(local)

    return localize


def _on_repeated_heads(
    local: Localizer, share: int, attend: Callable[[Localizer], list[SSAValue]]
) -> list[SSAValue]:
    """Repeat key and value heads, one per local query head; add up the gradients of the copies."""
    first, heads = first_of_attention(local.op), local.sizes[HEADS]
    type_ = (heads,), torch.int64
    (index,) = local.emit("aten.arange.start_step", [], type_, start=0)
    values: dict[str, Any] = {"other": share, "rounding_mode": "floor"}
    (index,) = local.emit("aten.div.Scalar_mode", [index], type_, **values)
    index = local.shard(index, local.placements[HEADS])
    operands, types = list(local.operands), list(local.types)
    for at in (first + 1, first + 2):
        shape, dtype = list(shape_of(operands[at])), dtype_of_value(operands[at])
        shape[HEADS] = shape_of(index)[0]
        values = {"dim": HEADS}
        operands[at : at + 1] = local.emit(
            "aten.index_select", [operands[at], index], (shape, dtype), **values
        )
        if first:
            types[at - first] = tensor_type(shape, dtype)
    made = attend(replace(local, operands=operands, types=types))
    for at in (1, 2) if first else ():
        type_ = local.result_shape(at), dtype_of_value(made[at])
        made[at : at + 1] = local.emit(
            "aten.index_select_backward", [made[at], index], type_, dim=HEADS
        )
    return made


def _causal_by_positions(local: Localizer) -> list[SSAValue]:
    """Emit causal attention that masks by the global positions of local queries and of keys."""
    placements = local.placements[POSITIONS]
    if not placements:
        return local.clone()
    op = local.op
    first = first_of_attention(op)
    num_queries, num_keys = (shape_of(v)[POSITIONS] for v in op.operands[first : first + 2])
    (keys,) = local.emit("aten.arange.start_step", [], ((num_keys,), torch.int64), start=0)
    rows = keys
    if num_queries != num_keys:
        (rows,) = local.emit("aten.arange.start_step", [], ((num_queries,), torch.int64), start=0)
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
