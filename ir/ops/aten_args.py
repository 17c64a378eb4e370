"""The arguments of an ATen call, rebuilt from an op.

An argument that only restates a shape is not stored in the IR: it follows from the type of a
result (or of an operand). So an op whose types are changed to local or half-batch shapes
still makes the right call, and no size literal can go stale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardweave.ir.dialects.aten import NOT_STORED, AtenOp, overload_named
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.torch_private import OpOverload


def overload_of(op: AtenOp) -> OpOverload[..., Any]:
    """The torch overload that runs for an op."""
    return overload_named(spec_of(op).runs_as or op.name)


def arguments(op: AtenOp, operand: Callable[[Any], Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of the ATen call that an op stands for.

    operand: what to put for an operand (an SSA value): a tensor to run the op, a variable's
    name to emit it. Keyword arguments at their default are left out.
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
        elif parameter.name in NOT_STORED:
            continue
        else:
            value = op.value(parameter.name)
        if not parameter.keyword_only:
            positional.append(value)
        elif value is not None and not (parameter.has_default and value == parameter.default):
            keywords[parameter.name] = value
    return positional, keywords
