"""Splitting a step into two programs: forward, and backward from the gradients of outputs.

The forward part returns, beside outputs and buffers, the values that the backward part reads (slots
of kind `kept`). No op runs in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xdsl.dialects import builtin, func
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import (
    phase_of,
    set_layer,
)
from shardweave.ir.dialects.builder import on_some
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.program import INPUT_GRADIENT, TANGENT, Program, Slot
from shardweave.ir.program.staged import is_staged
from shardweave.ir.program.text import without_gc
from shardweave.passes.stages.build import function_of

KEPT = "kept"
"""Kind of the slots of values that the forward part leaves for the backward part."""


@dataclass(frozen=True)
class SplitStep:
    """The two parts of a step."""

    forward: Program
    backward: Program


def split_step(program: Program) -> SplitStep | None:
    """Split a step with gradients into its forward and backward parts; None if that is impossible.

    It is impossible for a program with stages, for one that computes forward products after
    backward products (sub-batches that cross passes), and if an output depends on an argument that
    is a gradient. A message that joins sums of outputs and of gradients becomes two. Values that
    only the backward part reads, such as gathered parameters, are computed there. Takes time linear
    in the ops.
    """
    if is_staged(program) or not any(slot.kind == "grad" for slot in program.results):
        return None
    with without_gc():
        return _split(program)


def _split(program: Program) -> SplitStep | None:
    program = _separated(program)
    late = _late(program)
    if late is None or _crosses(program, late):
        return None
    slots = program.arguments
    arguments = {slot.value: dict(slot.attributes.data) for slot in slots}
    ops = list(program.ops)
    early = [op for op in ops if op not in late]
    behind = [op for op in ops if op in late]
    given_late = [slot for slot in program.results if _is_late(slot)]
    given_early = [slot for slot in program.results if not _is_late(slot)]
    made = {value for op in early for value in op.results}
    read = _read_of(behind, [slot.value for slot in given_late])
    kept = [value for value in read if value in made]
    if any(isinstance(value.owner, dist.StartedOp) for value in kept):
        return None
    entries = {value: _kept_entry(index) for index, value in enumerate(kept)}
    forward = [(slot.value, dict(slot.attributes.data)) for slot in given_early]
    forward += entries.items()
    backward = [(slot.value, dict(slot.attributes.data)) for slot in given_late]
    return SplitStep(
        _part(program, arguments, early, forward),
        _part(program, {**arguments, **entries}, behind, backward),
    )


def gives_gradient(kind: str, name: str) -> bool:
    """True if a result of a step is a gradient, of a parameter or an input."""
    return kind == "grad" or name.startswith(INPUT_GRADIENT)


def _is_late(slot: Slot) -> bool:
    return gives_gradient(slot.kind, slot.name)


def is_tangent(slot: Slot) -> bool:
    """True if an argument of a step is the gradient of one of its outputs."""
    return slot.kind == "tangent" or slot.name.startswith(TANGENT)


def _separated(program: Program) -> Program:
    """A copy of the program in which each message that joins sums of outputs and of gradients is
    split in two."""
    program = program.clone()
    of_tangents = {slot.value for slot in program.arguments if is_tangent(slot)}
    for op in list(program.ops):
        is_late = [operand in of_tangents for operand in op.operands]
        is_message = isinstance(op, dist.DistOp) and op.kind() in ("all_reduce", "wait")
        if is_message and any(is_late) and not all(is_late):
            of_tangents.update(_in_two(op, is_late))
        elif any(is_late):
            of_tangents.update(op.results)
    return program


def _in_two(op: Operation, is_late: Sequence[bool]) -> list[SSAValue]:
    """Split a message into early and late operands; returns the results of the late message."""
    results: list[SSAValue] = list(op.results)
    made: list[SSAValue] = []
    for wanted in (False, True):
        chosen = [index for index, flag in enumerate(is_late) if flag == wanted]
        part = on_some(op, chosen)
        set_layer(part, "")
        Rewriter.insert_op(part, InsertPoint.before(op))
        made = list(part.results)
        for index, result in zip(chosen, made, strict=True):
            results[index] = result
    Rewriter.replace_op(op, [], results)
    return made


def _late(program: Program) -> set[Operation] | None:
    """The ops of the backward part; None if an output depends on a gradient that is an argument."""
    tangents = {slot.value for slot in program.arguments if is_tangent(slot)}
    late: set[Operation] = set()
    for op in program.ops:
        is_of_tangent = not tangents.isdisjoint(op.operands)
        if is_of_tangent:
            tangents.update(op.results)
        owners = (value.owner for value in op.operands)
        if is_of_tangent or phase_of(op) != "forward" or any(owner in late for owner in owners):
            late.add(op)
    stack = [slot.value for slot in program.results if not _is_late(slot)]
    while stack:
        value = stack.pop()
        if value in tangents:
            return None
        op = value.owner
        if isinstance(op, Operation) and op in late:
            late.discard(op)
            stack += op.operands
    return late


def _crosses(program: Program, late: set[Operation]) -> bool:
    """True if products of the forward part come after products of the backward part."""
    is_behind = False
    for op in program.ops:
        if spec_of(op).product is not None:
            if is_behind and op not in late:
                return True
            is_behind = is_behind or (op in late and phase_of(op) == "backward")
    return False


def _kept_entry(index: int) -> dict[str, Attribute]:
    return {"dist.kind": builtin.StringAttr(KEPT), "dist.name": builtin.StringAttr(str(index))}


def _part(
    program: Program,
    arguments: dict[SSAValue, dict[str, Attribute]],
    ops: Sequence[Operation],
    results: Sequence[tuple[SSAValue, dict[str, Attribute]]],
) -> Program:
    """A program of some ops, with the arguments that they and the results read."""
    returned = [value for value, _ in results]
    read = _read_of(ops, returned)
    block = Block()
    local: dict[SSAValue, SSAValue] = {}
    entries: list[dict[str, Attribute]] = []
    made = {value for op in ops for value in op.results}
    for value, entry in arguments.items():
        if value in read and value not in made:
            argument = block.insert_arg(value.type, len(block.args))
            argument.name_hint = value.name_hint
            local[value] = argument
            entries.append(entry)
    for op in ops:
        block.add_op(op.clone(local))  # which adds its results to `local`
    block.add_op(func.ReturnOp(*(local[value] for value in returned)))
    function = function_of("step", block, entries, [entry for _, entry in results])
    module = builtin.ModuleOp([function])
    module.attributes.update(program.module.attributes)
    module.attributes.pop("dist.blocks", None)
    return Program(module)


def _read_of(ops: Iterable[Operation], returned: Iterable[SSAValue]) -> dict[SSAValue, None]:
    read: dict[SSAValue, None] = {}
    for op in ops:
        for inner in op.walk():
            read.update(dict.fromkeys(inner.operands))
    return read | dict.fromkeys(returned)
