"""Repeating key heads that queries share, where they are too few to be sharded like the queries.

Queries may be sharded over more devices than there are key heads: two key heads, four devices. So
each device selects the key and value heads that its queries read, from replicated keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from xdsl.ir import SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from shardweave.ir.dialects.annotations import set_wanted_attrs, wanted_attrs_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.builder import Builder, remade
from shardweave.ir.dialects.syntax import Operands
from shardweave.ir.dialects.types import dtype_of_value, shape_of, tensor_type
from shardweave.ir.ops.registry import first_of_attention
from shardweave.ir.program.program import Program
from shardweave.ir.sharding.flow import Flow, aten_ops, check_not_propagated
from shardweave.ir.sharding.rules.attention import shares_key_heads
from shardweave.passes.partition.propagate_shardings import propagated_forward
from shardweave.passes.program_pass import Analyses, PassWithAnalyses

HEADS = 1
"""The dim of heads."""


@dataclass(frozen=True)
class RepeatKeyHeadsPass(PassWithAnalyses):
    """Repeat key and value heads of grouped attention if there are more devices than heads.

    Queries are sharded by heads over these devices, and keys and values are replicated. Without
    this pass the queries would be replicated for the attention, too.

    Requires: a global program with a mesh, before `propagate-shardings`. Ensures: numerics
    unchanged. Takes time linear in the ops.
    """

    name = "repeat-key-heads"

    def rewrite(self, program: Program, analyses: Analyses) -> None:
        program.needed_mesh()
        check_not_propagated(program, self.name)
        grouped = [op for op in aten_ops(program) if shares_key_heads(op)]
        if not grouped:
            return
        flow = analyses.of(propagated_forward).flow
        ops = [op for op in grouped if _is_cut_across(op, flow)]
        for op in ops:
            _Repeat(op).run()
        if ops:
            analyses.forget()


def _is_cut_across(op: AtenOp, flow: Flow) -> bool:
    first = first_of_attention(op)
    cut = flow.sharding(op.operands[first]).dims[HEADS]
    rule = flow.rule(op)
    return any(rule.seat(rule.operands[first][HEADS], placement) is None for placement in cut)


class _Repeat:
    """Rewrites one attention op, forward or backward."""

    def __init__(self, op: AtenOp) -> None:
        self.op = op
        self.new = Builder.before(op)
        self.first = first_of_attention(op)
        self.heads = shape_of(op.operands[self.first])[HEADS]
        self.key_heads = shape_of(op.operands[self.first + 1])[HEADS]

    def run(self) -> None:
        index, operands = self._index(), list(self.op.operands)
        repeated: list[SSAValue] = []
        for at in (self.first + 1, self.first + 2):
            shape = _with_heads(operands[at], self.heads)
            operands[at] = self._add(
                "aten.index_select", [operands[at], index], shape, operands[at], dim=HEADS
            )
            repeated.append(operands[at])
        if self.first == 0:
            self.op.operands = operands
            return
        types = [self.op.results[0].type, *(value.type for value in repeated)]
        new = remade(self.op, operands, types)
        set_wanted_attrs(new, wanted_attrs_of(self.op))
        Rewriter.insert_op(new, InsertPoint.before(self.op))
        sums = [
            self._add("aten.index_select_backward", [grad, index], shape_of(old), old, dim=HEADS)
            for grad, old in zip(new.results[1:], self.op.results[1:], strict=True)
        ]
        Rewriter.replace_op(self.op, [], [new.results[0], *sums])

    def _index(self) -> SSAValue:
        """Compute the index of the key head that each query head reads."""
        count = tensor_type((self.heads,), torch.int64)
        heads = self.new.aten("aten.arange.start_step", [], count, None, start=0, step=1)
        share = self.heads // self.key_heads
        values = {"other": share, "rounding_mode": "floor"}
        return self.new.aten("aten.div.Scalar_mode", [heads], count, None, **values)

    def _add(
        self, name: str, operands: Operands, shape: tuple[int, ...], like: SSAValue, dim: int
    ) -> SSAValue:
        result = tensor_type(shape, dtype_of_value(like))
        return self.new.aten(name, operands, result, like, dim=dim)


def _with_heads(value: SSAValue, heads: int) -> tuple[int, ...]:
    shape = shape_of(value)
    return (*shape[:HEADS], heads, *shape[HEADS + 1 :])
