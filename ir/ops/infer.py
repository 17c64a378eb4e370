"""Result types of ATen ops, as torch itself infers them on tensors without data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch

from shardweave.ir.dialects.aten import AtenOp, OpKey, key_of_op
from shardweave.ir.dialects.types import AnyTensor, dtype_of_value, shape_of, tensor_type
from shardweave.ir.ops.aten_args import arguments, overload_of
from shardweave.ir.torch_private import (
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    correct_attention_types,
    silent_logs,
)

correct_attention_types()

_inferred: dict[OpKey, tuple[AnyTensor, ...] | str] = {}


@lru_cache(maxsize=1)
def _fake_mode() -> FakeTensorMode:
    """Make the mode when it is first needed, as it imports all of torch's compiler."""
    return FakeTensorMode()


_REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError,
             AttributeError)  # fmt: skip
"""Errors that torch raises for operands that do not fit, op by op."""


@lru_cache(maxsize=16384)
def _fake(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    with _fake_mode():
        return torch.empty(shape, dtype=dtype)


def infer_types(op: AtenOp) -> tuple[AnyTensor, ...] | str:
    """The result types that torch infers for an op, or torch's reason to refuse the operands.

    Computed once for each distinct name, operand types and arguments. Results that `output_mask`
    excludes are left out.
    """
    signature = key_of_op(op)
    types = _inferred.get(signature)
    if types is None:
        types = _inferred[signature] = _run_on_fake(op)
    return types


def _run_on_fake(op: AtenOp) -> tuple[AnyTensor, ...] | str:
    """Run an op on fake CPU tensors, as capture does; returns its types or torch's refusal."""
    overload = overload_of(op)
    try:
        args, kwargs = arguments(op, lambda v: _fake(shape_of(v), dtype_of_value(v)))
        with _fake_mode(), silent_logs():
            return _types_of(overload(*args, **kwargs))
    except (NotImplementedError, UnsupportedOperatorException):
        # No meta kernel: nothing to compare with, so the stated types stand.
        return tuple(tensor_type(shape_of(r), dtype_of_value(r)) for r in op.results)
    except DynamicOutputShapeException:
        return "the shape of its result depends on the data"
    except _REFUSALS as error:
        return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _types_of(returned: Any) -> tuple[AnyTensor, ...]:
    parts = cast("Sequence[Any]", returned if isinstance(returned, (tuple, list)) else (returned,))
    return tuple(tensor_type(p.shape, p.dtype) for p in parts if p is not None)
