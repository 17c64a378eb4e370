"""Results in parts wait until something reads them, and are then joined together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

from shardweave.backends.emit.emit import emit
from shardweave.backends.triton.kernels.generate import generate
from shardweave.backends.triton.source.joining import (
    PartialResult,
    finishing_grid,
    finishing_kernel,
    partial_results_of,
)
from shardweave.backends.triton.source.parts import (
    MAX_BYTES,
    MAX_RESULTS,
    PartsQueue,
    joined_together,
    joins,
)
from shardweave.driver.kernel_files import distinct_kernels
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import run_passes
from shardweave.tests.ir_text import step

BIASES = """
    input %x : tensor<64x32xf32>
    input %w : tensor<32x32xf32>
    %n = aten.neg(%x) : tensor<64x32xf32>
    %b = aten.sum.dim_IntList(%n, dim = [0]) : tensor<32xf32>
    %p = aten.mm(%n, %w) : tensor<64x32xf32>
    %q = aten.exp(%p) : tensor<64x32xf32>
    %c = aten.sum.dim_IntList(%q, dim = [0], keepdim = true) : tensor<1x32xf32>
    %v = aten.view(%c) : tensor<32xf32>
    %r = aten.mm(%q, %w) : tensor<64x32xf32>
    grad b = %b
    grad v = %v
    grad r = %r
"""


def fused(text: str) -> Program:
    return run_passes(step(text), "fuse-kernels{matmul=false}")


def lines_of(program: Program) -> list[str]:
    source = emit(program, kernels=True)
    return [
        line.strip() for line in source.splitlines() if "kernels[" in line or "rt.added" in line
    ]


def test_gradients_of_biases_are_joined_at_the_end() -> None:
    program = fused(BIASES)
    found = joins(program)
    assert set(found.values()) == {program.return_op}
    assert {str(value.name_hint) for value in found} == {"b", "c", "v"}
    lines = lines_of(program)
    assert [line.split(" = ")[0] for line in lines[:2]] == ["n, b", "q, c"]
    join = next(place for place, line in enumerate(lines) if line.startswith("kernels[2]()"))
    for name in ("b", "v"):  # what is added to the caller's gradient is there by then
        (added,) = (place for place, line in enumerate(lines) if line.startswith(f"{name} = rt.a"))
        assert added > join


def test_first_reader_of_one_has_all_joined_before_it() -> None:
    program = fused(BIASES.replace("%r = aten.mm(%q, %w)", "%r = aten.mul.Tensor(%p, %b)"))
    found = {str(value.name_hint): op for value, op in joins(program).items()}
    (reader,) = (use.operation for value in joins(program) if value.name_hint == "b"
                 for use in value.uses if use.operation is not program.return_op)  # fmt: skip
    assert found["b"] is reader
    calls = [line.split("kernels")[1][:4] for line in lines_of(program) if "kernels[" in line]
    assert calls == ["[0](", "[2](", "[1](", "[2]("]


def test_term_that_is_added_before_it_is_sent_is_joined_at_once() -> None:
    program = fused(BIASES)
    by_name = {str(v.name_hint): v for v in joins(program)}
    found = joins(program, {by_name["b"]})
    maker = by_name["b"].owner
    assert isinstance(maker, FusedOp)
    assert found[by_name["b"]] is maker.next_op
    assert found[by_name["v"]] is program.return_op


def parts(columns: int, count: int = 4) -> PartialResult:
    return PartialResult("sum", count, columns, torch.float32, torch.bfloat16)


def test_queue_joins_what_waits_when_it_is_too_much() -> None:
    joined: list[int] = []
    queue = PartsQueue(lambda results, places: joined.append(len(results)))
    for _ in range(MAX_RESULTS + 1):
        queue.add([parts(8)], [None])
    assert joined == [MAX_RESULTS]
    queue.add([parts(MAX_BYTES // 4)], [None])
    assert joined == [MAX_RESULTS, 1]
    queue.join()
    queue.join()
    assert joined == [MAX_RESULTS, 1, 1]


def test_launch_has_a_program_for_each_block_of_each_result() -> None:
    results: Sequence[PartialResult] = [parts(64), parts(65), parts(1)]
    assert finishing_grid(results) == (1 + 2 + 1,)
    kernel = finishing_kernel(results)
    assert kernel.pointers == ("*fp32",) * 3 + ("*bf16",) * 3
    assert kernel.sizes["n_cols_1"] == 65


def test_counts_group_as_the_step_does() -> None:
    program = fused(BIASES)
    kernels = {op: generate(op) for op in program.ops if isinstance(op, FusedOp)}
    assert [len(joining.results) for joining in joined_together(program, kernels)] == [2]


LOOKUP = (
    BIASES
    + """
    input %g : tensor<6x32xf32>
    input %i : tensor<6xi64>
    %d = aten.embedding_dense_backward(%g, %i, padding_idx = -1, scale_grad_by_freq = false) : tensor<9x32xf32>
    grad d = %d
"""
)


def test_kernel_of_a_lookup_joins_what_waits_before_it() -> None:
    program = fused(LOOKUP)
    kernels = {op: generate(op) for op in program.ops if isinstance(op, FusedOp)}
    (joining,) = joined_together(program, kernels)
    assert len(joining.results) == 2
    assert joining.beside is list(kernels)[-1]
    names = distinct_kernels(program)[0]
    assert [name.split("_", 1)[1] for name in names] == [
        "columns_neg_sum", "columns_exp_sum", "lookups_embedding_dense_backward_and_finish"
    ]  # fmt: skip


def test_queue_gives_what_waits_away_once() -> None:
    queue = PartsQueue(lambda results, places: pytest.fail("nothing is left to join"))
    queue.add([parts(8)], ["here"])
    assert queue.take() == ([parts(8)], ["here"])
    assert queue.take() == ([], [])
    queue.join()


def test_wide_columns_are_shared_among_enough_programs_and_no_more() -> None:
    """Each more would leave a part of all columns, to be written and read."""
    text = """
        input %x : tensor<8192x{columns}xbf16>
        %n = aten.neg(%x) : tensor<8192x{columns}xbf16>
        %s = aten.sum.dim_IntList(%n, dim = [0]) : tensor<{columns}xbf16>
        output %s
    """
    shares: dict[int, int] = {}
    for columns in (1024, 8192, 30528, 128256):
        (op,) = (o for o in fused(text.format(columns=columns)).ops if isinstance(o, FusedOp))
        kernel = generate(op)
        shares[columns] = partial_results_of(kernel, kernel.configs[0])[0].num_parts
    assert shares == {1024: 64, 8192: 64, 30528: 18, 128256: 5}


@pytest.mark.parametrize(("rows", "is_whole"), [(16, True), (17, False)])
def test_sums_over_few_rows_are_whole_and_wait_for_nothing(rows: int, is_whole: bool) -> None:
    program = fused(BIASES.replace("64x32", f"{rows}x32"))
    kernels = {op: generate(op) for op in program.ops if isinstance(op, FusedOp)}
    assert [bool(kernel.partial) for kernel in kernels.values()] == [not is_whole] * 2
    assert bool(joins(program)) is not is_whole
    assert bool(joined_together(program, kernels)) is not is_whole
    assert any("kernels[2]()" in line for line in lines_of(program)) is not is_whole
