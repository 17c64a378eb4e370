"""recompute-producers: values that are cheaper to compute again than to keep, and nothing else."""

from __future__ import annotations

import re

import pytest

from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.program.program import Program
from shardweave.passes.notes import PassNote
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.tests.ir_text import step
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured, megatron, partitioned

KERNELS = "preset:kernels"
FUSED = "fuse-kernels{matmul=false}"

LOSS = """
    input %l : tensor<64x512xf32>
    input %i : tensor<64x1xi64>
    %m = aten.amax(%l, dim = [1], keepdim = true) : tensor<64x1xf32>
    %s = aten.sub.Tensor(%l, %m) : tensor<64x512xf32>
    %e = aten.exp(%s) : tensor<64x512xf32>
    %t = aten.sum.dim_IntList(%e, dim = [1], keepdim = true) : tensor<64x1xf32>
    %g = aten.log(%t) : tensor<64x1xf32>
    %p = aten.sub.Tensor(%s, %g) : tensor<64x512xf32>
    %c = aten.gather(%p, %i, dim = 1) : tensor<64x1xf32>
    %q = aten.exp(%p) {phase = backward} : tensor<64x512xf32>
    %n = aten.neg(%q) {phase = backward} : tensor<64x512xf32>
    output %c
    grad l = %n
"""


def moved(program: Program) -> int:
    return sum(program.stats().moved_bytes.values())


def test_loss_reads_the_logits_once_in_each_direction_and_writes_the_gradient() -> None:
    program = step(LOSS)
    fused = run_passes(program, KERNELS)
    logits = 64 * 512 * 4
    assert 3 * logits <= moved(fused) <= 3.05 * logits
    assert moved(run_passes(program, FUSED)) >= 4 * logits


def test_reader_behind_a_product_computes_the_activation_itself() -> None:
    program = step("""
        input %x : tensor<64x64xf32>
        input %w : tensor<64x64xf32>
        %s = aten.silu(%x) : tensor<64x64xf32>
        %a = aten.mul.Tensor(%s, %w) : tensor<64x64xf32>
        %p = aten.mm(%a, %w) : tensor<64x64xf32>
        %b = aten.mul.Tensor(%p, %s) {phase = backward} : tensor<64x64xf32>
        %c = aten.silu_backward(%b, %x) {phase = backward} : tensor<64x64xf32>
        grad x = %c
    """)
    text = str(run_passes(program, RECOMPUTED))
    clone = re.search(r'%(\S+) = aten.silu\(%x\) {phase = backward, origin = "s"}', text)
    assert clone is not None
    assert f"%b = aten.mul.Tensor(%p, %{clone[1]})" in text


RECOMPUTED = "recompute-producers{matmul=false}"


def regions_of(program: Program) -> list[list[str]]:
    """The names of each kernel's ops."""
    fused = run_passes(program, KERNELS)
    return [[o.name for o in op.fused_ops] for op in fused.ops if isinstance(op, FusedOp)]


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (
            "%p = aten.constant_pad_nd(%l, pad = [0, 1], value = -100) : tensor<4x9xi64>\n"
            "%s = aten.slice.Tensor(%p, dim = 1, start = 1) : tensor<4x8xi64>",
            ["aten.constant_pad_nd", "aten.slice.Tensor", "aten.ne.Scalar"],
        ),
        (
            "%s = aten.gt.Scalar(%l, other = 0) : tensor<4x8xi1>",
            ["aten.gt.Scalar", "aten.ne.Scalar"],
        ),
    ],
    ids=["labels moved by one", "a mask of more bytes than it has"],
)
def test_what_had_a_kernel_of_its_own_is_computed_where_it_is_read(
    made: str, names: list[str]
) -> None:
    program = step(
        f"""
        input %l : tensor<4x8xi64>
        input %x : tensor<4x8xf32>
        {made}
        %r = dist.all_reduce(%x, axes = ["tensor"]) : tensor<4x8xf32>
        %n = aten.ne.Scalar(%s, other = 0) : tensor<4x8xi1>
        %a = aten.masked_fill.Scalar(%r, %n, value = 2.0) : tensor<4x8xf32>
        output %a
        """,
        "tensor=2",
        local=True,
    )
    assert regions_of(program) == [[*names, "aten.masked_fill.Scalar"]]


