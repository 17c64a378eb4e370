"""Gradients of lookups, added up by index and to tables, in Triton's interpreter.

Run by test_triton_interpreter.py, in a process where Triton interprets kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shardweave.backends.triton.kernels.generate import generate
from shardweave.backends.triton.launch import launch as launching
from shardweave.backends.triton.launch.launch import (
    FusedCall,
    Start,
    join_parts,
    run_on_aten,
)
from shardweave.backends.triton.source.joining import PartialResult
from shardweave.backends.triton.source.parts import PartsQueue, Place, is_sum_in_memory
from shardweave.backends.triton.source.source import Config, KernelSource
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.passes.pipeline import run_passes
from shardweave.tests.backends import interpreter as _  # noqa: F401
from shardweave.tests.backends.kernel_cases import launch_kernel
from shardweave.tests.backends.test_triton_launch import fused
from shardweave.tests.ir_text import step

GRADIENT = """
    input %g : tensor<{shape}x{width}xf64>
    input %p : tensor<{shape}xi64>
    input %t : tensor<{rows}x{width}xf64>
    %s = aten.add.Scalar(%p, other = 1) : tensor<{shape}xi64>
    %n = aten.neg(%g) : tensor<{shape}x{width}xf64>
    %d = aten.embedding_dense_backward(%n, %s, padding_idx = {padding}, scale_grad_by_freq = false) : tensor<{rows}x{width}xf64>
    %a = aten.add.Tensor({operands}) : tensor<{rows}x{width}xf64>
    output %a
"""
SHAPES = [("6", 5, 4), ("2x7", 3, 1), ("1", 9, 5), ("3x4x5", 17, 33), ("40", 1, 3), ("70", 200, 20)]


def region(shape: str, rows: int, width: int, padding: int = -1, operands: str = "%t, %d") -> str:
    return GRADIENT.format(shape=shape, rows=rows, width=width, padding=padding, operands=operands)


def drawn(shape: str, rows: int, width: int) -> dict[str, Tensor]:
    """A gradient, indices less 1 and a table, by their names."""
    sizes = tuple(map(int, shape.split("x")))
    torch.manual_seed(rows)
    return {
        "g": torch.randn(*sizes, width, dtype=torch.float64),
        "p": torch.randint(rows, sizes) - 1,
        "t": torch.randn(rows, width, dtype=torch.float64),
    }


def operands_of(op: FusedOp, tensors: dict[str, Tensor]) -> list[Tensor]:
    return [tensors[str(value.name_hint)].clone() for value in op.operands]


def launched(op: FusedOp, tensors: dict[str, Tensor]) -> Tensor:
    """What the kernel gives, in blocks smaller than what it is given."""
    kernel = generate(op)
    config = {**kernel.configs[0], "BLOCK_I": 16, "BLOCK_K": 4}
    (found,) = launch_kernel(kernel, config, operands_of(op, tensors))
    return found


def assert_equal(op: FusedOp, tensors: dict[str, Tensor]) -> None:
    (wanted,) = run_on_aten(op, operands_of(op, tensors))
    torch.testing.assert_close(
        launched(op, tensors), wanted, rtol=1e-12, atol=1e-12, equal_nan=True
    )


@pytest.mark.parametrize(("shape", "rows", "width"), SHAPES)
@pytest.mark.parametrize("operands", ["%t, %d", "%d, %t"])
def test_rows_are_added_up_by_index_and_to_a_table(
    shape: str, rows: int, width: int, operands: str
) -> None:
    op = fused(region(shape, rows, width, operands=operands))
    tensors = drawn(shape, rows, width)
    gradient = tensors["g"].view(-1)
    gradient[0], gradient[-1] = float("inf"), float("nan")
    assert_equal(op, tensors)


@pytest.mark.parametrize(("shape", "rows", "width"), [("6", 7, 4), ("1", 9, 5), ("3x4x5", 64, 33)])
def test_rows_that_no_index_names_are_zero_where_there_is_no_table(
    shape: str, rows: int, width: int
) -> None:
    text = region(shape, rows, width, padding=3).replace("output %a", "output %d")
    op = fused("\n".join(line for line in text.splitlines() if "%a = " not in line))
    assert op.fused_ops[-1].name == "aten.embedding_dense_backward"
    tensors = drawn(shape, rows, width)
    tensors["g"].view(-1)[0] = float("nan")
    assert_equal(op, tensors)


def test_results_in_parts_are_joined_by_programs_behind_those_of_a_lookup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []
    start = launching.starter

    def counted(source: KernelSource, config: Config, grid: tuple[int, ...]) -> Start:
        run = start(source, config, grid)
        return lambda *pointers: [started.append(source.name), run(*pointers)]

    monkeypatch.setattr(launching, "starter", counted)
    queue = PartsQueue(lambda parts, places: pytest.fail("nothing is left to join"))
    columns = fused("""
        input %x : tensor<130x150xbf16>
        %n = aten.neg(%x) : tensor<130x150xbf16>
        %s = aten.sum.dim_IntList(%n, dim = [0]) : tensor<150xbf16>
        output %s
    """)
    lookup = fused(region("2x7", 3, 5))
    tensors = drawn("2x7", 3, 5)
    (wanted,) = run_on_aten(lookup, operands_of(lookup, tensors))
    call, sums = (FusedCall(op, queue=queue) for op in (lookup, columns))
    first = torch.randn(130, 150).bfloat16()
    for x in (first, 2 * first):
        (summed,) = sums(x)
        (found,) = call(*operands_of(lookup, tensors))
        queue.join()
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(summed, (-x).float().sum(0).bfloat16())
    call(*operands_of(lookup, tensors))  # where nothing waits it runs by itself
    both = "lookups_add_neg_embedding_dense_backward_and_finish"
    assert started == ["columns_neg_sum", both] * 2 + [both.removesuffix("_and_finish")]


def test_padding_and_indices_out_of_range_add_nothing() -> None:
    op = fused(region("8", 5, 4, padding=3))
    tensors = drawn("8", 5, 4)
    tensors["p"] = torch.tensor([0, 2, 2, 1, 0, 3, 2, -1])
    assert_equal(op, tensors)
    tensors["p"] = torch.tensor([0, 1, 9, 1, 0, 3, -7, -1])
    found = launched(op, tensors)
    tensors["g"][[2, 6]] = 0
    tensors["p"][[2, 6]] = 0
    torch.testing.assert_close(found, run_on_aten(op, operands_of(op, tensors))[0])


TIED = """
    input %g : tensor<6x4xf64>
    input %p : tensor<6xi64>
    input %x : tensor<5x3xf64>
    input %y : tensor<3x4xf64>
    input %u : tensor<5x4xf64>
    %t = aten.mm(%x, %y) : tensor<5x4xf64>
    %d = aten.embedding_dense_backward(%g, %p, padding_idx = -1, scale_grad_by_freq = false) : tensor<5x4xf64>
    %a = aten.add.Tensor(%t, %d) : tensor<5x4xf64>
    output %a
    grad u = %u
