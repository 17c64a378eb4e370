"""Programs as text: printing, parsing, and errors that point at the place."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from io import StringIO

from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.utils.exceptions import ParseError, VerifyException

from shardweave.ir.context import make_context


class ProgramTextError(ValueError):
    """A text that is not a program. The message has one line: where, what, what was expected."""


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
    Printer(stream=stream, print_debuginfo=locations).print_op(module)
    return stream.getvalue() + "\n"


def parse_module(text: str, name: str = "<text>") -> ModuleOp:
    """Parse the text of a module. Raises ProgramTextError with line and column."""
    try:
        with without_gc():
            return Parser(make_context(), text, name).parse_module()
    except ParseError as error:
        where = _position(text, error.span.start)
        raise ProgramTextError(f"{name}:{where}: {_one_line(error.msg)}") from error
    except (VerifyException, ValueError, KeyError, AssertionError) as error:
        # Attributes check themselves while they are parsed; their errors carry no place.
        raise ProgramTextError(f"{name}: {_one_line(str(error))}") from error


def _position(text: str, offset: int) -> str:
    before = text[:offset]
    return f"{before.count(chr(10)) + 1}:{offset - (before.rfind(chr(10)) + 1) + 1}"


def _one_line(message: str) -> str:
    return " ".join(message.split()) or "not a program"
