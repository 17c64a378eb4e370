"""slice-lookups: tables that are looked up in order are read as they lie."""

from __future__ import annotations

import pytest
import torch

from shardweave.backends.reference import run_reference
from shardweave.passes.pipeline import run_passes
from shardweave.tests.ir_text import assert_lines, lines, step
from shardweave.tests.zoo import assert_equals_eager, captured

PASS = "slice-lookups"
GRADIENT = "aten.embedding_dense_backward("

LOOKUP = """
    param %w : tensor<{rows}x4xf64>
    input %g : tensor<6x4xf64>
    %p = aten.arange.start_step(start = {start}) : tensor<6xi64>
    %q = aten.view(%p) : tensor<2x3xi64>
    %e = aten.embedding(%w, %q) : tensor<2x3x4xf64>
    %n = aten.neg(%e) : tensor<2x3x4xf64>
    %h = aten.neg(%g) : tensor<6x4xf64>
    %d = aten.embedding_dense_backward(%h, %p, padding_idx = {padding}, scale_grad_by_freq = false) : tensor<{rows}x4xf64>
    output %n
    grad w = %d
"""


def text(rows: int, start: int, padding: int = -1) -> str:
    return LOOKUP.format(rows=rows, start=start, padding=padding)


def test_part_of_a_table_is_a_slice_and_its_gradient_is_padded() -> None:
    assert_lines(
        lines(run_passes(step(text(9, 2)), PASS)),
        """
        %0 = aten.slice.Tensor(%w, start = 2) : tensor<6x4xf64>
        %e = aten.view(%0) : tensor<2x3x4xf64>
        %n = aten.neg(%e) : tensor<2x3x4xf64>
        %h = aten.neg(%g) : tensor<6x4xf64>
        %d = aten.slice_backward(%h, dim = 0, start = 2, step = 1) : tensor<9x4xf64>
        """,
    )


def test_whole_table_is_itself_and_so_is_its_gradient() -> None:
    assert_lines(
        lines(run_passes(step(text(6, 0)), PASS)),
        """
        %e = aten.view(%w) : tensor<2x3x4xf64>
        %n = aten.neg(%e) : tensor<2x3x4xf64>
        %h = aten.neg(%g) : tensor<6x4xf64>
        """,
    )


@pytest.mark.parametrize(("rows", "start"), [(6, 0), (9, 2), (9, 3)])
def test_slices_are_what_was_looked_up(rows: int, start: int) -> None:
    program = step(text(rows, start))
    given = {
        ("param", "w"): torch.randn(rows, 4, dtype=torch.float64),
        ("input", "g"): torch.randn(6, 4, dtype=torch.float64),
    }
    found, wanted = (run_reference(p, given) for p in (run_passes(program, PASS), program))
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("start = 2)", "start = 2, step = 2)"),
        ("tensor<9x4xf64>", "tensor<7x4xf64>"),
        ("%p = aten.arange.start_step(start = 2)", "%o = aten.full(fill_value = 1)"),
        ("output %n", "output %e"),
    ],
    ids=["other places", "beyond the table", "no range", "returned"],
)
def test_other_lookups_stay(old: str, new: str) -> None:
    given = text(9, 2).replace(old, new).replace("%o = ", "%p = ")
    assert given != text(9, 2)
    found = "\n".join(lines(run_passes(step(given), PASS)))
    assert "aten.embedding(" in found


def test_gradient_with_a_padding_among_its_rows_stays() -> None:
    assert any(GRADIENT in line for line in lines(run_passes(step(text(9, 2, 4)), PASS)))
    assert not any(GRADIENT in line for line in lines(run_passes(step(text(9, 2, 1)), PASS)))


def test_gradient_of_a_whole_table_that_is_read_twice_has_memory_of_its_own() -> None:
    given = text(6, 0).replace("grad w = %d", "grad w = %d\n    grad h = %h")
    assert any(GRADIENT in line for line in lines(run_passes(step(given), PASS)))


def test_step_with_positions_equals_eager() -> None:
    case = captured("gpt:layers=1,hidden=16,heads=4,vocab=32,seq=8,batch=2")
    program = run_passes(case.program, PASS)
    count = sum(GRADIENT in line for line in lines(case.program))
    assert sum(GRADIENT in line for line in lines(program)) == count - 1
    assert_equals_eager(program, case)
