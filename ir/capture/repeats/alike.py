# pyright: basic
"""Compare two modules as Python objects up to renaming: code then does the same with both.

Two modules are alike if their object graphs match: the same classes, attribute names, constants,
code and order of keys; tensors of the same shape, dtype and layout; the same sharing of objects
within each. An object that both share must not lead back into either.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardweave.ir.capture.arguments import CONSTANTS
from shardweave.ir.dialects.types import dtype_word

_CONSTANTS = (
    *CONSTANTS, bytes, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip
_CODE = (type, types.BuiltinFunctionType, types.ModuleType, types.CodeType)
_CONTAINERS = (list, tuple, dict, set, frozenset, partial)
_OF_PYTHON = ("builtins", "collections", "functools")
_HEAP_TYPE = 1 << 9


Parts = Iterator[tuple[Any, Any, str]]
"""Triples: a part of one object, the matching part of the other, and the path of both."""


class Unlike(Exception):
    """Raised if two objects differ; says where and how."""


@dataclass
class Likeness:
    """Maps one module's objects to an equal module's. differing: names of attributes whose
    constants are unequal."""

    partners: dict[int, Any] = field(default_factory=dict)
    differing: set[str] = field(default_factory=set)
    _taken: dict[int, Any] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)
    """Keeps objects alive whose ids are keys of `partners` or `_taken`."""

    def compare(self, left: Any, right: Any, place: str) -> None:
        """Raises Unlike unless `right` equals `left` up to module names. place: the path in
        errors."""
        if isinstance(left, _CONSTANTS) or isinstance(right, _CONSTANTS):
            if not same_constant(left, right):
                raise Unlike(f"{place} differs: {_short(left)} and {_short(right)}")
            return
        if id(left) in self.partners or id(right) in self._taken:
            if self.partners.get(id(left)) is not right or self._taken.get(id(right)) is not left:
                raise Unlike(f"{place} is shared with another attribute in one block only")
            return
        self.partners[id(left)], self._taken[id(right)] = right, left
        self._kept += (left, right)
        if type(left) is not type(right):
            raise Unlike(
                f"{place} is a {type(left).__name__} in one block, a {type(right).__name__} in "
                "another"
            )
        if isinstance(left, _CONTAINERS) and type(left).__module__ not in _OF_PYTHON:
            raise Unlike(f"{place} is a {type(left).__name__}, whose state cannot be compared")
        for value, partner, inner in self._parts(left, right, place):
            self.compare(value, partner, inner)

    def _parts(self, left: Any, right: Any, place: str) -> Parts:
        """Pair the parts of two objects of one class. Raises Unlike if other state differs."""
        if isinstance(left, nn.Module):
            return self._module_parts(left, right, place)
        for kinds, parts in _PARTS:
            if isinstance(left, kinds):
                return parts(left, right, place)
        if is_plain_object(left):
            return _dict_parts(vars(left), vars(right), place)
        if left is not right or isinstance(left, weakref.ReferenceType):
            raise Unlike(f"{place} is a {type(left).__name__}, whose state cannot be compared")
        return iter(())

    def _module_parts(self, left: nn.Module, right: nn.Module, place: str) -> Parts:
        for value, partner, inner in _dict_parts(vars(left), vars(right), place):
            both_constant = isinstance(value, _CONSTANTS) and isinstance(partner, _CONSTANTS)
            if both_constant and not same_constant(value, partner):
                self.differing.add(inner.rpartition(".")[2])
            else:
                yield value, partner, inner


def same_constant(left: Any, right: Any) -> bool:
    """True if two constants have the same type and value."""
    # The text tells 0.0 from -0.0, and nan is itself.
    return type(left) is type(right) and repr(left) == repr(right)


def is_plain_object(value: Any) -> bool:
    """True if all state of an object is in its `__dict__`."""
    classes = type(value).__mro__[:-1]
    is_python = all(
        cls.__flags__ & _HEAP_TYPE and not cls.__dict__.get("__slots__") for cls in classes
    )
    return is_python and hasattr(value, "__dict__")


def _code_parts(left: Any, right: Any, place: str) -> Parts:
    if left is not right:
        raise Unlike(f"{place} has different code in the two blocks")
    return iter(())


def _set_parts(left: Any, right: Any, place: str) -> Parts:
    if left != right or not all(isinstance(item, _CONSTANTS) for item in left):
        raise Unlike(f"{place} is a set with different items in the two blocks")
    return iter(())


def _method_parts(left: Any, right: Any, place: str) -> Parts:
    yield left.__func__, right.__func__, place
    yield left.__self__, right.__self__, place


def _partial_parts(left: Any, right: Any, place: str) -> Parts:
    for name in ("func", "args", "keywords", "__dict__"):
        yield getattr(left, name), getattr(right, name), place


def _dict_parts(left: dict, right: dict, place: str) -> Parts:
    if list(left) != list(right) or not all(isinstance(key, _CONSTANTS) for key in left):
        raise Unlike(f"{place} has different attributes or keys in the two blocks")
    for key, value in left.items():
        yield value, right[key], f"{place}.{key}".lstrip(".")


def _list_parts(left: Any, right: Any, place: str) -> Parts:
    if len(left) != len(right):
        raise Unlike(f"{place} has {len(left)} items in one block and {len(right)} in the other")
    for index, (value, partner) in enumerate(zip(left, right, strict=True)):
        yield value, partner, f"{place}[{index}]"


def _function_parts(left: Any, right: Any, place: str) -> Parts:
    if left.__code__ is not right.__code__ or left.__globals__ is not right.__globals__:
        raise Unlike(f"{place} has different code in the two blocks")
    yield left.__defaults__, right.__defaults__, place
    yield left.__kwdefaults__, right.__kwdefaults__, place
    yield left.__dict__, right.__dict__, place
    cells = (left.__closure__ or (), right.__closure__ or ())
    for cell, partner in zip(*cells, strict=True):
        yield cell.cell_contents, partner.cell_contents, place


def _tensor_parts(left: Tensor, right: Tensor, place: str) -> Parts:
    if tensor_facts(left) != tensor_facts(right):
        raise Unlike(f"{place} is {_words(left)} in one block and {_words(right)} in the other")
    for tensor in (left, right):
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise Unlike(f"{place} has hooks")
    yield _own(left), _own(right), place


def _own(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that code has set on a tensor."""
    given = vars(tensor)
    fakes = ("fake_mode", "fake_device", "constant", "real_tensor", "pytype", "dispatch_keys")
    return {
        name: value
        for name, value in given.items()
        if not (type(tensor).__name__ == "FakeTensor" and (name in fakes or name.startswith("_")))
    }


def tensor_facts(tensor: Tensor) -> tuple[Any, ...]:
    """Return all properties of a tensor that Python code can see, except its values."""
    return (
        type(tensor),
        tensor.shape,
        tensor.stride() if tensor.layout is torch.strided else None,
        tensor.storage_offset() if tensor.layout is torch.strided else None,
        tensor.dtype,
        tensor.device,
        tensor.layout,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
        getattr(tensor, "_is_param", None),
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _words(tensor: Tensor) -> str:
    grad = "" if tensor.requires_grad else " without gradient"
    return f"{dtype_word(tensor.dtype)}{list(tensor.shape)}{grad}"


_PARTS: Any = (
    (Tensor, _tensor_parts),
    (_CODE, _code_parts),
    (types.FunctionType, _function_parts),
    (types.MethodType, _method_parts),
    (partial, _partial_parts),
    ((list, tuple), _list_parts),
    (dict, _dict_parts),
    ((set, frozenset), _set_parts),
)
