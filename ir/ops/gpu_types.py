"""What values have another dtype on a GPU than in a program, which says what the CPU gives."""

from __future__ import annotations

import torch
from xdsl.ir import BlockArgument, OpResult, SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.dialects.types import dtype_of_value
from shardweave.ir.ops.registry import spec_of

HALVES = frozenset({torch.float16, torch.bfloat16})


def dtype_on_gpu(value: SSAValue) -> torch.dtype:
    """The dtype that a value of a program has when it runs on a GPU."""
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
