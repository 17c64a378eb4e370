"""The arguments of an ATen call, rebuilt from an op.

An argument that only restates a shape is not stored in the IR: it follows from the type of a
result (or of an operand). So an op whose types are changed to local or half-batch shapes
still makes the right call, and no size literal can go stale.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

from xdsl.dialects.builtin import ArrayAttr, FloatAttr, IntegerAttr, NoneAttr, StringAttr
from xdsl.ir import Attribute, TypeAttribute

from shardweave.ir.dialects.aten import NOT_STORED, AtenOp, overload_named
from shardweave.ir.dialects.literals import to_python
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.torch_private import OpOverload


def overload_of(op: AtenOp) -> OpOverload[..., Any]:
    """The torch overload that runs for an op."""
    return overload_named(spec_of(op).runs_as or op.name)


def problem_of_arguments(op: AtenOp) -> str | None:
    """Check the stored arguments of an op against its schema: the problem, or None."""
    derived = spec_of(op).derived
    for parameter in op.signature.parameters:
        name, attribute = parameter.name, op.properties.get(parameter.name)
        if parameter.is_tensor or name in NOT_STORED:
            continue
        if attribute is None and not parameter.has_default and name not in derived:
            return f"{op.name} lacks its argument '{name}'; write {name} = {_words(parameter.type)}"
        if attribute is not None and not _fits(attribute, parameter.type):
            return f"{op.name}: {name} is {_value(attribute)}, expected {_words(parameter.type)}"
    return None


_OPTIONAL = re.compile(r"Optional\[(.*)\]")
_LIST = re.compile(r"List\[(.*)\]")

_KINDS: dict[str, tuple[str, tuple[type[Attribute], ...]]] = {
    "int": ("a whole number", (IntegerAttr,)),
    "SymInt": ("a whole number", (IntegerAttr,)),
    "bool": ("true or false", (IntegerAttr,)),
    "float": ("a number", (IntegerAttr, FloatAttr)),
    "number": ("a number", (IntegerAttr, FloatAttr)),
    "str": ("a text in quotes", (StringAttr,)),
    "ScalarType": ("a dtype, such as f32", (TypeAttribute,)),
}
"""Words for a type and the attributes that hold its values, by torch's name of the type."""


def _fits(attribute: Attribute, kind: str) -> bool:
    optional, items = _OPTIONAL.fullmatch(kind), _LIST.fullmatch(kind)
    if optional is not None:
        return isinstance(attribute, NoneAttr) or _fits(attribute, optional[1])
    if items is not None and isinstance(attribute, ArrayAttr):
        return all(_fits(item, items[1]) for item in cast("ArrayAttr[Attribute]", attribute).data)
    if items is not None:  # torch takes one number for a list of the same
        kind = items[1]
    return kind not in _KINDS or isinstance(attribute, _KINDS[kind][1])


def _value(attribute: Attribute) -> str:
    try:
        return repr(to_python(attribute))
    except ValueError:
        return str(attribute)


def _words(kind: str) -> str:
    optional, items = _OPTIONAL.fullmatch(kind), _LIST.fullmatch(kind)
    if optional is not None:
        return f"{_words(optional[1])}, or none"
    if items is not None:
        return f"a list of values, each {_words(items[1])}"
    return _KINDS[kind][0] if kind in _KINDS else f"a {kind}"


def arguments(
    op: AtenOp, operand: Callable[[Any], Any], num_rows: Any = None
) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of the ATen call that an op stands for.

    operand: replaces an SSA value by a tensor, to run the op, or by a variable's name, to emit it.
    num_rows: the number of rows of ragged results, in place of the number in their types. Keyword
    arguments with their default value are left out.
    """
    derived = spec_of(op).derived
    given = iter(op.structured_operands)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for parameter in op.signature.parameters:
        if parameter.is_tensor:
            value = next(given, None)
            if isinstance(value, list):
                value = [None if item is None else operand(item) for item in value]
            elif value is not None:
                value = operand(value)
        elif parameter.name in derived:
            value = derived[parameter.name](op)
            if num_rows is not None and value == list(shape_of(op.results[0])):
                value = [num_rows, *value[1:]]
        elif parameter.name in NOT_STORED:
            continue
        else:
            value = op.value(parameter.name)
        if not parameter.keyword_only:
            positional.append(value)
        elif value is not None and not (parameter.has_default and value == parameter.default):
            keywords[parameter.name] = value
    return positional, keywords
