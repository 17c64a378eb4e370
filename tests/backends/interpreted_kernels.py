"""Every family of kernels in Triton's interpreter; run by test_triton_interpreter.py.

The interpreter is chosen when Triton is imported, so this file runs in a process of its own. It
is slow (tens of microseconds for each op of each program): few examples, big blocks.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.backends.triton.kernels.generate import generate
from shardweave.backends.triton.launch.launch import run_on_aten
from shardweave.tests.backends import interpreter as _  # noqa: F401
from shardweave.tests.backends.kernel_cases import (
    FAMILIES,
    ROWS,
    ROWS_AND_COLUMNS,
    error,
    inputs_of,
    launch_kernel,
    reduction_kernel,
    region,
    run_both,
)

assert os.environ.get("TRITON_INTERPRET") == "1"

SIZES = st.sampled_from((1, 2, 3, 5, 16, 17, 31, 64, 70))
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2}
TEXTS = [
    pytest.param(text, id=f"{family}: {name}")
    for family, texts in FAMILIES.items()
    for name, text in texts.items()
]


@pytest.mark.parametrize("text", TEXTS)
@settings(max_examples=6)
@given(rows=SIZES, columns=SIZES, inner=SIZES, seed=st.integers(0, 99))
def test_kernel_equals_aten_in_float32(
    text: str, rows: int, columns: int, inner: int, seed: int
) -> None:
    if "amax" in text or "softmax" in text or "norm" in text or "sum" in text:
        rows, columns = max(rows, 2), max(columns, 2)  # with one there is nothing to reduce
    assert run_both(text, (rows, columns, inner), torch.float32, seed) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat16"])
@pytest.mark.parametrize("text", TEXTS)
def test_kernel_of_halves_is_near_float32(text: str, dtype: torch.dtype) -> None:
    assert run_both(text, (33, 20, 17), dtype, 0) <= BOUNDS[dtype]


LONG = ROWS | ROWS_AND_COLUMNS


@pytest.mark.parametrize("columns", [3000, 3001])
@pytest.mark.parametrize("text", LONG.values(), ids=LONG.keys())
def test_rows_read_in_parts_give_the_same(text: str, columns: int) -> None:
    op = region(text, 3, columns, 1, torch.float32)
    given_ = inputs_of(op, 0)
    kernel = reduction_kernel(op, whole_row=100)
    assert "n_cols" in kernel.sizes
    assert ("in_place" in kernel.source) == (columns % 4 > 0 and text in ROWS.values())
    found = launch_kernel(kernel, kernel.configs[0] | {"BLOCK_C": 512}, given_)
    assert error(found, run_on_aten(op, given_)) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("text", TEXTS)
def test_every_configuration_gives_the_same(text: str) -> None:
    op = region(text, 37, 19, 23, torch.float32)
    given_ = inputs_of(op, 1)
    kernel = generate(op)
    wanted = run_on_aten(op, given_)
    for config in kernel.configs:
        assert error(launch_kernel(kernel, config, given_), wanted) <= BOUNDS[torch.float32], config


def test_strided_inputs_are_read_where_they_are() -> None:
    text = FAMILIES["pointwise"]["bias, gelu and residual"]
    op = region(text, 6, 10, 1, torch.float32)
    x, b, y = inputs_of(op, 2)
    strided = [x.t().contiguous().t(), b, y.repeat(1, 2)[:, ::2]]
    kernel = generate(op, [t.stride() for t in strided])
    found = launch_kernel(kernel, kernel.configs[0], strided)
    assert error(found, run_on_aten(op, strided)) <= BOUNDS[torch.float32]
