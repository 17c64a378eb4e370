"""Triton's interpreter, mended for tests where no device does what it does.

It cuts off what does not fit when it narrows floats, where devices round to nearest; it takes a
comparison of two scalars for a float when that is spread over a block; it multiplies the bits of bfloat16
matrices as integers; and it has no -1 of unsigned bits. Imported by the files
that run in a process where Triton interprets.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

assert os.environ.get("TRITON_INTERPRET") == "1"

HALVES = {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}

_module: Any = interpreter
_convert = _module._convert_float


def _rounded(data: Any, source: Any, goal: Any, mode: Any) -> Any:
    if source not in (tl.float32, tl.float64) or goal not in HALVES:
        return _convert(data, source, goal, mode)
    wide = torch.from_numpy(np.array(data, ndmin=1))
    bits = wide.to(HALVES[goal]).view(torch.int16).numpy().view(np.uint16)
    return bits.reshape(np.shape(data))


_module._convert_float = _rounded


def _splat(self: Any, type_: Any, scalar: Any) -> Any:
    made = np.full(type_.shape, scalar.data, dtype=np.asarray(scalar.data).dtype)
    return _module.TensorHandle(made, scalar.dtype.scalar)


_module.InterpreterBuilder.create_splat = _splat


def _dot(self: Any, a: Any, b: Any, d: Any, precision: Any, most: Any) -> Any:
    wide = (_wide(factor) for factor in (a, b))
    return _module.TensorHandle(np.matmul(*wide, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def _wide(factor: Any) -> Any:
    """A factor in a type that NumPy knows."""
    if factor.dtype.scalar != tl.bfloat16:
        return factor.data
    return (factor.data.astype(np.uint32) << 16).view(np.float32)


_module.InterpreterBuilder.create_dot = _dot


def _all_ones(self: Any, type_: Any) -> Any:
    bits = np.full(1, -1, dtype=np.int64).astype(_module._get_np_dtype(type_))
    return _module.TensorHandle(bits, type_.scalar)


_module.InterpreterBuilder.get_all_ones_value = _all_ones
