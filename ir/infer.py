"""Result types of ATen ops, as torch itself infers them on tensors without data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch

from shardweave.ir.aten import AtenOp, overload_named
from shardweave.ir.aten_args import CALLEE, arguments
from shardweave.ir.rules.lookup import Signature, signature_of_op
from shardweave.ir.types import AnyTensor, dtype_of_value, shape_of, tensor_type

_inferred: dict[Signature, tuple[AnyTensor, ...] | str] = {}


@lru_cache(maxsize=16384)
def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def infer_types(op: AtenOp) -> tuple[AnyTensor, ...] | str:
    """Types of the tensors that torch returns for this op, or why it refuses the operands.

    Computed once per distinct name, types and arguments. Masked-off results are left out.
    """
    signature = signature_of_op(op)
    found = _inferred.get(signature)
    if found is None:
        found = _run_on_meta(op)
        _inferred[signature] = found
    return found


def _run_on_meta(op: AtenOp) -> tuple[AnyTensor, ...] | str:
    overload = overload_named(CALLEE.get(op.name, op.name))
    try:
        args, kwargs = arguments(op, lambda v: _meta(shape_of(v), dtype_of_value(v)))
        if not op.operands:
            kwargs["device"] = "meta"
        returned: Any = overload(*args, **kwargs)
    except NotImplementedError:
        # No meta kernel: nothing to compare with, so the stated types stand.
        return tuple(tensor_type(shape_of(r), dtype_of_value(r)) for r in op.results)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
        return str(error).strip().splitlines()[0]
    parts = cast("Sequence[Any]", returned if isinstance(returned, (tuple, list)) else (returned,))
    return tuple(tensor_type(p.shape, p.dtype) for p in parts if p is not None)
