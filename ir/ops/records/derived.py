"""Arguments that follow from an op's types, for records of several families."""

from __future__ import annotations

from typing import Any

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of


def result_shape(op: AtenOp) -> list[int]:
    """The sizes of the first result."""
    return list(shape_of(op.results[0]))


def result_plane(op: AtenOp) -> list[int]:
    """The last two sizes of the first result."""
    return result_shape(op)[-2:]


def result_dtype(op: AtenOp) -> Any:
    """The dtype of the first result."""
    return dtype_of_value(op.results[0])
