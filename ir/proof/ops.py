"""Facts about an op that count in a proof: kinds of elements, signs, random draws, casts."""

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
"""A constant: equal to a part of any of that value, whatever its shape."""


class ProofError(ValueError):
    """A program that could not be shown to compute what another does."""


def dtype_kind_of(value: SSAValue) -> str:
    """The part of a value's dtype that counts: `float` for any of its kind, else the dtype."""
    dtype = dtype_of_value(value)
    return "float" if dtype.is_floating_point else str(dtype)


def draws(op: AtenOp) -> bool:
    """Whether an op draws numbers of its own; attention does where it drops weights."""
    drops = op.signature.parameter("dropout_p")
    return is_random(op) and (drops is None or op.value("dropout_p") != 0)


def is_cast(op: Operation) -> bool:
    """Whether an op gives the same real numbers in another floating-point type."""
    return (
        spec_of(op).view == "cast"
        and dtype_kind_of(op.operands[0]) == "float"
        and dtype_kind_of(op.results[0]) == "float"
    )


def signs_of(op: Operation) -> tuple[float, float] | None:
    """The coefficients of an op's two terms, if it is a sum of two floating-point tensors."""
    sign = spec_of(op).sign
    if sign is None or dtype_kind_of(op.results[0]) != "float" or len(op.operands) != 2:
        return None
    assert isinstance(op, AtenOp)
    return 1.0, float(sign * op.value("alpha"))


def named(op: Operation) -> str:
    """Name an op for messages: with its position if others have the same name, and with its
    function in a program of stages."""
    block = op.parent_op()
    while block is not None and not isinstance(block, func.FuncOp):
        block = block.parent_op()
    name = "step" if block is None else block.sym_name.data
    said, ops = describe(op), [] if op.parent is None else list(op.parent.ops)
    if sum(describe(other) == said for other in ops) > 1:
        said += f", which is op {ops.index(op) + 1} of {len(ops)},"
    return said if name == "step" else f"{said} in @{name}"


def check_order(op: Operation, made: Mapping[SSAValue, object], in_flight: set[SSAValue]) -> None:
    """Raises ProofError for an op that reads what is not made, or has not arrived.

    in_flight: what was started before; the op's own results join it.
    """
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
            raise ProofError(f"{named(op)} waits for what was not started; start it.")
        return
    early = [value for value in op.operands if value in in_flight]
    if early:
        raise ProofError(
            f"{named(op)} reads %{early[0].name_hint} while it is in flight; put a dist.wait "
            "before it."
        )


@cache
def rule_of_sum(
    name: str, first: tuple[int, ...], second: tuple[int, ...]
) -> tuple[Rule, tuple[int, ...]]:
    """The rule of a sum of values of these shapes, and the shape of the sum."""
    shape = np.broadcast_shapes(first, second)
    types = [tensor_type(own, torch.float64) for own in (first, second)]
    block = Block(arg_types=types)
    op = create(name, block.args, [tensor_type(shape, torch.float64)])
    return rule_of(op), shape


def from_start(index: int, size: int) -> int | None:
    """An index below `size`, counted from the end if it is negative; None if it is out of range."""
    return index % size if -size <= index < size else None
