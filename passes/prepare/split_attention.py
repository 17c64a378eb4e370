"""Attention over parts of its keys; the parts' outputs merge by their log-sum-exp.

If keys and values are sharded along the sequence, attention must wait until all are gathered. Split
in parts, one part is gathered while attention to another is computed, and no device ever holds more
than a part or two (Liu et al. 2023, Ring Attention). From out_p and lse_p, the output of each part
and the logarithm of its sum of exponentials, attention to all keys is

    lse = log(sum_p exp(lse_p))        out = sum_p exp(lse_p - lse) out_p

which is computed part by part. The backward pass needs only lse and out of all keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.rewriter import Rewriter

from shardweave.ir.dialects.annotations import describe, set_wanted_attrs
from shardweave.ir.dialects.aten import AtenOp, create
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.builder import Builder
from shardweave.ir.dialects.syntax import Operands
from shardweave.ir.dialects.types import (
    dtype_of_value,
    shape_of,
    tensor_type,
    tensor_type_of,
    with_shape,
)
from shardweave.ir.library.positional_attention import (
    ATTENTION,
    ATTENTION_BACKWARD,
    MERGE_ATTENTION,
    logsumexp_dtype,
)
from shardweave.ir.mesh.placement import DimSharding, Sharding, fits, is_even, ordered
from shardweave.ir.ops.registry import first_of_attention, is_attention, is_positional
from shardweave.ir.program.program import Program
from shardweave.ir.sharding.flow import Flow, aten_ops, check_not_propagated
from shardweave.ir.sharding.rules.attention import POSITIONS
from shardweave.passes.notes import note
from shardweave.passes.partition.propagate_shardings import Propagation, propagated_forward
from shardweave.passes.program_pass import Analyses, PassWithAnalyses


@dataclass(frozen=True)
class SplitAttentionPass(PassWithAnalyses):
    """Compute attention in parts of its keys, where these are sharded along the sequence.

    Parts merge by their log-sum-exp. Each part's keys and values are gathered separately, so that
    one gather can overlap attention to another part. The gradients of each part's keys and values
    are wanted in the sharding of keys and values, so that they are scattered separately, too.
    Attention whose keys are not sharded along the sequence stays as it is.

    Requires: a global program with a mesh, before `propagate-shardings`; every device has a piece
    of every part, as it does where sequences are sharded in stripes. Ensures: numerics unchanged.
    Takes time linear in the ops.
    """

    name = "split-attention"
    parts: int = 2

    def rewrite(self, program: Program, analyses: Analyses) -> None:
        program.needed_mesh()
        check_not_propagated(program, self.name)
        if self.parts < 1:
            raise ValueError(f"parts={self.parts}; give at least 1.")
        if self.parts == 1:
            return
        ops = [op for op in aten_ops(program) if is_attention(op) and not is_positional(op)]
        propagation = analyses.of(propagated_forward) if ops else None
        cut = [op for op in ops if propagation and _cut_of_keys(op, propagation.flow)]
        if propagation is None or not cut:
            note(
                "no fused attention has keys that are sharded along the sequence, and none is "
                "computed in parts; shard the inputs' sequences first, over an axis as context=2."
            )
            return
        for op in cut:
            _check(op, _cut_of_keys(op, propagation.flow), self.parts)
        for op in cut:
            (_Backward if first_of_attention(op) else _Forward)(op, self.parts, propagation).run()
        analyses.forget()


def _cut_of_keys(op: AtenOp, flow: Flow) -> DimSharding:
    key = op.operands[first_of_attention(op) + 1]
    return flow.sharding(key).dims[POSITIONS]


def _check(op: AtenOp, cut: DimSharding, parts: int) -> None:
    num_keys = shape_of(op.operands[first_of_attention(op) + 1])[POSITIONS]
    length = num_keys // parts
    if num_keys % parts or not (fits(cut, length) and is_even(cut, length)):
        axes = ", ".join(f"{p.axis}={p.size}" for p in cut)
        stripes = ", ".join(f'"{p.axis}":1' for p in cut[:1])
        raise ValueError(
            f"{describe(op)}: its {num_keys} keys, sharded over {axes}, do not divide into "
            f"{parts} parts with an equal share of each on every device; shard inputs along the "
            f"sequence in stripes, {{{stripes}}}, and choose a number of parts that divides the "
            "keys."
        )


class _Split:
    """Rewrites one attention op into attention to each part of its keys."""

    def __init__(self, op: AtenOp, parts: int, propagation: Propagation) -> None:
        self.op = op
        self.new = Builder.before(op)
        self.propagation = propagation
        first = first_of_attention(op)
        self.query, self.key, self.value = op.operands[first : first + 3]
        self.parts = parts
        self.length = shape_of(self.key)[POSITIONS] // parts
        mask = op.tensor("attn_mask")
        self.mask = mask if isinstance(mask, SSAValue) else None
        self.is_causal = bool(op.value("is_causal"))
        self.rows = self._positions(shape_of(self.query)[POSITIONS]) if self.is_causal else None
        self.values = {"scale": op.value("scale")}

    def operands_of(self, part: int) -> tuple[SSAValue, SSAValue, Operands]:
        """Keys and values of one part, and its mask, row positions and column positions."""
        key, value = (self._part(whole, POSITIONS, part) for whole in (self.key, self.value))
        mask = self.mask
        if mask is not None and shape_of(mask)[-1] > 1:
            mask = self._part(mask, len(shape_of(mask)) - 1, part)
        columns = self._positions(self.length, part * self.length) if self.is_causal else None
        return key, value, [mask, self.rows, columns]

    def _part(self, whole: SSAValue, dim: int, part: int) -> SSAValue:
        shape = list(shape_of(whole))
        shape[dim] = self.length
        type_ = with_shape(tensor_type_of(whole), shape)
        values = {"dim": dim, "start": part * self.length}
        return self.new.aten("aten.slice.Tensor", [whole], type_, whole, **values)

    def _positions(self, length: int, start: int = 0) -> SSAValue:
        type_ = tensor_type((length,), torch.int64)
        return self.new.aten("aten.arange.start_step", [], type_, "positions", start=start)

    def add(
        self,
        name: str,
        operands: Operands,
        types: Sequence[Attribute],
        values: Mapping[str, Any] = {},
        wanted: Sequence[Sharding] = (),
    ) -> list[SSAValue]:
        op: Operation = create(name, operands, list(types), values)
        if wanted:
            pairs = zip(wanted, op.results, strict=True)
            set_wanted_attrs(op, [ShardingAttr.of(s, shape_of(value)) for s, value in pairs])
        return list(self.new.insert(op).results)


class _Forward(_Split):
    def run(self) -> None:
        out, rows = self.op.results
        dtype = logsumexp_dtype(dtype_of_value(out))
        types = [_with_dtype(out, dtype), _with_dtype(rows, dtype)]
        total: list[SSAValue] = []
        for part in range(self.parts):
            key, value, more = self.operands_of(part)
            operands: Operands = [self.query, key, value, *more]
            own = self.add(ATTENTION, operands, [out.type, types[1]], self.values)
            total = self.add(MERGE_ATTENTION, [*total, *own], types) if total else own
        for index, old in enumerate((out, rows)):
            if total[index].type != old.type:
                total[index] = self.new.aten("aten._to_copy", total[index:][:1], old.type, "out")
            total[index].name_hint = old.name_hint
        Rewriter.replace_op(self.op, [], total)


class _Backward(_Split):
    def run(self) -> None:
        grad, _, _, _, out, rows = self.op.operands[:6]
        of_query, of_key = self.op.results[0].type, tensor_type_of(self.key)
        shape = list(shape_of(self.key))
        shape[POSITIONS] = self.length
        types = [of_query, *(with_shape(of_key, shape) for _ in "kv")]
        assignment, flow = self.propagation.assignments[self.op], self.propagation.flow
        wanted = [flow.sharding(self.query).whole()]
        for value, made in zip((self.key, self.value), assignment.results[1:], strict=True):
            # A sum over query heads that share a key head is left to the gradient of its weight.
            pairs = zip(flow.sharding(value).dims, made.dims, strict=True)
            dims = tuple([ordered({*own, *more}) for own, more in pairs])
            wanted.append(replace(made.reduced(Sharding(dims).axes), dims=dims))
        totals: list[SSAValue] = []
        gradients: tuple[list[SSAValue], list[SSAValue]] = [], []
        for part in range(self.parts):
            key, value, more = self.operands_of(part)
            operands: Operands = [grad, self.query, key, value, out, rows, *more]
            own = self.add(ATTENTION_BACKWARD, operands, types, self.values, wanted)
            totals.append(own[0])
            for gathered, gradient in zip(gradients, own[1:], strict=True):
                gathered.append(gradient)
        total = totals[0]
        for more_ in totals[1:]:
            total = self.new.aten("aten.add.Tensor", [total, more_])
        whole = [self.new.aten("aten.cat", [parts], of_key, dim=POSITIONS) for parts in gradients]
        Rewriter.replace_op(self.op, [], [total, *whole])


def _with_dtype(value: SSAValue, dtype: torch.dtype) -> Attribute:
    return tensor_type(shape_of(value), dtype)
