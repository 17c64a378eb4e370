"""The static proof of attention in parts of its keys, which merge by their log-sum-exp."""

from __future__ import annotations

import pytest

from shardweave.backends.reference.reference import run_reference
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.mesh.placement import Placement, Sharding
from shardweave.ir.program.program import Program
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.prove import prove
from shardweave.ir.proof.relations.held import AttentionPart, Held, Local, Relation, Value
from shardweave.ir.proof.steps.attention import merged_parts
from shardweave.ir.proof.walk import key_of
from shardweave.passes.pipeline import run_passes
from shardweave.tests.ir.proof.cases import num_refused_slips
from shardweave.tests.ir_text import random_values, step
from shardweave.tests.passes.test_split_attention import MASKED, TEXT

PASSES = "split-attention{{parts={parts}}},propagate-shardings,insert-collectives,cse,dce"


def split(text: str, parts: int) -> tuple[Program, Program]:
    whole = step(text, "context=2")
    return whole, run_passes(whole, PASSES.format(parts=parts))


CONSTANT = MASKED.replace("aten.expand(%inf)", "aten.full(fill_value = 0.5)")
"""A mask that is the same for all keys."""


@pytest.mark.parametrize(("text", "parts"), [(TEXT, 2), (TEXT, 4), (MASKED, 2), (CONSTANT, 2)])
def test_attention_in_parts_is_proved_and_what_is_wrong_in_it_is_not(text: str, parts: int) -> None:
    whole, local = split(text, parts)
    assert sum(op.name == "dist.attention" for op in local.ops) == parts
    prove(local, against=whole)
    assert num_refused_slips(local, whole) > 8


SUB, LERP = (
    "aten.sub.Tensor(%attention_3, %attention_1)",
    "aten.lerp.Tensor(%attention, %attention_2",
)

MERGE_SLIPS = [
    (SUB, "aten.sub.Tensor(%attention_1, %attention_3)", "sub"),
    (LERP, "aten.lerp.Tensor(%attention_2, %attention", "lerp"),
    ("aten.logaddexp(%attention_1, %attention_3)", "aten.logaddexp(%attention_1, %attention_1)",
     "logaddexp"),
    ("nan = 0.0", "nan = 1.0", "nan_to_num"),
    ("aten.sigmoid(", "aten.tanh(", "tanh"),
    ("aten.view(%sigmoid)", "aten.view(%nan_to_num)", "view"),
    ("start_step(start = 4)", "start_step(start = 3)", "arange"),
    ("start_step(start = 4)", "start_step(start = 0)", "attention"),
]  # fmt: skip
"""What is replaced, and the op that the message names."""


@pytest.mark.parametrize(("right", "wrong", "name"), MERGE_SLIPS)
def test_slip_in_a_merge_is_refused_by_name(right: str, wrong: str, name: str) -> None:
    whole, local = split(TEXT, 2)
    text = str(local)
    assert right in text
    with pytest.raises(ProofError, match=rf"^(aten|dist)\.{name}"):
        prove(Program.parse(text.replace(right, wrong)), against=whole)


def test_share_of_other_parts_names_both_the_merge_and_the_op_that_compares() -> None:
    whole, local = split(TEXT, 4)
    first, second, _ = [op for op in local.ops if op.name == "aten.sub.Tensor"]
    second.operands[1] = first.operands[1]
    second.results[0].name_hint = "slip"
    with pytest.raises(ProofError, match=r"aten\.lerp.* than those whose share .*%slip"):
        prove(local, against=whole)


IN_SUB_BATCHES = (
    "split-batch{n=2},split-attention{parts=2},propagate-shardings,insert-collectives,"
    "unroll-time-axes,cse,dce"
)


def test_share_of_another_sub_batch_is_refused() -> None:
    whole = step(TEXT, "context=2")
    local = run_passes(whole, IN_SUB_BATCHES)
    prove(local, against=whole)
    first, second = [op for op in local.ops if op.name == "aten.lerp.Tensor"]
    second.operands[2] = first.operands[2]
    values = random_values(whole)
    right, wrong = [run_reference(program, values)["output", "0"] for program in (whole, local)]
    assert (right - wrong).abs().max() > 1e-3
    with pytest.raises(ProofError, match=r"aten\.lerp\.Tensor"):
        prove(local, against=whole)


def cut_by(samples: str, heads: str, index: int, block: int) -> AttentionPart:
    """An output (0) or a log-sum-exp (1) on a block of keys, its samples and heads cut over axes."""
    shape = (2, 2, 8, 4)[: 4 - index]
    dims = (Placement(samples, 2, 1),), (Placement(heads, 2, 1),), *((),) * (2 - index)
    whole = Relation(Held(5 + index, shape, Sharding(dims)))
    return AttentionPart(whole, (5, 6), index, ("sub_batch.2", 2), frozenset({block}))


@pytest.mark.parametrize(("axes", "is_merged"), [(("a", "b"), True), (("b", "a"), False)])
def test_share_that_is_cut_otherwise_merges_nothing(axes: tuple[str, str], is_merged: bool) -> None:
    program = step(
        """
        input %old : tensor<1x1x8x4xf64>
        input %l0 : tensor<1x1x8xf64>
        input %l1 : tensor<1x1x8xf64>
        %d = aten.sub.Tensor(%l1, %l0) : tensor<1x1x8xf64>
        %n = aten.nan_to_num(%d, nan = 0.0) : tensor<1x1x8xf64>
        %s = aten.sigmoid(%n) : tensor<1x1x8xf64>
        %share = aten.view(%s) : tensor<1x1x8x1xf64>
        %o = aten.lerp.Tensor(%old, %old, %share) : tensor<1x1x8x4xf64>
        output %o
        """
    )
    *steps, lerp = program.ops
    value: tuple[Value, ...] = (cut_by(*axes, 1, 1), cut_by(*axes, 1, 0))
    for op in steps:
        value = (Local(*key_of(op, value)),)
    assert isinstance(lerp, AtenOp)
    found = merged_parts(lerp, (cut_by("a", "b", 0, 0), cut_by("a", "b", 0, 1), *value))
    assert found == (cut_by("a", "b", 0, 0).whole if is_merged else None)
