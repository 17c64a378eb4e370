"""Random arguments for any program, so that running it reveals defects.

Biases and the tangent are random too: zeros or ones could hide a defect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from xdsl.ir import Operation, SSAValue

from shardweave.backends.programs import Key, sharding_held
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.dist import DistOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.program import Program, Slot

IGNORED_SHARE = 0.15
"""Fraction of labels that are set to the index to ignore (a negative number), if there is one."""


@dataclass
class _Use:
    """Bounds on the values of an integer argument, from its uses.

    size: indices must be below it. is_flag: it is used as a number, such as a mask of 0 and 1, not
    as an index. ignored: negative number that it is compared with, such as an index to ignore."""

    size: int | None = None
    is_flag: bool = False
    ignored: int | None = None


def sample_values(
    program: Program, *, seed: int = 0, inputs: Mapping[str, Tensor] | None = None
) -> dict[Key, Tensor]:
    """Draw a random global tensor for each argument of a program; returns them by kind and name.

    Matrices are normal, scaled so that products keep their magnitude; vectors and buffers are
    uniform in 0.5 to 1.5. Integers are valid indices for their use, or 0 and 1 if they index
    nothing (masks, whose rows begin with a 1, so that no row is fully masked); some labels are the
    index to ignore. inputs: tensors to use for inputs of these names instead.
    """
    generator = torch.Generator().manual_seed(seed)
    given = inputs or {}
    values: dict[Key, Tensor] = {}
    for slot in program.arguments:
        dtype = dtype_of_value(slot.value)
        if slot.kind == "input" and slot.name in given:
            values[slot.kind, slot.name] = given[slot.name].detach().cpu().to(dtype)
        elif dtype.is_floating_point:
            values[slot.kind, slot.name] = _numbers(slot, program, generator).to(dtype)
        else:
            values[slot.kind, slot.name] = _integers(slot, program, generator).to(dtype)
    return values


def _global_shape(slot: Slot, program: Program) -> tuple[int, ...]:
    return sharding_held(program, slot).global_shape(shape_of(slot.value))


def _numbers(slot: Slot, program: Program, generator: torch.Generator) -> Tensor:
    shape = _global_shape(slot, program)
    if slot.kind == "input":
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    if slot.kind == "buffer" or len(shape) < 2:
        # Running variances, scales of norms and the tangent: near 1, and never 0.
        return 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
    fan_in = math.prod(shape[1:])
    return torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(fan_in)


def _integers(slot: Slot, program: Program, generator: torch.Generator) -> Tensor:
    shape = _global_shape(slot, program)
    use = _use_of(slot.value, program)
    if use.size is None or use.is_flag:
        flags = (torch.rand(shape, generator=generator) < 0.8).long()
        if shape:
            flags[..., 0] = 1
        return flags
    indices = torch.randint(0, max(use.size, 1), shape, generator=generator)
    if use.ignored is not None:
        is_ignored = torch.rand(shape, generator=generator) < IGNORED_SHARE
        if shape:
            is_ignored[..., 0] = False  # a mean over nothing would be no number
        indices = indices.masked_fill(is_ignored, use.ignored)
    return indices


def _use_of(value: SSAValue, program: Program) -> _Use:
    """Return the uses of an integer value and of values computed from it."""
    use, queue, seen = _Use(), [value], set[SSAValue]()
    while queue:
        current = queue.pop()
        if current not in seen:
            seen.add(current)
            for use_of in current.uses:
                queue += _read(use_of.operation, current, use, program)
    return use


def _read(op: Operation, value: SSAValue, use: _Use, program: Program) -> list[SSAValue]:
    """Add to `use` the bounds that `op` puts on its operand; returns results to follow next."""
    if isinstance(op, DistOp):
        return [op.results[op.operands.index(value)]] if op.results else []
    if not isinstance(op, AtenOp):
        return []
    size = _size_looked_up(op, value, program)
    if size is not None:
        use.size = size if use.size is None else min(use.size, size)
    elif spec_of(op).counts and use.size is None:
        use.is_flag = True
    elif op.name in ("aten.ne.Scalar", "aten.eq.Scalar"):
        other = op.value("other")
        use.ignored = int(other) if other < 0 else use.ignored
    elif op.name == "aten._to_copy" and not _is_integer(op.results[0]):
        use.is_flag = True
    else:
        return [result for result in op.results if _is_integer(result)]
    return []


def _is_integer(value: SSAValue) -> bool:
    dtype = dtype_of_value(value)
    return not dtype.is_floating_point and dtype != torch.bool


def _size_looked_up(op: AtenOp, value: SSAValue, program: Program) -> int | None:
    """Size of the dim that an op indexes by `value`; None if it uses `value` for no index."""
    if op.name == "aten.embedding_dense_backward" and value is op.operands[1]:
        return shape_of(op.results[0])[0]
    names = [p.name for p in op.signature.tensors if p.name in ("index", "indices")]
    indices = op.tensor(names[0]) if names else None
    table, dims = op.operands[0], list[int]()
    if isinstance(indices, list):  # one for each of the first dims
        dims = [dim for dim, index in enumerate(indices) if index is value]
    elif indices is value:
        has_dim = op.signature.parameter("dim") is not None
        dims = [op.value("dim") % max(len(shape_of(table)), 1) if has_dim else 0]
    return min((_whole(table, dim, program) for dim in dims), default=None)


def _whole(value: SSAValue, dim: int, program: Program) -> int:
    """Global size of a dim of `value`, if it is an argument; else its local size."""
    for slot in program.arguments:
        if slot.value is value:
            return _global_shape(slot, program)[dim]
    return shape_of(value)[dim]
