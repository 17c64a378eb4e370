"""Calls of ATen ops: torch's overloads, or our functions for ops whose kernels lack support."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from xdsl.ir import SSAValue

from shardweave.backends.emit.attention import flash_attention, flash_attention_backward
from shardweave.backends.emit.grouped import (
    all_rows,
    grouped_mm,
    grouped_outer,
    own_rows,
    row_bounds,
    row_routes,
)
from shardweave.backends.emit.positional_attention import (
    merge_attention,
    positional_attention,
    positional_attention_backward,
)
from shardweave.backends.triton.installed import has_triton
from shardweave.ir.dialects.aten import AtenOp, overload_named
from shardweave.ir.library import philox
from shardweave.ir.library.grouped import (
    ALL_ROWS,
    GROUPED_MM,
    GROUPED_OUTER,
    OWN_ROWS,
    ROW_BOUNDS,
    ROW_ROUTES,
)
from shardweave.ir.library.philox import RANDOM
from shardweave.ir.library.positional_attention import (
    ATTENTION,
    ATTENTION_BACKWARD,
    MERGE_ATTENTION,
)
from shardweave.ir.ops.aten_args import arguments, overload_of
from shardweave.ir.ops.records.attention import FLASH, FLASH_BACKWARD
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.torch_private import schema_of


def random_numbers(
    state: Tensor,
    positions: Sequence[Tensor],
    *,
    draw: int,
    distribution: str = "uniform",
    dtype: torch.dtype,
) -> Tensor:
    """Draw the random numbers at `positions` of a global tensor: see `ir.library.philox`."""
    if state.device.type == "cuda" and has_triton():
        from shardweave.backends.triton.kernels.philox import numbers

        return numbers(state, positions, draw=draw, distribution=distribution, dtype=dtype)
    return philox.numbers_at(state, positions, draw=draw, distribution=distribution, dtype=dtype)


def scaled_mm(left: Tensor, right: Tensor, *scales: Tensor, **options: Any) -> Tensor:
    """Call `torch._scaled_mm` with the left operand's rows and the right's columns dense, for
    GPUs."""
    overload = torch.ops.aten._scaled_mm.default
    return overload(left.contiguous(), right.t().contiguous().t(), *scales, **options)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    FLASH: flash_attention,
    FLASH_BACKWARD: flash_attention_backward,
    RANDOM: random_numbers,
    ATTENTION: positional_attention,
    ATTENTION_BACKWARD: positional_attention_backward,
    MERGE_ATTENTION: merge_attention,
    GROUPED_MM: grouped_mm,
    GROUPED_OUTER: grouped_outer,
    ROW_BOUNDS: row_bounds,
    ROW_ROUTES: row_routes,
    OWN_ROWS: own_rows,
    ALL_ROWS: all_rows,
    "aten._scaled_mm": scaled_mm,
}
"""By op name, our functions that run ops in place of torch's overload."""

TRANSPOSE = "torch.t"
"""Function for `aten.permute` of a matrix: it reads no list of dims, which halves the time."""


CUSTOM = "torch.ops."
"""Prefix of the function name of an op outside ATen."""


def callee_of(op: AtenOp) -> Callable[..., Any]:
    """Return the Python function that computes an op from its arguments."""
    return FUNCTIONS.get(op.name) or overload_of(op)


def function_text(op: AtenOp) -> str:
    """Return the name by which emitted modules call the function of an op. This is a `torch`
    function if it calls the same overload: `torch.ops` takes 1 to 3 us longer, since it parses
    arguments by the schema."""
    function = callee_of(op)
    if op.name in FUNCTIONS:
        return function.__name__
    # An overload prints as `aten.add.Tensor`.
    overload = str(function) if op.name.startswith("aten.") else f"{CUSTOM}{function}"
    return spec_of(op).torch_function or overload


def ragged_operand(op: AtenOp, ragged: Collection[SSAValue]) -> SSAValue | None:
    """Return the operand with as many rows as an op's ragged results; None without such results.
    ragged: the values whose number of rows is known at run time."""
    if not ragged or not op.results or op.results[0] not in ragged:
        return None
    return next((value for value in op.operands if value in ragged), None)


def takes_device(op: AtenOp) -> bool:
    """True if an op needs a device argument, because it has no operand to tell its device."""
    return not op.operands and op.signature.parameter("device") is not None


def returned_by(op: AtenOp) -> list[bool] | None:
    """Return for each value that an op's call returns whether it is a result of the op. None if the
    call returns a single tensor. False for gradients that the op's mask leaves out."""
    returns = schema_of(overload_named(op.name)).returns
    if len(returns) == 1:
        is_list = isinstance(returns[0].type, torch.ListType)
        return [True] * len(op.results) if is_list else None
    has_mask = op.signature.parameter("output_mask") is not None
    return op.value("output_mask") if has_mask else [True] * len(returns)


def prepared(
    op: AtenOp,
    tensor_of: Callable[[SSAValue], Tensor],
    device: torch.device | None = None,
    ragged: Collection[SSAValue] = (),
) -> Callable[[], list[Tensor]]:
    """Return a function that calls an op on its operands' tensors and returns its results."""
    dense = spec_of(op).needs_contiguous
    rows = ragged_operand(op, ragged)
    num_rows = None if rows is None else tensor_of(rows).shape[0]
    args, kwargs = arguments(
        op, lambda v: tensor_of(v).contiguous() if dense else tensor_of(v), num_rows
    )
    if device is not None and takes_device(op):
        kwargs["device"] = device
    function = callee_of(op)

    def call() -> list[Tensor]:
        returned = function(*args, **kwargs)
        parts = returned if isinstance(returned, tuple | list) else (returned,)
        # A gradient that the op's mask leaves out is None, and not a result of the op.
        return [part for part in parts if part is not None]

    return call
