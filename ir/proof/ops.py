"""Facts about an op that a proof needs: dtype kinds, signs of sums, random draws, casts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch
from xdsl.dialects import func
from xdsl.ir import Block, Operation, SSAValue

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import describe
from shardweave.ir.dialects.aten import AtenOp, create
from shardweave.ir.dialects.types import dtype_of_value, tensor_type
from shardweave.ir.ops.registry import is_random, spec_of
from shardweave.ir.sharding.rules import Rule, rule_of

FULL = "aten.full"
"""Op of a constant: it equals a shard of any constant of its value, whatever the shape."""


class ProofError(ValueError):
    """Raised if a program is not proved to compute the results of another program."""


def dtype_kind_of(value: SSAValue) -> str:
    """A dtype as proofs compare it: `float` for all floating-point types, else its name."""
    dtype = dtype_of_value(value)
    return "float" if dtype.is_floating_point else str(dtype)


def draws(op: AtenOp) -> bool:
    """True if an op draws random numbers. Attention does if its dropout is not 0."""
    drops = op.signature.parameter("dropout_p")
    return is_random(op) and (drops is None or op.value("dropout_p") != 0)


def is_cast(op: Operation) -> bool:
    """True if an op casts from one floating-point type to another."""
    return (
        spec_of(op).view == "cast"
        and dtype_kind_of(op.operands[0]) == "float"
        and dtype_kind_of(op.results[0]) == "float"
    )


def signs_of(op: Operation) -> tuple[float, float] | None:
    """Coefficients of both terms if an op adds floating-point tensors; None for other ops."""
    sign = spec_of(op).sign
    if sign is None or dtype_kind_of(op.results[0]) != "float" or len(op.operands) != 2:
        return None
    assert isinstance(op, AtenOp)
    return 1.0, float(sign * op.value("alpha"))


def named(op: Operation) -> str:
    """Name an op for messages, with its position if names repeat, and its stage function."""
    block = op.parent_op()
    while block is not None and not isinstance(block, func.FuncOp):
        block = block.parent_op()
    name = "step" if block is None else block.sym_name.data
    said, ops = describe(op), [] if op.parent is None else list(op.parent.ops)
    if sum(describe(other) == said for other in ops) > 1:
        said += f", which is op {ops.index(op) + 1} of {len(ops)},"
    return said if name == "step" else f"{said} in @{name}"


def check_order(op: Operation, made: Mapping[SSAValue, object], in_flight: set[SSAValue]) -> None:
    """Raise ProofError if an op reads a value before it is computed, or while it is in flight.
    in_flight: results of started collectives; the op's own are added if it starts one."""
    missing = [value for value in op.operands if value not in made]
    if missing:
        raise ProofError(
            f"{named(op)} reads %{missing[0].name_hint} before it is computed; move it after the "
            "op that computes it."
        )
    if isinstance(op, dist.StartedOp):
        in_flight.update(op.results)
    if isinstance(op, dist.WaitOp):
        if not in_flight.issuperset(op.operands):
            raise ProofError(f"{named(op)} waits for no started collective; start one before it.")
        return
    early = [value for value in op.operands if value in in_flight]
    if early:
        raise ProofError(
            f"{named(op)} reads %{early[0].name_hint} before its collective has ended; put a "
            "dist.wait before this op."
        )


@cache
def rule_of_sum(
    name: str, first: tuple[int, ...], second: tuple[int, ...]
) -> tuple[Rule, tuple[int, ...]]:
    """Return the factor rule of a sum op whose operands have these shapes, and the sum's shape."""
    shape = np.broadcast_shapes(first, second)
    types = [tensor_type(own, torch.float64) for own in (first, second)]
    block = Block(arg_types=types)
    op = create(name, block.args, [tensor_type(shape, torch.float64)])
    return rule_of(op), shape


def from_start(index: int, size: int) -> int | None:
    """Count a negative index from the start instead of the end; None if it is out of range."""
    return index % size if -size <= index < size else None
