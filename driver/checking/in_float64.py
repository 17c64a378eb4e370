"""Conversion of a program to float64."""

from __future__ import annotations

import torch
from xdsl.dialects import func
from xdsl.ir import Attribute, Block, SSAValue

from shardweave.ir.dialects.types import (
    dtype_of,
    dtype_of_value,
    element_of,
    is_element,
    shape_of,
    tensor_type,
)
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import functions_of, is_staged
from shardweave.passes.kernels.unfuse_kernels import without_regions


def in_float64(program: Program) -> Program:
    """The same program in float64 or complex128, fused regions inlined; integers stay. Linear."""
    exact = without_regions(program)
    if exact is program:
        exact = program.clone()
    exact.replace_body(_body_in_float64(exact))
    if is_staged(exact):
        for function in functions_of(exact).values():
            function.replace_body(_body_in_float64(function))
    return exact


def _body_in_float64(program: Program) -> Block:
    arguments = program.function.body.block.args
    block = Block(arg_types=[_type(value) for value in arguments])
    values: dict[SSAValue, SSAValue] = dict(zip(arguments, block.args, strict=True))
    for before, after in values.items():
        after.name_hint = before.name_hint
    for op in program.ops:
        copy = type(op).create(
            operands=[values[value] for value in op.operands],
            result_types=[_type(value) for value in op.results],
            properties={name: _property(value) for name, value in op.properties.items()},
            location=op.location,
        )
        for before, after in zip(op.results, copy.results, strict=True):
            after.name_hint = before.name_hint
            values[before] = after
        block.add_op(copy)
    block.add_op(func.ReturnOp(*(values[value] for value in program.return_op.operands)))
    return block


def _type(value: SSAValue) -> Attribute:
    exact = _exact(dtype_of_value(value))
    return value.type if exact is None else tensor_type(shape_of(value), exact)


def _property(attribute: Attribute) -> Attribute:
    """Convert a dtype among an op's arguments to float64 or complex128; others stay."""
    exact = _exact(dtype_of(attribute)) if is_element(attribute) else None
    return attribute if exact is None else element_of(exact)


def _exact(dtype: torch.dtype) -> torch.dtype | None:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else None
