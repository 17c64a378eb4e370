"""The static proof of attention in parts of its keys, which merge by their log-sum-exp."""

from __future__ import annotations

import pytest

from shardweave.backends.reference.reference import run_reference
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Placement, Sharding
from shardweave.ir.program.program import Program
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.prove import prove
from shardweave.ir.proof.relations.cuts import merged_terms
from shardweave.ir.proof.relations.held import Held, ProofAxes, Relation
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


MERGE = "dist.merge_attention(%attention, %attention_1, %attention_2, %attention_3)"
START = "start_step(start = 4)"

MERGE_SLIPS = [
    (
        MERGE,
        MERGE.replace("1, %attention_2, %attention_3", "3, %attention_2, %attention_1"),
        "merge",
    ),
    (MERGE, MERGE.replace("%attention_2, %attention_3", "%attention, %attention_1"), "merge"),
    (START, START.replace("4", "3"), "arange"),
    (START, START.replace("4", "0"), "attention"),
]
"""What is replaced, and how the op begins that the message names."""


@pytest.mark.parametrize(("right", "wrong", "name"), MERGE_SLIPS)
def test_slip_in_a_merge_is_refused_by_name(right: str, wrong: str, name: str) -> None:
    whole, local = split(TEXT, 2)
    text = str(local)
    assert right in text
    with pytest.raises(ProofError, match=rf"^(aten|dist)\.{name}"):
        prove(Program.parse(text.replace(right, wrong)), against=whole)


IN_SUB_BATCHES = (
    "split-batch{n=2},split-attention{parts=2},propagate-shardings,insert-collectives,"
    "unroll-time-axes,cse,dce"
)


@pytest.mark.parametrize("operands", [(2, 3), (3,)])
def test_part_of_another_sub_batch_is_refused(operands: tuple[int, ...]) -> None:
    whole = step(TEXT, "context=2")
    local = run_passes(whole, IN_SUB_BATCHES)
    prove(local, against=whole)
    first, second = [op for op in local.ops if op.name == "dist.merge_attention"]
    for index in operands:
        second.operands[index] = first.operands[index]
    values = random_values(whole)
    right, wrong = [run_reference(program, values)["output", "0"] for program in (whole, local)]
    assert (right - wrong).abs().max() > 1e-3
    with pytest.raises(ProofError, match=r"dist\.merge_attention"):
        prove(local, against=whole)


def cut_by(samples: str, heads: str, index: int, block: int, terms: int = 1) -> Relation:
    """An output (0) or a log-sum-exp (1) on a block of keys, its samples and heads cut over axes."""
    shape = (2, 2, 8, 4)[: 4 - index]
    dims = (Placement(samples, 2, 1),), (Placement(heads, 2, 1),), *((),) * (2 - index)
    sharding = Sharding(dims, ("sub_batch.2",), "lse")
    held = Held(5 + index, shape, sharding, terms)
    return Relation(held, (("sub_batch.2", frozenset({block})),))


@pytest.mark.parametrize(
    ("axes", "blocks", "terms", "is_merged"),
    [
        (("a", "b"), (0, 1), 1, True),
        (("b", "a"), (0, 1), 1, False),
        (("a", "b"), (1, 0), 1, False),
        (("a", "b"), (0, 0), 1, False),
        (("a", "b"), (0, 1), 2, False),
    ],
)
def test_only_results_of_the_same_rows_and_parts_merge(
    axes: tuple[str, str], blocks: tuple[int, int], terms: int, is_merged: bool
) -> None:
    proof_axes = ProofAxes(Mesh(a=2, b=2), {"sub_batch.2": 2})
    outs = [cut_by("a", "b", 0, block) for block in (0, 1)]
    rows = [cut_by(*axes, 1, block, terms) for block in blocks]
    parts = outs[0], rows[0], outs[1], rows[1]
    merged = merged_terms(parts, proof_axes, "lse")
    assert (merged is not None) == is_merged
    if merged is not None:
        assert [part.at for part in merged] == [(), ()]
        assert not any(part.held.sharding.unreduced for part in merged)
    assert merged_terms(parts, proof_axes, "sum") is None
