"""Programs as text: printing, parsing, and errors that point at the place."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from io import StringIO

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.utils.exceptions import ParseError, VerifyException

from shardweave.ir.context import make_context
from shardweave.ir.strings import TextParser, TextPrinter


class ProgramTextError(ValueError):
    """A text that is not a program. The message has one line: where, what, what was expected."""


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
"""What attributes raise that check themselves while they are parsed, and what xDSL's parser raises
on texts that it did not foresee. The parser has come as far as the place when they do."""


@contextmanager
def without_gc() -> Generator[None]:
    """No garbage collection while many objects that all live are made."""
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


def parse_module(text: str, name: str = "<text>") -> ModuleOp:
    """Parse the text of a program. Raises ProgramTextError with line and column."""
    try:
        parser = TextParser(make_context(), text, name)
        try:
            with without_gc():
                module = parser.parse_module()
        except _WITHOUT_A_PLACE as error:
            raise _error(text, name, parser.pos, str(error)) from error
    except ParseError as error:
        raise _error(text, name, error.span.start, error.msg) from error
    _check_form(module, text, name)
    return module


def _check_form(module: ModuleOp, text: str, name: str) -> None:
    """Raises ProgramTextError unless the module is one function of one block with a return."""
    found = list(module.ops)
    if len(found) != 1 or not isinstance(found[0], FuncOp):
        second = text.find("func.func", text.find("func.func") + 1)
        message = "a program is a module with exactly one func.func, and nothing else."
        raise _error(text, name, max(second, 0), message)
    blocks = found[0].body.blocks
    if len(blocks) != 1 or not isinstance(blocks[0].last_op, ReturnOp):
        end = text.rfind("}", 0, max(text.rfind("}"), 0))
        message = "the function must be one block that ends in func.return."
        raise _error(text, name, max(end, 0), message)


def _error(text: str, name: str, offset: int, message: str) -> ProgramTextError:
    return ProgramTextError(f"{name}:{_position(text, offset)}: {_one_line(message)}")


def _position(text: str, offset: int) -> str:
    before = text[:offset]
    return f"{before.count(chr(10)) + 1}:{offset - (before.rfind(chr(10)) + 1) + 1}"


def _one_line(message: str) -> str:
    return " ".join(message.split()) or "not a program"
