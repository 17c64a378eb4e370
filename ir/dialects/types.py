"""Conversions between torch's dtypes and shapes and xDSL's tensor types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch
from xdsl.dialects import builtin
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import BaseAttr

from shardweave.ir.by_identity import ByIdentity

AnyTensor = builtin.TensorType[Attribute]
TENSOR = BaseAttr(builtin.TensorType)
"""The constraint of operands and results that are tensors of any type."""

_ELEMENTS: dict[torch.dtype, Attribute] = {
    torch.float64: builtin.f64,
    torch.float32: builtin.f32,
    torch.float16: builtin.f16,
    torch.bfloat16: builtin.bf16,
    torch.complex128: builtin.ComplexType(builtin.f64),
    torch.complex64: builtin.ComplexType(builtin.f32),
    torch.int64: builtin.i64,
    torch.int32: builtin.i32,
    torch.int16: builtin.i16,
    torch.int8: builtin.i8,
    torch.uint8: builtin.IntegerType(8, builtin.Signedness.UNSIGNED),
    torch.bool: builtin.i1,
    torch.float8_e4m3fn: builtin.Float8E4M3FNType(),
    torch.float8_e5m2: builtin.Float8E5M2Type(),
    torch.float8_e4m3fnuz: builtin.Float8E4M3FNUZType(),
    torch.float8_e5m2fnuz: builtin.Float8E5M2FNUZType(),
    torch.float8_e8m0fnu: builtin.Float8E8M0FNUType(),
}
_DTYPES = {element: dtype for dtype, element in _ELEMENTS.items()}


def dtype_word(dtype: torch.dtype) -> str:
    """The name of a dtype, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def is_float8(dtype: torch.dtype) -> bool:
    """True if a dtype is an 8-bit float: torch promotes none, and their products have scales."""
    return dtype.is_floating_point and dtype.itemsize == 1


def form_of(tensor: torch.Tensor) -> str:
    """Shape and dtype of a tensor: `(4, 8) float32`."""
    return f"{tuple(tensor.shape)} {dtype_word(tensor.dtype)}"


def element_of(dtype: torch.dtype) -> Attribute:
    """The xDSL element type of a torch dtype. ValueError for quantized and similar dtypes."""
    if dtype not in _ELEMENTS:
        known = ", ".join(map(dtype_word, _ELEMENTS))
        raise ValueError(f"dtype {dtype} has no tensor type in the IR; use one of {known}.")
    return _ELEMENTS[dtype]


def dtype_of(element: Attribute) -> torch.dtype:
    """The torch dtype of an xDSL element type."""
    dtype = _DTYPES.get(element)
    if dtype is None:
        raise ValueError(f"element type {element} has no torch dtype.")
    return dtype


def is_element(type_: Attribute) -> bool:
    return type_ in _DTYPES


@lru_cache(maxsize=65536)
def _interned(shape: tuple[int, ...], dtype: torch.dtype) -> AnyTensor:
    return builtin.TensorType(element_of(dtype), shape)


def tensor_type(shape: Sequence[int], dtype: torch.dtype) -> AnyTensor:
    """The (interned) tensor type of a shape and dtype."""
    return _interned(tuple(shape), dtype)


@dataclass(frozen=True)
class _Read:
    """Facts read off a type. number: id shared by equal types. dtype: None if torch has none for
    the elements. problem: the reason why values of a program cannot have the type, or None."""

    shape: tuple[int, ...]
    number: int
    dtype: torch.dtype | None
    problem: str | None


_read = ByIdentity[_Read]()
_numbers: dict[AnyTensor, int] = {}


def _read_type(type_: AnyTensor) -> _Read:
    known = _read.find(id(type_))
    if known is not None:
        return known
    number = _numbers.setdefault(type_, len(_numbers))
    dtype = _DTYPES.get(type_.element_type)
    facts = _Read(type_.get_shape(), number, dtype, _problem_of(type_))
    return _read.keep(id(type_), facts, type_)


def shape_of_type(type_: AnyTensor) -> tuple[int, ...]:
    return _read_type(type_).shape


def dtype_of_type(type_: AnyTensor) -> torch.dtype:
    dtype = _read_type(type_).dtype
    return dtype_of(type_.element_type) if dtype is None else dtype


def number_of_type(value: SSAValue) -> int:
    """An id of a value's type, cheap to hash, that equal types share."""
    return _read_type(tensor_type_of(value)).number


def num_elements(value: SSAValue) -> int:
    return math.prod(shape_of(value))


def tensor_type_of(value: SSAValue) -> AnyTensor:
    """The value's tensor type. All values of a program are tensors; `verify` checks it."""
    return cast(AnyTensor, value.type)


def type_problem(type_: Attribute) -> str | None:
    """Explain why values of a program cannot have this type; None if they can."""
    if not isinstance(type_, builtin.TensorType):
        return f"{type_} is not a tensor type"
    return _read_type(cast(AnyTensor, type_)).problem


def _problem_of(type_: AnyTensor) -> str | None:
    if any(size < 0 for size in type_.get_shape()):
        return f"{type_} has a size that is not fixed; write every size as a number"
    if not is_element(type_.element_type):
        known = ", ".join(str(element) for element in _DTYPES)
        return f"{type_} has elements that torch does not have; use one of {known}"
    return None


def shape_of(value: SSAValue) -> tuple[int, ...]:
    return shape_of_type(tensor_type_of(value))


def dtype_of_value(value: SSAValue) -> torch.dtype:
    return dtype_of_type(tensor_type_of(value))


def with_shape(type_: AnyTensor, shape: Sequence[int]) -> AnyTensor:
    return tensor_type(shape, dtype_of_type(type_))


def num_bytes(type_: AnyTensor) -> int:
    """Bytes of a dense value of this type."""
    return math.prod(shape_of_type(type_)) * dtype_of_type(type_).itemsize
