"""The arguments of an ATen call, rebuilt from an op.

An argument that only restates a shape is not stored in the IR: it follows from the type of a
result (or of an operand). So an op whose types are changed to local or half-batch shapes
still makes the right call, and no size literal can go stale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, cast

from xdsl.dialects.builtin import ArrayAttr, FloatAttr, IntegerAttr, NoneAttr, StringAttr
from xdsl.ir import Attribute, TypeAttribute

from shardweave.ir.dialects.aten import NOT_STORED, AtenOp
from shardweave.ir.dialects.literals import to_python
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.library.philox import RANDOM

Derivation = Callable[[AtenOp], Any]


def _result_shape(op: AtenOp) -> list[int]:
    return list(shape_of(op.results[0]))


def _result_dtype(op: AtenOp) -> Any:
    return dtype_of_value(op.results[0])


def _num_arange(op: AtenOp) -> Any:
    start, step, length = op.value("start"), op.value("step"), shape_of(op.results[0])[0]
    if isinstance(start, int) and isinstance(step, int):
        return start + step * length
    # Half a step short: a fraction rounded up would give one number more.
    return start + step * (length - 0.5)


def _slice_end(op: AtenOp) -> int:
    """The end of the part, which is the result of a slice and the operand of its backward."""
    part = op.operands[0] if op.name.endswith("backward") else op.results[0]
    length: int = shape_of(part)[int(op.value("dim"))]
    return (op.value("start") or 0) + (length - 1) * op.value("step") + 1


def _normalized_shape(op: AtenOp) -> list[int]:
    """The trailing dims that a layer norm reduces: those of its weight, or where mean has 1s."""
    backward = op.name.endswith("backward")
    shape = shape_of(op.operands[1 if backward else 0])
    weight = op.tensor("weight")
    if weight is not None and not isinstance(weight, list):
        return list(shape_of(weight))
    mean = shape_of(op.operands[2] if backward else op.results[1])
    kept = len(mean)
    while kept and mean[kept - 1] == 1:
        kept -= 1
    return list(shape[kept:])


def _group_norm_input(op: AtenOp) -> tuple[int, ...]:
    return shape_of(op.operands[1 if op.name.endswith("backward") else 0])


def _bias_sizes(op: AtenOp) -> list[int] | None:
    return list(shape_of(op.results[-1])) if op.value("output_mask")[2] else None


_GROUP_NORM: dict[str, Derivation] = {
    "N": lambda op: _group_norm_input(op)[0],
    "C": lambda op: _group_norm_input(op)[1],
    "HxW": lambda op: math.prod(_group_norm_input(op)[2:]),
}

DERIVED: dict[str, dict[str, Derivation]] = {
    "aten.view": {"size": _result_shape},
    "aten.expand": {"size": _result_shape},
    "aten.full": {"size": _result_shape, "dtype": _result_dtype},
    "aten.arange.start_step": {"end": _num_arange, "dtype": _result_dtype},
    "aten._to_copy": {"dtype": _result_dtype},
    "aten.slice.Tensor": {"end": _slice_end},
    "aten.slice_backward": {"input_sizes": _result_shape, "end": _slice_end},
    "aten.select_backward": {"input_sizes": _result_shape},
    "aten.index_select_backward": {"self_sizes": _result_shape},
    "aten.embedding_dense_backward": {"num_weights": lambda op: _result_shape(op)[0]},
    "aten.native_layer_norm": {"normalized_shape": _normalized_shape},
    "aten.native_layer_norm_backward": {"normalized_shape": _normalized_shape},
    "aten.native_group_norm": _GROUP_NORM,
    "aten.native_group_norm_backward": _GROUP_NORM,
    "aten.convolution_backward": {"bias_sizes": _bias_sizes},
    "aten.upsample_nearest2d": {"output_size": lambda op: _result_shape(op)[-2:]},
    "aten.upsample_nearest2d_backward": {
        "output_size": lambda op: list(shape_of(op.operands[0]))[-2:],
        "input_size": _result_shape,
    },
    "aten._adaptive_avg_pool2d": {"output_size": lambda op: _result_shape(op)[-2:]},
    RANDOM: {"dtype": _result_dtype},
}
"""Per op, how each argument that restates a shape follows from the op's types."""

CALLEE = {
    "aten.view": "aten.reshape",
    "aten._conj": "aten._conj_physical",
    "aten._neg_view": "aten.neg",
}
"""Ops that run as another: a view may not exist under the strides of a shard, and messages carry
what is in memory, which is not what a tensor holds that is to be read as conjugated or negated."""


def problem_of_arguments(op: AtenOp) -> str | None:
    """What is wrong with the stored arguments of an op, by its schema; None if nothing is."""
    derived = DERIVED.get(op.name, {})
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
"""By torch's name of a type, the words for it, and the attributes that hold its values."""


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


def arguments(op: AtenOp, operand: Callable[[Any], Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of the ATen call that an op stands for.

    operand: what to put for an operand (an SSA value): a tensor to run the op, a variable's
    name to emit it. Keyword arguments at their default are left out.
    """
    derived = DERIVED.get(op.name, {})
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
        elif parameter.name in NOT_STORED:
            continue
        else:
            value = op.value(parameter.name)
        if not parameter.keyword_only:
            positional.append(value)
        elif value is not None and not (parameter.has_default and value == parameter.default):
            keywords[parameter.name] = value
    return positional, keywords
