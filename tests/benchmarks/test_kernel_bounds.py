"""Bounds of launches and bytes, on steps short enough to count by hand."""

from __future__ import annotations

from shardweave.benchmarks.kernel_bounds import lower_bound
from shardweave.tests.ir_text import step

KIB = 1024
"""Bytes of a value of 16x16 float32. Products are 16x16, too."""


def kernels_of(text: str) -> tuple[int, float]:
    """Launches beside the library's, and KiB that they move, as the bound says."""
    counts = lower_bound(step(text))
    kernels = [key for key in counts.launches if key[0] == "kernel"]
    moved = sum(counts.moved[key] for key in kernels)
    return sum(counts.launches[key] for key in kernels), moved / KIB


def test_pointwise_ops_are_one_kernel_that_reads_and_writes_once() -> None:
    text = """
        input %x : tensor<16x16xf32>
        %a = aten.exp(%x) : tensor<16x16xf32>
        %b = aten.neg(%a) : tensor<16x16xf32>
        %c = aten.add.Tensor(%b, %x) : tensor<16x16xf32>
        output %c
    """
    assert kernels_of(text) == (1, 2)


ACROSS = """
    input %x : tensor<16x16xf32>
    input %w : tensor<16x16xf32>
    %a = aten.exp(%x) : tensor<16x16xf32>
    %p = aten.mm(%a, %w) : tensor<16x16xf32>
    %b = aten.add.Tensor(%p, {term}) : tensor<16x16xf32>
    output %b
"""


def test_what_is_wanted_again_after_a_call_is_read_again() -> None:
    """%x and %p are read, %a and %b written; %a, or %x to compute it, is read twice."""
    assert kernels_of(ACROSS.format(term="%p")) == (2, 4)
    assert kernels_of(ACROSS.format(term="%w")) == (2, 5)  # for the first time by a kernel
    assert kernels_of(ACROSS.format(term="%a")) == (2, 5)
    assert kernels_of(ACROSS.format(term="%x")) == (2, 5)


def test_the_smallest_of_what_would_do_is_read_again() -> None:
    text = """
        input %x : tensor<16x16xf32>
        input %w : tensor<16x16xf32>
        %s = aten.sum.dim_IntList(%x, dim = [1], keepdim = true) : tensor<16x1xf32>
        %a = aten.mul.Tensor(%x, %s) : tensor<16x16xf32>
        %p = aten.mm(%a, %w) : tensor<16x16xf32>
        %b = aten.mul.Tensor(%p, %s) : tensor<16x16xf32>
        output %b
    """
    assert kernels_of(text) == (2, 4 + 64 / KIB)


def test_phases_share_no_kernel() -> None:
    text = """
        input %x : tensor<16x16xf32>
        %a = aten.exp(%x) {phase = forward} : tensor<16x16xf32>
        %b = aten.neg(%a) {phase = backward} : tensor<16x16xf32>
        output %b
    """
    assert kernels_of(text) == (2, 4)


SUMS = """
    input %x : tensor<{rows}x1024xf32>
    %s = aten.sum.dim_IntList(%x, dim = [1], keepdim = true) : tensor<{rows}x1xf32>
    %y = aten.mul.Tensor(%x, %s) : tensor<{rows}x1024xf32>
    %t = aten.sum.dim_IntList(%y, dim = [0]) : tensor<1024xf32>
    output %t
"""


def test_no_program_reads_all_rows_for_one_result() -> None:
    assert kernels_of(SUMS.format(rows=1024))[0] == 1
    assert kernels_of(SUMS.format(rows=1025))[0] == 2


def test_softmax_reads_one_row_in_one_kernel() -> None:
    text = """
        input %x : tensor<16x32000xf32>
        %m = aten.amax(%x, dim = [1], keepdim = true) : tensor<16x1xf32>
        %d = aten.sub.Tensor(%x, %m) : tensor<16x32000xf32>
        %e = aten.exp(%d) : tensor<16x32000xf32>
        %s = aten.sum.dim_IntList(%e, dim = [1], keepdim = true) : tensor<16x1xf32>
        %t = aten.sum.dim_IntList(%s, dim = [0, 1]) : tensor<f32>
        output %t
    """
    assert kernels_of(text)[0] == 1
    assert kernels_of(text.replace("16x", "64x"))[0] == 2


LOOKUP = """
    input %x : tensor<2048x1024xf32>
    input %i : tensor<2048xi64>
    %s = aten.sum.dim_IntList(%x, dim = [1], keepdim = true) : tensor<2048x1xf32>
    %y = aten.mul.Tensor(%x, %s) : tensor<2048x1024xf32>
    %d = aten.embedding_dense_backward(%y, %i, padding_idx = -1, scale_grad_by_freq = false) : tensor<{rows}x1024xf32>
    output %d
"""


def test_rows_that_are_added_up_by_index_are_read_once_they_are_there() -> None:
    """The second kernel needs the rows again, beside indices and a table of as many rows."""
    rows, indices = 8192, 16
    assert kernels_of(LOOKUP.format(rows=2048)) == (2, 3 * rows + indices)


def test_lookup_of_few_rows_is_a_call_of_the_library() -> None:
    """It reads what one kernel writes."""
    assert kernels_of(LOOKUP.format(rows=16)) == (1, 8192 + 8192)
