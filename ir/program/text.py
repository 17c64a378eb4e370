"""Programs as text: printing, parsing, and errors that show the line and column."""

from __future__ import annotations

import gc
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from io import StringIO

from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, ModuleOp
from xdsl.dialects.func import Func, FuncOp, ReturnOp
from xdsl.ir import Operation, SSAValue
from xdsl.utils.exceptions import ParseError, VerifyException

from shardweave.ir.dialects.aten import AtenOp, aten_class, aten_dialect
from shardweave.ir.dialects.dist import dist_dialect
from shardweave.ir.dialects.kernel import kernel_dialect
from shardweave.ir.library.pure_ops import is_custom
from shardweave.ir.ops.aten_args import problem_of_arguments
from shardweave.ir.strings import TextParser, TextPrinter

_WIDTH = 140
"""Most characters of a line in an excerpt; a line with shardings has several hundred."""


@dataclass(frozen=True)
class SourceText:
    """The text of a parsed program. offsets: index in the text at which each op begins."""

    text: str
    name: str
    offsets: Mapping[Operation, int]

    def offset_of(self, place: Operation | SSAValue) -> int | None:
        """Text index at which an op begins or an argument is declared; None if not in this text."""
        owner = place.owner if isinstance(place, SSAValue) else place
        if isinstance(owner, Operation):
            return self.offsets.get(owner)
        assert isinstance(place, SSAValue)
        if place.name_hint is None:
            return None
        match = re.search(rf"%{re.escape(place.name_hint)}\s*:", self.text)
        return None if match is None else match.start()


def position(text: str, offset: int) -> tuple[int, int]:
    """Line and column of an offset, both from 1."""
    before = text[:offset]
    return before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1


def excerpt(text: str, offset: int) -> str:
    """The numbered line at an offset, with a caret below; a long line is cut around the offset."""
    line, column = position(text, offset)
    start = offset - column + 1
    end = text.find("\n", start)
    shown = text[start : len(text) if end < 0 else end].replace("\t", " ")
    at = column - 1
    if len(shown) > _WIDTH:
        cut = max(min(at - _WIDTH // 2, len(shown) - _WIDTH), 0)
        head, tail = "... " if cut else "", " ..." if cut + _WIDTH < len(shown) else ""
        shown = head + shown[cut : cut + _WIDTH] + tail
        at += len(head) - cut
    number = f"{line:5}"
    return f"{number} | {shown}\n{' ' * len(number)} | {' ' * at}^"


_OF_A_STAGE = re.compile(r"(before|forward|backward|inputs|weights|share|after)_\d+")
"""The names of the functions of stages (`ir/program/staged.py`)."""

_UNKNOWN_OP = re.compile(r"Operation (\S+) is not registered")


_NOT_ALL = "Could not parse entire input!"
"""XDSL's message where something else than a module begins."""


class ProgramTextError(ValueError):
    """Raised for a text that is no program: one line says where, what, and what was expected."""


_WITHOUT_A_PLACE = (
    VerifyException,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    NotImplementedError,
    RecursionError,
)
"""Errors without a location, of attributes that verify themselves while they are parsed, and of
xDSL's parser on unforeseen texts. The parser's position is then that of the error."""


@contextmanager
def without_gc() -> Generator[None]:
    """Disable garbage collection while many long-lived objects are created."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def print_module(module: ModuleOp, *, locations: bool = False) -> str:
    """The text of a module. `locations` adds the user's source line to each op."""
    stream = StringIO()
    TextPrinter(stream, print_debuginfo=locations).print_op(module)
    return stream.getvalue() + "\n"


class _OpenContext(Context):
    """A context that knows the custom ops of the process too."""

    def get_optional_op(
        self, name: str, *, dialect_stack: Sequence[str] = ()
    ) -> type[Operation] | None:
        known = super().get_optional_op(name, dialect_stack=dialect_stack)
        return aten_class(name) if known is None and is_custom(name) else known


def make_context() -> Context:
    """The xDSL context with the dialects of a program."""
    context = _OpenContext()
    context.load_dialect(Builtin)
    context.load_dialect(Func)
    context.register_dialect("aten", aten_dialect)
    context.register_dialect("dist", dist_dialect)
    context.register_dialect("kernel", kernel_dialect)
    return context


class _PlacingParser(TextParser):
    """A parser that remembers where each op begins."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(make_context(), text, name)
        self.offsets: dict[Operation, int] = {}

    def parse_operation(self) -> Operation:
        start = self._current_token.span.start
        op = super().parse_operation()
        self.offsets[op] = start
        return op


def parse_module(text: str, name: str = "<text>") -> tuple[ModuleOp, SourceText]:
    """Parse the text of a program. Raises ProgramTextError with line, column and a caret."""
    try:
        parser = _PlacingParser(text, name)
        try:
            with without_gc():
                module = parser.parse_module()
        except _WITHOUT_A_PLACE as error:
            raise _error(text, name, parser.pos, str(error)) from error
    except ParseError as error:
        raise _error(text, name, *_said(error, text)) from error
    _check_form(module, text, name)
    for op, offset in parser.offsets.items():
        problem = problem_of_arguments(op) if isinstance(op, AtenOp) else None
        if problem is not None:
            raise _error(text, name, offset, f"{problem}.")
    return module, SourceText(text, name, parser.offsets)


def _check_form(module: ModuleOp, text: str, name: str) -> None:
    """Raises ProgramTextError unless the module is `step`, then functions of stages."""
    ops = list(module.ops)
    functions = [op for op in ops if isinstance(op, FuncOp)]
    behind = [op for op in functions[1:] if _OF_A_STAGE.fullmatch(op.sym_name.data)]
    if not functions or len(ops) != 1 + len(behind):
        second = text.find("func.func", text.find("func.func") + 1)
        message = "a program is a module with exactly one func.func, and nothing else."
        raise _error(text, name, max(second, 0), message)
    for function in functions:
        blocks = function.body.blocks
        if len(blocks) != 1 or not isinstance(blocks[0].last_op, ReturnOp):
            end = text.rfind("}", 0, max(text.rfind("}"), 0))
            message = "the function must be one block that ends in func.return."
            raise _error(text, name, max(end, 0), message)


def _error(text: str, name: str, offset: int, message: str) -> ProgramTextError:
    line, column = position(text, offset)
    said = " ".join(message.split()) or "not a program"
    error = ProgramTextError(f"{name}:{line}:{column}: {said}")
    error.add_note(excerpt(text, offset))
    return error


def _said(error: ParseError, text: str) -> tuple[int, str]:
    """The offset and message of an error: xDSL's, or for an unknown op one with a suggestion."""
    if not text.strip():
        return 0, "the text is empty; give a program, as `shardweave capture` writes it."
    if error.msg == _NOT_ALL:
        return error.span.start, "a program is one builtin.module, and nothing beside it."
    if error.span.start >= len(text.rstrip()):
        said = f"the text ends before the program does; give all of it ({error.msg})"
        return error.span.start, said
    unknown = _UNKNOWN_OP.fullmatch(error.msg)
    if unknown is None:
        return error.span.start, error.msg
    dialects = (aten_dialect(), dist_dialect())
    names = [op.name for dialect in dialects for op in dialect.operations]
    near = get_close_matches(unknown[1], names, 1, cutoff=0.7)
    meant = f"did you mean '{near[0]}'?" if near else "a step has ops of aten and dist."
    place = text.rfind(unknown[1], 0, error.span.start)
    return max(place, 0), f"there is no op '{unknown[1]}'; {meant}"
