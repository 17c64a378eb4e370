# pyright: basic
# torch's tracing API is private and only partly typed.
"""The texts of exceptions that a model catches, which dynamo does not all have as Python has them.

Dynamo runs the code that raises on symbols, and makes up what Python's own code would raise: the
class is right, the text is not always (`str(KeyError("a"))` is `'a'`, in quotes).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from shardweave.ir.torch_private import UnknownVariable, original_of, replaced


@contextlib.contextmanager
def exact_texts() -> Iterator[None]:
    """Texts of exceptions are those that eager has, or dynamo refuses the line that reads them."""
    raise_, text_of = original_of("raised"), original_of("exception text")

    def raising(owner: Any, value: Any, *rest: Any, **options: Any) -> None:
        instruction = getattr(owner, "current_instruction", None)
        if instruction is not None:  # from torch 2.14 on, the translator raises
            is_raised_by_code = instruction.opname == "RAISE_VARARGS"
        else:
            is_raised_by_code = getattr(value, "python_stack", None) is not None
        if not is_raised_by_code and getattr(value, "exc_type", StopIteration) is not StopIteration:
            value.args[:] = map(_unread, value.args) if value.args else [_unread(None)]
        raise_(owner, value, *rest, **options)

    def exact_text_of(owner: Any, *rest: Any) -> Any:
        value = owner if hasattr(owner, "exc_type") else rest[-1]
        kind = getattr(value, "exc_type", None)
        if kind is not None and kind.__str__ is not BaseException.__str__:
            if value is not owner:
                return None
            value.args[:] = [_unread(None)]  # from torch 2.14 on, the exception makes its text
        return text_of(owner, *rest)

    def formatted(text: str, values: Any, named: Any) -> Any:
        if any(hasattr(value, "exc_type") for value in [*values, *named.values()]):
            UnknownVariable().python_type()  # dynamo refuses the line
        return format_(text, values, named)

    format_ = original_of("formatted text")
    news = {"raised": raising, "exception text": exact_text_of}
    with replaced(news | {"formatted text": staticmethod(formatted)}):
        yield


def _unread(argument: Any) -> Any:
    """Stand for an argument of an exception: an error may show it, and no code can read it."""
    variable = UnknownVariable()
    variable.debug_repr = lambda: "" if argument is None else _shown(argument)
    return variable


def _shown(argument: Any) -> str:
    is_constant = argument.is_python_constant()
    return repr(argument.as_python_constant()) if is_constant else argument.debug_repr()