"""


def test_table_that_nobody_else_reads_is_changed_in_place() -> None:
    program = run_passes(step(TIED), "fuse-kernels{matmul=false}")
    (op,) = (o for o in program.ops if isinstance(o, FusedOp))
    tensors = drawn("6", 5, 4)
    tensors["p"] += 1
    (wanted,) = run_on_aten(op, operands_of(op, tensors))
    given = operands_of(op, tensors)
    (found,) = FusedCall(op)(*given)
    assert found.data_ptr() in [tensor.data_ptr() for tensor in given]
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("old", "new"),
    [("output %a", "output %a\n    grad t = %t"), ("(%t, %d)", "(%u, %d)")],
    ids=["read again", "given"],
)
def test_table_that_is_wanted_elsewhere_is_not_changed(old: str, new: str) -> None:
    program = run_passes(step(TIED.replace(old, new)), "fuse-kernels{matmul=false}")
    (op,) = (o for o in program.ops if isinstance(o, FusedOp))
    assert generate(op).overwrites is None


def test_gradient_of_a_table_of_positions_is_the_sum_over_the_batch() -> None:
    program = run_passes(step("""
        input %g : tensor<3x6x16xbf16>
        %p = aten.arange.start_step(start = 0) : tensor<6xi64>
        %s = aten.sum.dim_IntList(%g, dim = [0], keepdim = true) : tensor<1x6x16xbf16>
        %v = aten.view(%s) : tensor<6x16xbf16>
        %d = aten.embedding_dense_backward(%v, %p, padding_idx = -1, scale_grad_by_freq = false) : tensor<6x16xbf16>
        output %d
    """), "fuse-kernels{matmul=false}")  # fmt: skip
    (op,) = program.ops
    assert isinstance(op, FusedOp)
    assert is_sum_in_memory(op)
    joined: list[PartialResult] = []

    def join(parts: Sequence[PartialResult], places: Sequence[Place]) -> None:
        joined.extend(parts)
        join_parts(parts, places)

    queue = PartsQueue(join)
    g = torch.randn(3, 6, 16).bfloat16()
    (found,) = FusedCall(op, queue=queue)(g)
    queue.join()
    assert [parts.shape for parts in joined] == [(3, 96)]
    torch.testing.assert_close(found, g.float().sum(0).bfloat16())
