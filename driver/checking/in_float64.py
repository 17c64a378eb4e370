"""Conversion of a program to float64."""

from __future__ import annotations

import torch
from xdsl.dialects.builtin import FunctionType
from xdsl.ir import Attribute
from xdsl.rewriter import Rewriter

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
    for part in (exact, *(functions_of(exact).values() if is_staged(exact) else ())):
        _convert(part)
    return exact


def _convert(program: Program) -> None:
    """Change the dtypes of a program's values, and of dtypes among the arguments of its ops."""
    block = program.function.body.block
    for value in (*block.args, *(result for op in program.ops for result in op.results)):
        exact = _exact(dtype_of_value(value))
        if exact is not None:
            Rewriter.replace_value_with_new_type(value, tensor_type(shape_of(value), exact))
    for op in program.ops:
        op.properties = {name: _property(value) for name, value in op.properties.items()}
    results = list(program.return_op.operand_types)
    program.function.function_type = FunctionType.from_lists(list(block.arg_types), results)


def _property(attribute: Attribute) -> Attribute:
    """Convert a dtype among an op's arguments to float64 or complex128; others stay."""
    exact = _exact(dtype_of(attribute)) if is_element(attribute) else None
    return attribute if exact is None else element_of(exact)


def _exact(dtype: torch.dtype) -> torch.dtype | None:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else None
