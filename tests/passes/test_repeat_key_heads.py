"""repeat-key-heads: queries cut among more devices than there are heads of keys stay cut."""

from __future__ import annotations

import pytest

from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.tests.ir_text import assert_same_values, lines, step

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
TEXT = f"""
    input %q : tensor<2x4x8x4xf64> [{{}}, {{"tensor"}}, {{}}, {{}}]
    input %k : tensor<2x2x8x4xf64>
    input %v : tensor<2x2x8x4xf64>
    %o, %l = {FLASH}(%q, %k, %v) {{layer = "a", phase = forward}} : tensor<2x4x8x4xf64>, tensor<2x4x8xf64>
    output %o
"""


def attention(mesh: str) -> Program:
    return step(TEXT, mesh)


def test_each_query_gets_a_head_of_its_own_and_values_stay() -> None:
    program = attention("tensor=4")
    after = run_passes(program, "repeat-key-heads")
    names = [op.name for op in after.ops]
    assert names == [
        "aten.arange.start_step",
        "aten.div.Scalar_mode",
        "aten.index_select",
        "aten.index_select",
        FLASH,
    ]
    assert_same_values(program, after)
    shards = run_passes(after, "propagate-shardings")
    assert not any("reshard" in line and "%q" in line for line in lines(shards))


@pytest.mark.parametrize("mesh", ["tensor=2", "data=4"])
def test_keys_that_can_be_cut_with_their_queries_or_need_not_stay(mesh: str) -> None:
    text = TEXT.replace('{"tensor"}', "{}") if mesh == "data=4" else TEXT
    program = step(text, mesh)
    assert run_passes(program, "repeat-key-heads") == program


def test_a_propagated_program_is_refused() -> None:
    program = run_passes(attention("tensor=4"), "propagate-shardings")
    with pytest.raises(PassError, match="run repeat-key-heads before propagate-shardings"):
        run_passes(program, "repeat-key-heads")
