"""Result types of ATen ops, as torch itself infers them on tensors without data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch

from shardweave.ir.dialects.aten import AtenOp, OpKey, key_of_op
from shardweave.ir.dialects.types import AnyTensor, dtype_of_value, shape_of, tensor_type
from shardweave.ir.ops.aten_args import arguments, overload_of
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.torch_private import (
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    correct_attention_types,
    silent_logs,
)

correct_attention_types()

_inferred: dict[OpKey, tuple[AnyTensor, ...] | str] = {}


_HALF = frozenset({torch.float16, torch.bfloat16})


@lru_cache(maxsize=1)
def _fake_mode() -> FakeTensorMode:
    """Made when it is first needed: it imports all of torch's compiler."""
    return FakeTensorMode()


_REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError,
             AttributeError)  # fmt: skip
"""What torch raises for operands that do not fit, op by op."""


@lru_cache(maxsize=16384)
def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@lru_cache(maxsize=16384)
def _fake(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    with _fake_mode():
        return torch.empty(shape, dtype=dtype)


def infer_types(op: AtenOp) -> tuple[AnyTensor, ...] | str:
    """Types of the tensors that torch returns for this op, or why it refuses the operands.

    Computed once per distinct name, types and arguments. Masked-off results are left out.
    """
    signature = key_of_op(op)
    found = _inferred.get(signature)
    if found is None:
        # Where the two kinds differ, the CPU's is what runs (an embedding bag's, whose meta kernel
        # is a GPU's); so what meta tensors say counts only if it is what the op says.
        stated = tuple(result.type for result in op.results)
        on_meta = _run_on_meta(op) if stated else None
        found = on_meta if on_meta is not None and on_meta == stated else _run_on_fake(op)
        _inferred[signature] = found
    return found


def _run_on_meta(op: AtenOp) -> tuple[AnyTensor, ...] | None:
    """As `_run_on_fake`, four times faster; None if only that can say.

    A tensor on the meta device takes the types that GPU kernels give, which are others for half
    precision (float32 statistics of a layer norm). An op without operands would make its result
    on the CPU. Why operands are refused is told by fake tensors in the words of the CPU.
    """
    dtypes = {dtype_of_value(value) for value in (*op.operands, *op.results)}
    is_checked = spec_of(op).is_checked_by_device
    if not op.operands or is_checked or not dtypes.isdisjoint(_HALF):
        return None
    overload = overload_of(op)
    try:
        args, kwargs = arguments(op, lambda v: _meta(shape_of(v), dtype_of_value(v)))
        return _types_of(overload(*args, **kwargs))
    except (NotImplementedError, *_REFUSALS):
        return None


def _run_on_fake(op: AtenOp) -> tuple[AnyTensor, ...] | str:
    """On fake tensors of the CPU, as in capture."""
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
