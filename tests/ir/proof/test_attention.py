"""The static proof of attention in parts of its keys, which merge by their log-sum-exp."""

from __future__ import annotations

import pytest

from shardweave.ir.program import Program
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.prove import prove
from shardweave.passes.pipeline import run_passes
from shardweave.tests.ir.proof.cases import num_refused_slips
from shardweave.tests.ir_text import step
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


MERGE_SLIPS = [
    ("aten.sub.Tensor(%attention_3, %attention_1)", "aten.sub.Tensor(%attention_1, %attention_3)"),
    ("aten.lerp.Tensor(%attention, %attention_2", "aten.lerp.Tensor(%attention_2, %attention"),
    ("aten.logaddexp(%attention_1, %attention_3)", "aten.logaddexp(%attention_1, %attention_1)"),
    ("nan = 0.0", "nan = 1.0"),
    ("aten.sigmoid(", "aten.tanh("),
    ("start_step(start = 4)", "start_step(start = 3)"),
    ("start_step(start = 4)", "start_step(start = 0)"),
]


@pytest.mark.parametrize(("right", "wrong"), MERGE_SLIPS)
def test_slip_in_a_merge_is_refused(right: str, wrong: str) -> None:
    whole, local = split(TEXT, 2)
    text = str(local)
    assert right in text
    with pytest.raises(ProofError):
        prove(Program.parse(text.replace(right, wrong)), against=whole)
