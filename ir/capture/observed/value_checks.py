# pyright: basic
# torch's tracing API is private and only partly typed.
"""Leave checks of values that only raise out of a trace.

`assert (ids < n).all()` and `if mask.sum() == 0: raise ValueError(..)` compute nothing: a program
has the code after them only. If forward catches the exception, the check decides which code runs:
it stays a data-dependent branch, which torch cannot trace.
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from shardweave.ir.capture.observed.constant_numbers import READ
from shardweave.ir.capture.site import TORCH
from shardweave.ir.torch_private import (
    InstructionTranslator,
    LazyVariableTracker,
    SymNodeVariable,
    TensorVariable,
)

Jump = Callable[[Any, Any], None]
"""Dynamo's function for a jump: (translator, with the frame's instructions; the jump) -> None."""

_JUMPS = [
    code
    for name, code in dis.opmap.items()
    if name.startswith("POP_JUMP") and name.endswith(("IF_TRUE", "IF_FALSE"))
]


@contextlib.contextmanager
def without_value_checks() -> Iterator[None]:
    """Let dynamo trace past checks of tensor values as if each passed, while in the context."""
    translators = {InstructionTranslator}
    for translator in list(translators):
        translators |= _subclasses(translator)
    with contextlib.ExitStack() as stack:
        for translator in translators:
            table: list[Any] = list(translator.dispatch_table)
            for code in _JUMPS:
                table[code] = _passing(table[code])
            stack.enter_context(mock.patch.object(translator, "dispatch_table", table))
        yield


def _subclasses(kind: type) -> set[Any]:
    return {kind, *(below for each in kind.__subclasses__() for below in _subclasses(each))}


def _passing(jump: Jump) -> Jump:
    """Wrap a jump: if one side of a data-dependent branch only raises, take the other side."""

    def passing_jump(frame: Any, jumping: Any) -> None:
        if _is_of_data(frame.stack[-1]):
            raises_here = _only_raises(frame, frame.instruction_pointer)
            raises_there = _only_raises(frame, frame.indexof[jumping.target])
            if raises_here != raises_there:
                frame.pop()
                if raises_here:
                    frame.jump(jumping)
                return
        jump(frame, jumping)

    return passing_jump


def _is_of_data(value: Any) -> bool:
    """True if a value depends on the data: a tensor, or a number read out of one."""
    if isinstance(value, LazyVariableTracker):
        value = value.realize()
    if isinstance(value, SymNodeVariable):
        return bool(free_unbacked_symbols(value.sym_num))
    return isinstance(value, TensorVariable)


def _only_raises(frame: Any, first: int) -> bool:
    """True if instructions from index `first` only raise an exception that nothing catches."""
    for instruction in frame.instructions[first:]:
        if instruction.opname == "RAISE_VARARGS":
            return not _is_caught(frame, instruction)
        if instruction.target is not None or instruction.opname.startswith(("RETURN", "YIELD")):
            return False
    return False


def _is_caught(frame: Any, instruction: Any) -> bool:
    """True if an `except` of the user encloses an instruction, in its frame or a caller's."""
    while frame is not None:
        # What torch's own code catches, around hooks, it raises again.
        is_users = not frame.f_code.co_filename.startswith(TORCH)
        if is_users and _has_except(frame, instruction):
            return True
        frame = frame.parent
        instruction = frame and frame.current_instruction
    return False


def _has_except(frame: Any, instruction: Any) -> bool:
    """True if an `except` of a frame encloses an instruction. `finally`, `with` and the clean-up
    code of a handler do not count, since they raise the error again."""
    while instruction.exn_tab_entry is not None:
        first = frame.indexof[instruction.exn_tab_entry.target]
        handler = frame.instructions[first:]
        is_handler = handler[0].opname == "PUSH_EXC_INFO"
        ends = _ENDS if is_handler else ("RERAISE",)
        instruction = next(each for each in handler if each.opname in ends)
        if instruction.opname != "RERAISE":
            return True
    return False


_ENDS = ("RERAISE", "CHECK_EXC_MATCH", "CHECK_EG_MATCH", "POP_EXCEPT")


def drop_unread_numbers(graph: torch.fx.Graph) -> None:
    """Remove Python numbers that a graph reads out of tensors only for checks, torch's own
    assertions on their range, and constants that tracing alone read."""
    for node in reversed(graph.nodes):
        example = node.meta.get("example_value")
        is_number = isinstance(example, torch.SymInt | torch.SymFloat | torch.SymBool)
        is_range = node.target is torch.ops.aten._assert_scalar.default
        is_unread = (is_number or is_range) and node.op.startswith("call")
        if (is_unread or READ in node.meta) and not node.users:
            graph.erase_node(node)
            if node.op == "get_attr" and not graph.find_nodes(op="get_attr", target=node.target):
                delattr(graph.owning_module, str(node.target))
