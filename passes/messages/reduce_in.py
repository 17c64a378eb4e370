"""reduce-in: sets the dtype in which reductions add the ranks' terms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import Rewriter

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import (
    set_sharding_attrs,
    sharding_attrs_of,
    sharding_attrs_of_value,
)
from shardweave.ir.dialects.aten import create
from shardweave.ir.dialects.builder import Builder
from shardweave.ir.dialects.types import dtype_of_value, shape_of, tensor_type
from shardweave.ir.program.program import Program
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram

REDUCE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _widens(held: torch.dtype, dtype: torch.dtype) -> bool:
    return torch.finfo(dtype).eps < torch.finfo(held).eps


def _is_returned_alone(value: SSAValue, program: Program, gradients: set[SSAValue]) -> bool:
    """True if a value is a gradient, and read by nothing but the return."""
    last = program.return_op
    return value in gradients and all(use.operation is last for use in value.uses)


def _cast_sum(op: dist.DistOp, index: int, dtype: torch.dtype, before: Operation | None) -> None:
    """Sum operand `index` of a collective in `dtype`; cast it back at `before`, or at once."""
    term, total = op.operands[index], op.results[index]
    held = dtype_of_value(total)
    op.operands[index] = _cast_before(op, term, dtype)
    total = _retyped(total, dtype)
    source, shardings = op, sharding_attrs_of(op)
    sharding = shardings and [shardings[index]]
    if before is None and (user := _adder_of(total, held)) is not None:
        (other,) = (i for i, operand in enumerate(user.operands) if operand is not total)
        user.operands[other] = _cast_before(user, user.operands[other], dtype)
        source, sharding, total = user, sharding_attrs_of(user), _retyped(user.results[0], dtype)
    new = Builder.before(before, source) if before else Builder.after(source)
    back = _cast(total, held, new)
    set_sharding_attrs(back, sharding)
    total.replace_uses_with_if(back.results[0], lambda use: use.operation is not back)


def _adder_of(total: SSAValue, held: torch.dtype) -> Operation | None:
    """The only reader of sum `total`, if it adds a tensor of dtype `held` to it; None otherwise."""
    users = [use.operation for use in total.uses]
    if len(users) != 1 or users[0].name != "aten.add.Tensor" or len(users[0].operands) != 2:
        return None
    (user,) = users
    dtypes = {dtype_of_value(x) for x in (*user.operands, *user.results) if x is not total}
    return user if dtypes == {held} else None


def _retyped(value: SSAValue, dtype: torch.dtype) -> SSAValue:
    return Rewriter.replace_value_with_new_type(value, tensor_type(shape_of(value), dtype))


def _cast_before(op: Operation, value: SSAValue, dtype: torch.dtype) -> SSAValue:
    cast = _cast(value, dtype, Builder.before(op))
    set_sharding_attrs(cast, sharding_attrs_of_value(value))
    return cast.results[0]


def _cast(value: SSAValue, dtype: torch.dtype, new: Builder) -> Operation:
    op = create("aten._to_copy", [value], [tensor_type(shape_of(value), dtype)])
    return new.insert(op, value)


@dataclass(frozen=True)
class ReduceInPass(PassOnProgram):
    """Set the dtype in which ranks sum gradients: `float32`, `bfloat16` or `float16`.

    A narrower dtype sends fewer bytes. Only gradients are narrowed; other terms narrower than
    `dtype`, such as the bfloat16 terms of a product that tensor parallelism shards, are summed in
    `dtype` as well. Sums are cast back: a gradient before the return, so that messages can still be
    joined, and a sum to which a bias is added after the addition.

    Requires: a local program, with blocking collectives. Ensures: the program's types; numerics
    except for the rounding of sums. Takes linear time.
    """

    name = "reduce-in"
    dtype: str = "float32"

    def run(self, program: Program) -> None:
        if self.dtype not in REDUCE_DTYPES:
            known = ", ".join(REDUCE_DTYPES)
            raise ValueError(f"{self.name}: dtype '{self.dtype}' is unknown; use one of {known}.")
        dtype, count = REDUCE_DTYPES[self.dtype], 0
        gradients = {slot.value for slot in program.results if slot.kind == "grad"}
        gradients -= {slot.value for slot in program.results if slot.kind != "grad"}
        for op in list(program.ops):
            if not (isinstance(op, dist.AllReduceOp) and op.reduction == "sum"):
                if not isinstance(op, dist.ReduceScatterOp):
                    continue
            for index, term in enumerate(op.operands):
                held = dtype_of_value(term)
                is_gradient = _is_returned_alone(op.results[index], program, gradients)
                is_sent_so = is_gradient or _widens(held, dtype)
                if held != dtype and held.is_floating_point and is_sent_so:
                    _cast_sum(op, index, dtype, program.return_op if is_gradient else None)
                    count += 1
        if not count:
            note(
                f"{self.name} found nothing to do: no gradient is added up over ranks in another "
                f"dtype than {self.dtype}."
            )
