"""What kernels of rows compute beside their rows, in Triton's interpreter.

Run by test_triton_interpreter.py, in a process where Triton interprets kernels.
"""

from __future__ import annotations

import pytest
import torch

from shardweave.backends.triton.kernels.generate import generate
from shardweave.backends.triton.launch.launch import run_on_aten
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.passes.pipeline import run_passes
from shardweave.tests.backends import interpreter as _  # noqa: F401
from shardweave.tests.backends.kernel_cases import launch_kernel
from shardweave.tests.ir_text import step

TABLES = """
    input %x : tensor<{rows}x24xf64>
    input %f : tensor<{width}xf64>
    %p = aten.arange.start_step(start = 0) : tensor<{count}xi64>
    %v = aten.view(%p) : tensor<{count}x1xi64>
    %t = aten._to_copy(%v) : tensor<{count}x1xf64>
    %a = aten.mul.Tensor(%t, %f) : tensor<{count}x{width}xf64>
    %c = aten.cos(%a) : tensor<{count}x{width}xf64>
    %s = aten.sin(%a) : tensor<{count}x{width}xf64>
    %q = aten.mul.Tensor(%x, %x) : tensor<{rows}x24xf64>
    %m = aten.sum.dim_IntList(%q, dim = [1], keepdim = true) : tensor<{rows}x1xf64>
    %n = aten.mul.Tensor(%x, %m) : tensor<{rows}x24xf64>
    output %n
    grad c = %c
    grad s = %s
    grad m = %m
"""


@pytest.mark.parametrize(
    ("rows", "count", "width"),
    [(40, 7, 3), (3, 100, 33), (1, 257, 1)],
    ids=["few", "more programs than rows need", "one beyond a block"],
)
def test_tables_are_computed_beside_rows(rows: int, count: int, width: int) -> None:
    text = TABLES.format(rows=rows, count=count, width=width)
    program = run_passes(step(text), "fuse-kernels{matmul=false}")
    (op,) = program.ops
    assert isinstance(op, FusedOp)
    kernel = generate(op)
    assert kernel.region.space.aside == count * width
    assert {str(value.name_hint) for value in kernel.region.aside} == {"c", "s"}
    drawn = {
        "x": torch.randn(rows, 24, dtype=torch.float64),
        "f": torch.randn(width, dtype=torch.float64),
    }
    tensors = [drawn[str(value.name_hint)] for value in op.operands]
    wanted = run_on_aten(op, tensors)
    for config in kernel.configs:
        for one, other in zip(launch_kernel(kernel, config, tensors), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