def test_rows_of_a_small_table_are_looked_up_behind_a_message() -> None:
    program = step(
        """
        param %w : tensor<2x8xf32>
        input %i : tensor<64xi64>
        input %x : tensor<64x8xf32>
        %e = aten.embedding(%w, %i) : tensor<64x8xf32>
        %r = dist.all_reduce(%x, axes = ["tensor"]) : tensor<64x8xf32>
        %a = aten.add.Tensor(%r, %e) : tensor<64x8xf32>
        output %a
        """,
        "tensor=2",
        local=True,
    )
    assert regions_of(program) == [["aten.embedding", "aten.add.Tensor"]]


def test_sines_are_kept() -> None:
    program = step("""
        input %x : tensor<64x64xf32>
        %s = aten.sin(%x) : tensor<64x64xf32>
        %c = aten.cumsum(%x, dim = 0) : tensor<64x64xf32>
        %b = aten.mul.Tensor(%c, %s) {phase = backward} : tensor<64x64xf32>
        %d = aten.mul.Tensor(%b, %x) {phase = backward} : tensor<64x64xf32>
        output %d
    """)
    with pytest.warns(PassNote, match="no value between kernels is cheaper"):
        assert run_passes(program, RECOMPUTED) == program


@pytest.mark.parametrize(
    "reader",
    [
        "%y = aten.mm(%s, %s) : tensor<64x64xf32>",
        "%y = aten.cumsum(%s, dim = 0) : tensor<64x64xf32>",
    ],
    ids=["product", "no kernel"],
)
def test_value_that_something_else_wants_in_memory_is_read_there(reader: str) -> None:
    program = step(f"""
        input %x : tensor<64x64xf32>
        %s = aten.silu(%x) : tensor<64x64xf32>
        {reader}
        %b = aten.mul.Tensor(%y, %s) {{phase = backward}} : tensor<64x64xf32>
        output %b
    """)
    with pytest.warns(PassNote, match="no value between kernels is cheaper"):
        assert run_passes(program, "recompute-producers") == program


def test_value_of_two_large_ones_is_kept() -> None:
    program = step("""
        input %x : tensor<64x64xf32>
        input %y : tensor<64x64xf32>
        %s = aten.mul.Tensor(%x, %y) : tensor<64x64xf32>
        %t = aten.exp(%s) : tensor<64x64xf32>
        %b = aten.cumsum(%t, dim = 0) : tensor<64x64xf32>
        %c = aten.mul.Tensor(%b, %s) {phase = backward} : tensor<64x64xf32>
        output %c
    """)
    with pytest.warns(PassNote, match="no value between kernels is cheaper"):
        run_passes(program, "recompute-producers")


@pytest.mark.parametrize(
    "kind", ["gpt", *(pytest.param(one, marks=pytest.mark.slow) for one in ("llama", "bert"))]
)
def test_step_equals_eager_and_moves_fewer_bytes(kind: str) -> None:
    case = captured(SPECS[kind])
    fused = run_passes(case.program, KERNELS)
    assert_equals_eager(fused, case)
    assert moved(fused) < moved(run_passes(case.program, FUSED))


def test_local_step_with_messages_equals_eager() -> None:
    plan = megatron(SPECS["llama"], "data=2,tensor=2")
    program = partitioned(SPECS["llama"], "data=2,tensor=2", plan)
    fused = run_passes(program, KERNELS)
    assert_equals_eager(fused, captured(SPECS["llama"]))
    assert moved(fused) < moved(run_passes(program, FUSED))


def test_program_with_regions_is_refused() -> None:
    with pytest.raises(PassError, match="run unfuse-kernels before this pass"):
        run_passes(step(LOSS), f"{FUSED},recompute-producers")


def test_preset_makes_regions_without_products() -> None:
    fused = run_passes(captured(SPECS["gpt"]).program, KERNELS)
    names = {inner.name for op in fused.ops if isinstance(op, FusedOp) for inner in op.fused_ops}
    assert names
    assert not names & {"aten.mm", "aten.addmm"}
