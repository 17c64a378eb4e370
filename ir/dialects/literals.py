"""Python values as op properties, and how they read in the text of a program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import torch
from xdsl.dialects import builtin
from xdsl.ir import Attribute, TypeAttribute
from xdsl.parser import Parser
from xdsl.printer import Printer

from shardweave.ir.dialects.types import dtype_of, element_of, is_element

Literal = None | bool | int | float | str | torch.dtype | Sequence["Literal"]
"""A value that a property can hold."""


def to_attribute(value: Literal) -> Attribute:
    """The attribute that stores a Python value. Equal values give equal attributes."""
    if isinstance(value, (list, tuple)):
        return builtin.ArrayAttr([to_attribute(item) for item in value])
    sign = math.copysign(1, value) if isinstance(value, float) else 0.0
    return _scalar_attribute(value, type(value), sign)


@lru_cache(maxsize=4096)
def _scalar_attribute(value: Literal, kind: type, sign: float) -> Attribute:
    # `kind` keeps 1, 1.0 and True apart in the cache, and `sign` 0.0 and -0.0.
    del sign
    if value is None:
        return builtin.NoneAttr()
    if isinstance(value, bool):
        return builtin.BoolAttr.from_bool(value)
    if isinstance(value, int):
        return builtin.IntegerAttr(value, builtin.i64)
    if isinstance(value, float):
        return builtin.FloatAttr(value, builtin.f64)
    if isinstance(value, str):
        return builtin.StringAttr(value)
    if isinstance(value, torch.dtype):
        return element_of(value)
    raise ValueError(f"{value!r} is a {kind.__name__}; an op holds numbers, text, dtypes, lists.")


def to_python(attribute: Attribute) -> Literal:
    """Inverse of `to_attribute` (tuples come back as lists)."""
    if isinstance(attribute, builtin.ArrayAttr):
        items = cast("builtin.ArrayAttr[Attribute]", attribute)
        return [to_python(item) for item in items.data]
    if isinstance(attribute, builtin.NoneAttr):
        return None
    if isinstance(attribute, builtin.IntegerAttr):
        number = cast("builtin.IntegerAttr", attribute)
        is_bool = number.type == builtin.i1
        return bool(number.value.data) if is_bool else number.value.data
    if isinstance(attribute, builtin.FloatAttr):
        return cast("builtin.FloatAttr", attribute).value.data
    if isinstance(attribute, builtin.StringAttr):
        return attribute.data
    return dtype_of(attribute)


def print_literal(printer: Printer, attribute: Attribute) -> None:
    """Print a property as a reader of Python and MLIR expects: `[0, 1]`, `1e-05`, `f32`."""
    if isinstance(attribute, builtin.ArrayAttr):
        items = cast("builtin.ArrayAttr[Attribute]", attribute).data
        with printer.in_square_brackets():
            printer.print_list(items, lambda item: print_literal(printer, item))
        return
    if isinstance(attribute, TypeAttribute):
        printer.print_attribute(attribute)
        return
    value = to_python(attribute)
    if isinstance(value, bool):
        printer.print_string("true" if value else "false")
    elif value is None:
        printer.print_string("none")
    elif isinstance(value, str):
        printer.print_string_literal(value)
    else:
        printer.print_string(_number_text(cast("int | float", value)))


def _number_text(value: int | float) -> str:
    text = repr(value)
    if isinstance(value, int) or not math.isfinite(value):
        return text
    # MLIR's lexer wants a point in every float: 1e-05 is written 1.0e-05.
    mantissa, e, exponent = text.partition("e")
    return text if "." in mantissa else f"{mantissa}.0{e}{exponent}"


def parse_literal(parser: Parser) -> Attribute:
    """Parse what `print_literal` prints."""
    items = parser.parse_optional_comma_separated_list(
        parser.Delimiter.SQUARE, lambda: parse_literal(parser)
    )
    if items is not None:
        return builtin.ArrayAttr(items)
    text = parser.parse_optional_str_literal()
    if text is not None:
        return to_attribute(text)
    if parser.parse_optional_keyword("none") is not None:
        return to_attribute(None)
    negative = parser.parse_optional_punctuation("-") is not None
    for word in ("inf", "nan"):
        if parser.parse_optional_keyword(word) is not None:
            return to_attribute(-float(word) if negative else float(word))
    return _parse_number_or_type(parser, negative)


def _parse_number_or_type(parser: Parser, negative: bool) -> Attribute:
    sign = -1 if negative else 1
    integer = parser.parse_optional_integer(allow_boolean=False, allow_negative=False)
    if integer is not None:
        return to_attribute(sign * integer)
    number = parser.parse_optional_float(allow_negative=False)
    if number is not None:
        return to_attribute(sign * number)
    if not negative:
        for word, value in (("true", True), ("false", False)):
            if parser.parse_optional_keyword(word) is not None:
                return to_attribute(value)
        start = parser.pos
        element = parser.parse_optional_type()
        if element is not None:
            if not is_element(element):
                parser.raise_error(f"{element} is not a dtype", start, parser.pos)
            return element
    parser.raise_error("expected a number, string, boolean, dtype, none or a list of them")
