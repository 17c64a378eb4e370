"""A fused region as the kernel templates see it: inputs, ops, and the values to store."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from xdsl.ir import BlockArgument, Operation, OpResult, SSAValue

from shardweave.backends.triton.source.writer import UnfitError
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.ops.fusible import role_of
from shardweave.ir.ops.records.indexing import LOOKUP_GRADIENT
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.iteration_space import (
    IterationSpace,
    computed_aside,
    space_of,
    sum_of_few_rows,
)
from shardweave.ir.program.storage import copies

HALVES = frozenset({torch.float16, torch.bfloat16})


def dtype_on_gpu(value: SSAValue) -> torch.dtype:
    """Return the dtype that a value of a program has when the program runs on a GPU."""
    dtype = dtype_of_value(value)
    return torch.float32 if dtype in HALVES and _is_statistic(value) else dtype


def _is_statistic(value: SSAValue) -> bool:
    if not isinstance(value, OpResult):
        assert isinstance(value, BlockArgument)
        fused = value.block.parent_op()
        return isinstance(fused, FusedOp) and _is_statistic(fused.operands[value.index])
    if isinstance(value.op, FusedOp):
        return _is_statistic(value.op.yielded[value.index])
    if isinstance(value.op, AtenOp) and spec_of(value.op).may_share:
        return _is_statistic(value.op.operands[0])
    return value.index in spec_of(value.op).float32_on_gpu


@dataclass(frozen=True)
class Output:
    """A result of a region: views of a stored value or of an input.

    stored: index among the stored values; None if it is a view of the input of index `given`.
    """

    stored: int | None
    given: int
    views: tuple[AtenOp, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Apply the views to the tensor of the stored value or input."""
        for op in self.views:
            shape = shape_of(op.results[0])
            if op.name == "aten.permute":
                tensor = tensor.permute(op.value("dims"))
            else:
                tensor = tensor.expand(shape) if op.name == "aten.expand" else tensor.reshape(shape)
        return tensor


@dataclass(frozen=True)
class Region:
    """A `kernel.fused` op, analysed. stored: the values that its kernel writes, as dense tensors.

    on_gpu: whether values have their dtypes on a GPU (`dtype_on_gpu`), or the program's.
    """

    op: FusedOp
    inputs: tuple[SSAValue, ...]
    ops: tuple[AtenOp, ...]
    stored: tuple[SSAValue, ...]
    outputs: tuple[Output, ...]
    space: IterationSpace
    on_gpu: bool

    @cached_property
    def aside(self) -> tuple[SSAValue, ...]:
        """The stored values that do not depend on the rows, in order."""
        values = computed_aside(self.ops, self.stored) if self.space.aside else set[SSAValue]()
        return tuple(value for value in self.stored if value in values)

    def dtype_of(self, value: SSAValue) -> torch.dtype:
        """The dtype that an input or a stored value has in memory."""
        return dtype_on_gpu(value) if self.on_gpu else dtype_of_value(value)


def region_of(op: FusedOp, *, on_gpu: bool = True) -> Region:
    """Analyse a fused op. Raises UnfitError if no kernel template can compute it."""
    for inner in op.fused_ops:
        if role_of(inner) is None:
            raise UnfitError(f"{inner.name} cannot be in a generated kernel")
    inputs = tuple(op.block.args)
    stored: dict[SSAValue, int] = {}
    outputs: list[Output] = []
    is_sum = sum_of_few_rows(op.fused_ops) is not None
    for value in op.yielded:
        views: list[AtenOp] = []
        while isinstance(op_ := value.owner, AtenOp) and not copies(op_):
            # The gradient of a lookup, if it sums few rows, looks up all rows.
            if not (spec_of(op_).is_layout or (is_sum and op_.name == LOOKUP_GRADIENT)):
                break
            views.insert(0, op_)
            value = op_.operands[0]
        if isinstance(value.owner, Operation):
            outputs.append(Output(stored.setdefault(value, len(stored)), 0, tuple(views)))
        else:
            outputs.append(Output(None, inputs.index(value), tuple(views)))
    space = space_of(op.fused_ops, list(stored))
    if isinstance(space, str):
        raise UnfitError(space)
    for value in (*inputs, *stored):
        if dtype_of_value(value).is_complex:
            raise UnfitError("a generated kernel cannot compute complex numbers")
    ops = tuple(op.fused_ops)
    return Region(op, inputs, ops, tuple(stored), tuple(outputs), space, on_gpu)
