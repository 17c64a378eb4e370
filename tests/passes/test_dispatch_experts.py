"""dispatch-experts: rows are sent to the ranks whose experts take them, and back."""

from __future__ import annotations

import re

import pytest

from shardweave.backends.reference.reference import run_reference
from shardweave.ir.dialects.dist_rows import RowsOp
from shardweave.ir.program.program import Program
from shardweave.ir.proof.prove import ProofError, prove
from shardweave.ir.verify.program import verify
from shardweave.passes.pipeline import run_passes
from shardweave.tests.ir_text import assert_same_values, random_values, step

AXES = '{"data", "expert"}'
TEXT = f"""
    input %t : tensor<8x4xf64> [{AXES}, {{}}]
    input %up : tensor<4x4x6xf64> [{{"expert"}}, {{}}, {{}}]
    input %down : tensor<4x6x4xf64> [{{"expert"}}, {{}}, {{}}]
    %n = aten.arange.start_step(start = 2, step = 3) : tensor<4xi64>
    %s = aten.constant_pad_nd(%n, pad = [1, -1], value = 0) : tensor<4xi64>
    %i = aten.arange.start_step(start = 0, step = 5) : tensor<11xi64>
    %j = aten.remainder.Scalar(%i, other = 8) : tensor<11xi64>
    %x = aten.index.Tensor(%t, [%j]) : tensor<11x4xf64>
    %a = dist.grouped_mm(%x, %up, %s, %n, groups = 4) : tensor<11x6xf64>
    %b = aten.cos(%a) : tensor<11x6xf64>
    %c = dist.grouped_mm(%b, %down, %s, %n, groups = 4) : tensor<11x4xf64>
    %d = aten.embedding_dense_backward(%c, %j, padding_idx = -1, scale_grad_by_freq = false) : tensor<8x4xf64>
    output %d [{AXES}, {{}}]
"""
MESHES = ["data=1,expert=4", "data=2,expert=2", "expert=2,data=1", "expert=2,data=2"]


def local(mesh: str, mode: str) -> Program:
    before = "split-addmm,block-experts,propagate-shardings,insert-collectives,cse,dce"
    return run_passes(step(TEXT, mesh), f'{before},dispatch-experts{{mode="{mode}"}}')


def rows_ops(program: Program) -> list[str]:
    return [op.name for op in program.ops if isinstance(op, RowsOp)]


@pytest.mark.parametrize("mesh", MESHES)
def test_values_stay_and_the_program_is_proved(mesh: str) -> None:
    program = step(TEXT, mesh)
    sent = local(mesh, "all-to-all")
    assert rows_ops(sent) == ["dist.fetch_rows", "dist.add_rows"]
    assert not re.search("dist.all_gather|dist.reduce_scatter", str(sent))
    assert_same_values(program, sent)
    assert Program.parse(str(sent)) == sent
    prove(sent, against=run_passes(program, "block-experts"))


def test_rows_are_gathered_where_that_is_asked_for_or_less() -> None:
    assert rows_ops(local("data=1,expert=4", "cheaper")) != []
    assert rows_ops(local("data=1,expert=4", "gather")) == []
    with pytest.raises(ValueError, match="'cheaper', 'all-to-all', 'gather'"):
        local("data=1,expert=4", "nowhere")


def test_another_routing_is_refused() -> None:
    sent = str(local("data=2,expert=2", "all-to-all"))
    fewer = Program.parse(sent.replace("tensor<4x8xi1>", "tensor<2x8xi1>"))
    assert any("routes have 2 rows" in str(problem) for problem in verify(fewer))
    other = Program.parse(sent.replace("other = 8", "other = 7"))
    with pytest.raises(ProofError):
        prove(other, against=run_passes(step(TEXT, "data=2,expert=2"), "block-experts"))


@pytest.mark.parametrize(
    ("op", "before", "after", "problem"),
    [
        ("dist.fetch_rows", '["data", "expert"]', '["expert", "data"]', "in this order"),
        ("dist.add_rows", '["data", "expert"]', '["expert", "data"]', "in this order"),
        ("dist.grouped_mm", "parts = 2", "parts = 0", "do not divide 2 blocks of 0 parts"),
        ("dist.grouped_mm", "shards = 4", "shards = 3", "3 shards do not divide"),
        ("dist.own_rows", "blocks = 2, parts = 2", "blocks = 4, parts = 1", "its bounds have 2"),
        ("dist.row_bounds", "rows = 11", "rows = 10", "splits 11 rows, but its bounds are those"),
        ("dist.row_bounds", "rows = 11", "rows = -1", "rows=-1 is negative"),
        ("dist.fetch_rows", "%routes", "%t", "must be 2-d bools"),
    ],
)
def test_rows_of_other_shards_are_refused(op: str, before: str, after: str, problem: str) -> None:
    lines = str(local("data=2,expert=2", "all-to-all")).split("\n")
    changed = [line.replace(before, after) if op in line else line for line in lines]
    assert changed != lines
    assert any(problem in str(each) for each in verify(Program.parse("\n".join(changed))))


def test_a_run_refuses_other_routes_and_bounds() -> None:
    sent = local("data=2,expert=2", "all-to-all")
    for before, after, problem in (
        ("places = [0, 2, 1, 3]", "places = [3, 1, 2, 0]", "that its routes leave out"),
        ("row_bounds(%s, %n", "row_bounds(%n, %n", "groups start at"),
    ):
        other = Program.parse(str(sent).replace(before, after))
        assert other != sent
        assert not verify(other)
        with pytest.raises(ValueError, match=problem):
            run_reference(other, random_values(other))
