"""xDSL's lexer, parser and printer (0.74), corrected and made fast for the texts of programs.

Corrected: strings that are never closed, and those beyond ASCII. Fast: a program has few distinct
types and shardings, each of which is read and written once, and the ops of equal layers, whose
lines differ in names alone, are copies of those of the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from io import StringIO
from typing import TypeVar

from xdsl.context import Context
from xdsl.dialects.builtin import LocationAttr, StringAttr, TensorType
from xdsl.ir import Attribute, BuiltinAttribute, Operation, TypeAttribute
from xdsl.parser import Parser, ParserState
from xdsl.printer import Printer
from xdsl.utils.exceptions import ParseError
from xdsl.utils.lexer import Input, Position, Span, Token
from xdsl.utils.mlir_lexer import (
    KIND_BY_PUNCTUATION_SPELLING,
    MLIRLexer,
    MLIRTokenKind,
    StringLiteral,
)

from shardweave.ir.by_identity import ByIdentity

# What most of a program's tokens are; the rest is left to xDSL.
_COMMON_TOKEN = re.compile(
    r"(?:\s|//[^\n]*\n?)*+"
    r"(?:([A-Za-z_][\w$.]*)|(%(?:[0-9]+|[A-Za-z$._-][\w$.-]*))|[:,()}\[\]<>=]|\{(?!-#))",
    re.ASCII,
)
_COMMON_KINDS = (None, MLIRTokenKind.BARE_IDENT, MLIRTokenKind.PERCENT_IDENT)

_TENSOR_TYPE = re.compile(r"tensor<(?:\d+x)*[a-z]+\d+>", re.ASCII)
_SHARDING = re.compile(r'#dist\.sharding<(?:[^<>"\n]|"[^"\n\\]*")*>')
_OP_LINE = re.compile(
    r'(%[\w.$-]+(?:, %[\w.$-]+)*) = ([^\n]*?)( loc\("[^"\n\\]*":\d+:\d+\))?\n'
    r"(?=\s*(?:%|func\.return\b))"
)
"""The line of one op before that of another: the names of its results, the op, its location."""
_VALUE = re.compile(r"%([\w.$-]+)")
_LAYER = re.compile(r'\{layer = "([^"\n\\]*)"')
_PLAIN = re.compile(r"[ !#-\[\]-~]*")
"""Strings without characters that are written as escapes."""


_A = TypeVar("_A", bound=Attribute)


class TextLexer(MLIRLexer):
    """xDSL's lexer with two differences.

    Its pattern for strings takes exponential time where a quote is never closed, so that a typing
    error would hang the parser; possessive quantifiers never go back. And a string with letters
    beyond ASCII is printed in escapes that would come back as bytes: a module named "Größe", a path
    with an accent.
    """

    _unescaped_characters_regex = re.compile(r'"(?:[^"\\\n\v\f]++|\\(?:["nt\\]|[0-9A-Fa-f]{2}))*+"')

    def lex(self) -> Token[MLIRTokenKind]:
        match = _COMMON_TOKEN.match(self.input.content, self.pos)
        if match is None:
            return super().lex()
        self.pos = end = match.end()
        group = match.lastindex
        if group is None:
            return Token(
                KIND_BY_PUNCTUATION_SPELLING[self.input.content[end - 1]],
                Span(end - 1, end, self.input),
            )
        kind = _COMMON_KINDS[group]
        assert kind is not None
        return Token(kind, Span(match.start(group), end, self.input))

    def _lex_string_literal(self, start_pos: Position) -> Token[MLIRTokenKind]:
        try:
            token = super()._lex_string_literal(start_pos)
        except ParseError as error:
            raise ParseError(error.span, "the string is not closed on its line") from None
        if token.kind is MLIRTokenKind.BYTES_LIT and _is_utf8(token.span):
            return Token(MLIRTokenKind.STRING_LIT, token.span)
        return token


class TextParser(Parser):
    """xDSL's parser on a `TextLexer`; equal texts of types and shardings give one attribute."""

    def __init__(self, context: Context, text: str, name: str = "<text>") -> None:
        super().__init__(context, "", name)
        self._parser_state = ParserState(TextLexer(Input(text, name)))
        self._text = text
        self._types: dict[str, TypeAttribute] = {}
        self._shardings: dict[str, Attribute] = {}
        self._ops: dict[str, Operation] = {}
        self._locations: dict[str | None, LocationAttr] = {}

    def parse_optional_type(self) -> TypeAttribute | None:
        return self._once(_TENSOR_TYPE, self._types, super().parse_optional_type)

    def parse_optional_attribute(self) -> Attribute | None:
        return self._once(_SHARDING, self._shardings, super().parse_optional_attribute)

    def parse_operation(self) -> Operation:
        start = self._current_token.span.start
        line = _OP_LINE.match(self._text, start)
        if line is None or "->" in line[2]:  # types of operands, which are compared
            return super().parse_operation()
        layer = _LAYER.search(line[2])
        form = _VALUE.sub("\0", line[2])
        if layer is not None:
            form = form.replace(layer[0], "\0\0", 1)
        operands = _VALUE.findall(line[2])
        like = self._ops.get(form)
        op = None if like is None else self._copied(like, line, operands, layer and layer[1])
        if op is not None:
            return op
        op = super().parse_operation()
        # The line is all of the op, and its operands are the values in it, in their order.
        is_all = not self._text[line.end() : self._current_token.span.start].strip()
        values = [value for name in operands for value in self.ssa_values.get(name, ())]
        if is_all and values == [*op.operands] and not (op.regions or op.attributes):
            if layer is None or op.properties.get("layer") == StringAttr(layer[1]):
                self._ops[form] = op
                self._locations[line[3]] = op.location
        return op

    def _copied(
        self, like: Operation, line: re.Match[str], operands: list[str], layer: str | None
    ) -> Operation | None:
        """Copy the op `like` for a line that differs in names only; None if the line must be
        parsed."""
        names = _VALUE.findall(line[1])
        values = [self.ssa_values.get(name, ()) for name in operands]
        is_known = line[3] in self._locations and len(names) == len(like.results)
        if not is_known or any(len(value) != 1 for value in values):
            return None
        properties = dict(like.properties)
        if layer is not None:
            properties["layer"] = StringAttr(layer)
        op = type(like).create(
            operands=[value for (value,) in values],
            result_types=like.result_types,
            properties=properties,
            location=self._locations[line[3]],
        )
        span = Span(line.start(), line.end(1), self._parser_state.lexer.input)
        for name, result in zip(names, op.results, strict=True):
            self._register_ssa_definition(name, (result,), span)
        self._resume_from(line.end())
        return op

    def _once(
        self, form: re.Pattern[str], known: dict[str, _A], parse: Callable[[], _A | None]
    ) -> _A | None:
        """Call `parse`, but once only for each text that matches `form`."""
        match = form.match(self._text, self.pos)
        if match is None:
            return parse()
        if match[0] in known:
            self._resume_from(match.end())
            return known[match[0]]
        made = parse()
        if made is not None:
            known[match[0]] = made
        return made


class TextPrinter(Printer):
    """xDSL's printer, which makes the text of each type and sharding only once."""

    def __init__(self, stream: StringIO, *, print_debuginfo: bool = False) -> None:
        super().__init__(stream, print_debuginfo=print_debuginfo)
        self._texts = ByIdentity[str]()

    def print_attribute(self, attribute: Attribute) -> None:
        if isinstance(attribute, BuiltinAttribute) and attribute.name != TensorType.name:
            super().print_attribute(attribute)
            return
        text = self._texts.find(id(attribute))
        if text is None:
            stream = StringIO()
            Printer(stream).print_attribute(attribute)
            text = self._texts.keep(id(attribute), stream.getvalue(), attribute)
        self.print_string(text)

    def print_bytes_literal(self, bytestring: bytes) -> None:
        text = bytestring.decode("latin-1")
        if _PLAIN.fullmatch(text):
            self.print_string(f'"{text}"')
        else:
            super().print_bytes_literal(bytestring)


def _is_utf8(span: object) -> bool:
    assert isinstance(span, StringLiteral)
    try:
        span.bytes_contents.decode()
    except UnicodeDecodeError:
        return False
    return True
