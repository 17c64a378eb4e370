"""Position of a rank, read from its main thread's stack; a step records only its micro-batch."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

import torch.distributed as dist
from xdsl.ir import Operation

from shardweave.backends.emit.emit import ops_by_variable
from shardweave.ir.dialects.annotations import describe
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.dist import DistOp, RecvOp, WaitOp
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import StageFunction
from shardweave.ir.tracing import is_tracing

_PACKAGE = Path(__file__).resolve().parents[2]
_OWN = tuple(f"{_PACKAGE / layer}/" for layer in ("backends", "driver", "ir", "passes", "planners"))
_DISTRIBUTED = f"{Path(dist.__file__).parent}/"
_TORCH = f"{Path(dist.__file__).parent.parent}/"
_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
_WAITING = tuple(
    str(_PACKAGE / "backends" / "distributed" / name)
    for name in ("in_flight.py", "mail.py", "runtime.py")
)
_NOT_OURS = (*_OWN, _TORCH, "<")
"""Prefixes of file names that are not user code; `<` begins names of code without a file."""


class _Emitted(NamedTuple):
    program: Program
    kernels: bool


_emitted: dict[str, _Emitted] = {}
"""Programs of emitted functions, by the file names that tracebacks show for their source."""

_MOST_EMITTED = 64
"""Number of emitted programs remembered, the latest; older ones are mostly unused by now."""


class _Now:
    """The micro-batch of the stage function that the main thread runs; None outside of one."""

    micro_batch: int | None = None


def at_micro_batch(number: int | None) -> None:
    _Now.micro_batch = number


def register(code_name: str, program: Program, *, kernels: bool) -> None:
    """Remember the program that an emitted function runs, by the file name of its code."""
    _emitted.pop(code_name, None)
    _emitted[code_name] = _Emitted(program, kernels)
    if len(_emitted) > _MOST_EMITTED:
        del _emitted[next(iter(_emitted))]


class _Place(NamedTuple):
    """A line of a thread's stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Position:
    """Position of a thread. text: describes it. is_waiting: whether it may wait for other ranks.
    stack: its lines, innermost first; empty while torch traces."""

    text: str
    is_waiting: bool
    stack: Sequence[_Place] = ()


def main_position() -> Position:
    """Return the position of the main thread; while torch traces code, only that it does."""
    if is_tracing() and threading.current_thread() is not threading.main_thread():
        return Position("the capture of a program", is_waiting=False)
    return position_of(_main_frame())


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def position_of(frame: FrameType | None) -> Position:
    """Describe the position of a frame: an op of a step, or a user's line.

    A frame object keeps local variables alive (see `tracing`), so it is released before the slower
    work of describing its position.
    """
    stack: list[_Place] = []
    while frame is not None:
        stack.append(_Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return _position(stack)


def _position(stack: Sequence[_Place]) -> Position:
    """Return the position of a stack, innermost place first."""
    function, is_waiting = "", bool(stack) and stack[0].file.startswith((_DISTRIBUTED, *_WAITING))
    for depth, (name, line, caller) in enumerate(stack):
        if name in _emitted:
            op = _op_at(name, line)
            text = f"{_in_step(op, line)}{_in_stage(_emitted[name].program)}"
            return Position(text, is_waiting if depth else isinstance(op, DistOp), stack)
        if name.startswith(_DISTRIBUTED) and name.endswith(_COLLECTIVES):
            function = caller
        elif not name.startswith(_NOT_OURS):
            break
    return Position(_in_code(stack, function), is_waiting, stack)


def waits_since_marked(*, mark: bool) -> bool:
    """True if the main thread's innermost frame was marked before: it is still in the same wait.

    mark: whether to mark the frame now, by an attribute that only debuggers read.
    """
    frame = _main_frame()
    is_marked = frame is not None and not frame.f_trace_lines
    if frame is not None and mark:
        frame.f_trace_lines = False
    return is_marked


def computing_line(traceback: TracebackType | None) -> str:
    """Return the `file:line` of a step's emitted source that raised an error, if the line calls
    ATen.

    Ranks that have reached the same such line have sent the same messages. Empty for lines that
    send messages, for functions of stages, which differ between ranks, and for other code.
    """
    while traceback is not None:
        name, line = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        if name in _emitted:
            is_whole = not isinstance(_emitted[name].program, StageFunction)
            return f"{name}:{line}" if is_whole and isinstance(_op_at(name, line), AtenOp) else ""
        traceback = traceback.tb_next
    return ""


def _in_step(op: Operation | None, line: int) -> str:
    where = f"line {line} of the step's source"
    if op is None:
        return where
    sender = f", which stage {op.source} sends" if isinstance(op, RecvOp) else ""
    return f"{describe(op)}{sender} ({where})"


def _in_stage(program: Program) -> str:
    """Describe the stage function that runs, and its micro-batch; empty for a whole step."""
    if not isinstance(program, StageFunction):
        return ""
    number = _Now.micro_batch
    which = "" if number is None else f", micro-batch {number}"
    return f" in {program.name} of stage {program.stage}{which}"


def _op_at(name: str, number: int) -> Operation | None:
    """Return the op of a line of emitted source; for a wait, the collective that it waits for."""
    targets = linecache.getline(name, number).strip().partition(" = ")[0].rstrip(",").split(", ")
    op = next((op for op in map(_variables(name).get, targets) if op is not None), None)
    if isinstance(op, WaitOp) and isinstance(op.operands[0].owner, Operation):
        return op.operands[0].owner
    return op


@lru_cache(maxsize=_MOST_EMITTED)
def _variables(name: str) -> dict[str, Operation]:
    program, kernels = _emitted[name]
    return ops_by_variable(program, kernels=kernels)


def _in_code(stack: Sequence[_Place], function: str) -> str:
    """Describe the user's line, and the function of torch.distributed that it calls, if any."""
    called = f"torch.distributed.{function}, called at " if function else ""
    for place in stack:
        if not place.file.startswith(_NOT_OURS):
            return f"{called}{place.file}:{place.line} ({place.function})"
    return called or "an unknown place"
