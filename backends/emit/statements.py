"""Python statements that call the ops of a program in an emitted module."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from xdsl.ir import Operation, SSAValue

from shardweave.backends.emit.calls import (
    TRANSPOSE,
    function_text,
    ragged_operand,
    returned_by,
    takes_device,
)
from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import ANNOTATIONS, properties_without
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.dialects.literals import to_python
from shardweave.ir.ops.aten_args import arguments
from shardweave.ir.ops.registry import is_positional, spec_of
from shardweave.ir.ops.seen_keys import are_counted
from shardweave.ir.program.program import Slot
from shardweave.ir.program.storage import adds_in_place, reduces_in_place

_HOST = '"cpu"'
"""Device, as source text, on which attention positions are computed."""


class Code(str):
    """Python source text, such as the name of a variable, that is emitted without quotes."""


def key_text(slot: Slot) -> str:
    """Return the kind and name of a slot as the items of a Python tuple: `"grad", "fc.bias"`."""
    return f"{json.dumps(slot.kind)}, {json.dumps(slot.name)}"


def statement(
    op: Operation, names: Mapping[SSAValue, Code], ragged: Collection[SSAValue] = ()
) -> str:
    """Return the statement that calls an op outside any kernel. names: the variable of each value.
    ragged: values whose number of rows is known only at run time. ValueError for an op that has no
    Python form."""
    if isinstance(op, AtenOp):
        return _aten_statement(op, names, ragged)
    if isinstance(op, dist.DistOp):
        return _dist_statement(op, names)
    raise ValueError(
        f"the distributed backend has no Python form for op '{op.name}'; lower it first."
    )


def fused_statement(op: FusedOp, names: Mapping[SSAValue, Code], number: int) -> str:
    """Return the statement that calls `kernels[number]` for a fused region."""
    operands = ", ".join(names[operand] for operand in op.operands)
    comma = "," if len(op.results) == 1 else ""
    return f"{_targets(op, names)}{comma} = kernels[{number}]({operands})"


def _targets(op: Operation, names: Mapping[SSAValue, Code]) -> str:
    return ", ".join(names[result] for result in op.results)


def _call(function: str, positional: list[Any], keywords: Mapping[str, Any]) -> str:
    parts = [_literal(value) for value in positional]
    parts += [f"{name}={_literal(value)}" for name, value in keywords.items()]
    return f"{function}({', '.join(parts)})"


def _literal(value: Any) -> str:
    """Return a value as Python source: `inf`, `torch.float32`, `("tensor",)`."""
    if isinstance(value, Code):
        return value
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(_literal(item) for item in value)}]"
    if isinstance(value, tuple):
        return f"({', '.join(_literal(item) for item in value)}{',' if len(value) == 1 else ''})"
    return repr(value)


def _aten_statement(
    op: AtenOp, names: Mapping[SSAValue, Code], ragged: Collection[SSAValue]
) -> str:
    if adds_in_place(op):
        total, left, right = (names[operand] for operand in op.operands)
        return f"{_targets(op, names)} = rt.added_to({total}, {left}, {right})"
    counted = _counted(op)
    rows = ragged_operand(op, ragged)
    num_rows = None if rows is None else Code(f"rt.rows({names[rows]})")
    call = _aten_call(op, {**names, **counted} if counted else names, num_rows=num_rows)
    return f"{_aten_targets(op, names)} = {call}"


def _aten_call(
    op: AtenOp,
    names: Mapping[SSAValue, Code],
    device: str = "rt.device",
    num_rows: Code | None = None,
) -> str:
    form = "{}.contiguous()" if spec_of(op).needs_contiguous else "{}"
    positional, keywords = arguments(op, lambda value: Code(form.format(names[value])), num_rows)
    if takes_device(op):
        keywords["device"] = Code(device)
    name = function_text(op)
    if op.name == "aten.permute" and op.value("dims") == [1, 0]:
        name, positional = TRANSPOSE, positional[:1]
    return _call(name, positional, keywords)


def _counted(op: AtenOp) -> dict[SSAValue, Code]:
    """Map an attention's positions to source that computes them on the host, without a GPU sync."""
    if not is_positional(op):
        return {}
    positions = (op.tensor("query_positions"), op.tensor("key_positions"))
    return {
        value: _on_host(value)
        for value in positions
        if isinstance(value, SSAValue) and are_counted(value)
    }


def _on_host(value: SSAValue) -> Code:
    op = value.owner
    assert isinstance(op, AtenOp | dist.DistOp), "positions are counted by these"
    names = {operand: _on_host(operand) for operand in op.operands}
    if isinstance(op, AtenOp):
        return Code(_aten_call(op, names, _HOST))
    return Code(_dist_call(op, names, _HOST if isinstance(op, dist.ShardIndexOp) else ""))


def _aten_targets(op: AtenOp, names: Mapping[SSAValue, Code]) -> str:
    returned = returned_by(op)
    if returned is None:
        return _targets(op, names)
    results = iter(op.results)
    targets = ", ".join(names[next(results)] if given else "_" for given in returned)
    return targets + ("," if len(returned) == 1 else "")


def _dist_statement(op: dist.DistOp, names: Mapping[SSAValue, Code]) -> str:
    call = _dist_call(op, names)
    return f"{_targets(op, names)} = {call}" if op.results else call


def _dist_call(op: dist.DistOp, names: Mapping[SSAValue, Code], device: str = "") -> str:
    method = f"rt.{op.name.removeprefix('dist.')}"
    arguments = properties_without(op, *ANNOTATIONS)
    keywords: dict[str, Any] = {name: to_python(value) for name, value in arguments.items()}
    if "axes" in keywords:
        keywords["axes"] = op.axes
    if reduces_in_place(op):
        keywords["in_place"] = True
    if device:
        keywords["device"] = Code(device)
    operands = [names[operand] for operand in op.operands]
    if isinstance(op, dist.CollectiveOp) and op.runs_itself():
        method = "rt.start_collective" if isinstance(op, dist.StartedOp) else "rt.collective"
        return ", ".join(_call(method, [op.kind(), operand], keywords) for operand in operands)
    if isinstance(op, dist.AllReduceOp) and len(operands) > 1:
        return _call(f"{method}_coalesced", [operands], keywords)
    if isinstance(op, dist.OverAxesOp) and op.JOINS_OPERANDS:
        return _call(method, operands, keywords)
    each = [[operand] for operand in operands] if operands else [[]]
    return ", ".join(_call(method, values, keywords) for values in each)
