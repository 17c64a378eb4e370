"""split-attention: parts of keys that are gathered one by one, and merge to the whole."""

from __future__ import annotations

import pytest
import torch

from shardweave.backends.reference.reference import run_reference
from shardweave.ir.dialects.dist import AllGatherOp, ReduceScatterOp
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.tests.ir_text import assert_same_values, lines, random_values, step

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
NOTE = '{layer = "a", phase = forward}'
BACK = '{layer = "a", phase = backward}'
CUT = '[{}, {}, {"context":1}, {}]'
TEXT = f"""
    input %q : tensor<2x4x8x4xf64> {CUT}
    input %k : tensor<2x2x8x4xf64> {CUT}
    input %v : tensor<2x2x8x4xf64> {CUT}
    input %g : tensor<2x4x8x4xf64> {CUT}
    %o, %l = {FLASH}(%q, %k, %v, is_causal = true) {NOTE} : tensor<2x4x8x4xf64>, tensor<2x4x8xf64>
    %dq, %dk, %dv = {FLASH}_backward(%g, %q, %k, %v, %o, %l, dropout_p = 0.0, is_causal = true) {BACK} : tensor<2x4x8x4xf64>, tensor<2x2x8x4xf64>, tensor<2x2x8x4xf64>
    output %o
    output dq = %dq {CUT}
    output dk = %dk {CUT}
    output dv = %dv {CUT}
"""
MASKED = f"""
    input %q : tensor<2x4x8x4xf64> {CUT}
    input %k : tensor<2x4x8x4xf64> {CUT}
    input %v : tensor<2x4x8x4xf64> {CUT}
    input %keep : tensor<2x1x1x8xi64>
    %n = aten._to_copy(%keep) {NOTE} : tensor<2x1x1x8xf64>
    %inf = aten.log(%n) {NOTE} : tensor<2x1x1x8xf64>
    %mask = aten.expand(%inf) {NOTE} : tensor<2x1x8x8xf64>
    %o, %l = {FLASH}(%q, %k, %v, %mask) {NOTE} : tensor<2x4x8x4xf64>, tensor<2x4x8xf64>
    output %o
"""
"""Each sample sees some of the keys: those where `keep` is 1, for log 0 is -inf."""


def split(text: str, mesh: str = "context=2", parts: int = 2) -> tuple[Program, Program]:
    """A text, and what the pass makes of it."""
    program = step(text, mesh)
    return program, run_passes(program, f"split-attention{{parts={parts}}}")


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_merge_to_the_same_values(parts: int) -> None:
    before, after = split(TEXT, parts=parts)
    names = [op.name for op in after.ops]
    assert names.count("dist.attention") == names.count("dist.attention_backward") == parts
    assert not any(name.startswith(FLASH) for name in names)
    assert_same_values(before, after)


def test_masks_that_leave_a_part_nothing_merge_to_the_same_values() -> None:
    before, after = split(MASKED, parts=4)
    values = random_values(before)
    for keep in ([0, 0, 0, 0, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0, 0, 0], [0] * 8):
        values["input", "keep"] = torch.tensor([keep, [1] * 8]).view(2, 1, 1, 8)
        expected, found = run_reference(before, values), run_reference(after, values)
        torch.testing.assert_close(found["output", "0"], expected["output", "0"])


def test_parts_of_keys_and_gradients_travel_by_themselves() -> None:
    before, after = split(TEXT)
    local = run_passes(after, "propagate-shardings,insert-collectives,cse,dce")
    gathers = [op for op in local.ops if isinstance(op, AllGatherOp)]
    scatters = [op for op in local.ops if isinstance(op, ReduceScatterOp)]
    # Keys and values of two parts, for each pass; gradients of both of two parts.
    assert (len(gathers), len(scatters)) == (8, 4)
    assert {op.operands[0].type for op in gathers} == {op.results[0].type for op in scatters}
    assert_same_values(before, local)


def test_text_of_a_part_and_of_a_merge() -> None:
    _, after = split(TEXT)
    found = lines(after)
    assert "%k_2 = aten.slice.Tensor(%k, dim = 2, start = 4) : tensor<2x2x4x4xf64>" in found
    merge = "dist.merge_attention(%attention, %attention_1, %attention_2, %attention_3)"
    assert any(line.partition(" = ")[2].startswith(merge) for line in found)


@pytest.mark.parametrize(("mesh", "cut"), [("data=2", CUT), ("context=2", "")])
def test_attention_whose_keys_are_whole_stays(mesh: str, cut: str) -> None:
    text = TEXT.replace(CUT, "" if mesh == "data=2" else cut)
    before, after = split(text, mesh)
    assert after == before


@pytest.mark.parametrize(
    ("text", "parts", "message"),
    [
        (TEXT, 3, "its 8 keys, sharded over context=2, do not divide into 3 parts"),
        (TEXT.replace(":1", ""), 2, "shard inputs along the sequence in stripes"),
        (TEXT, 0, "parts=0; give at least 1"),
    ],
)
def test_parts_of_which_a_device_has_nothing_are_refused(
    text: str, parts: int, message: str
) -> None:
    with pytest.raises(PassError, match=message):
        split(text, parts=parts)


def test_a_propagated_program_is_refused() -> None:
    program = run_passes(step(TEXT, "context=2"), "propagate-shardings")
    with pytest.raises(PassError, match="run split-attention before propagate-shardings"):
        run_passes(program, "split-attention")
