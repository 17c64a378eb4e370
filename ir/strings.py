"""Reading strings, where xDSL's lexer (0.74) fails: unclosed ones and those beyond ASCII."""

from __future__ import annotations

import re

from xdsl.context import Context
from xdsl.parser import Parser, ParserState
from xdsl.utils.exceptions import ParseError
from xdsl.utils.lexer import Input, Position, Token
from xdsl.utils.mlir_lexer import MLIRLexer, MLIRTokenKind, StringLiteral


class TextLexer(MLIRLexer):
    """xDSL's lexer with two differences.

    Its pattern for strings takes exponential time where a quote is never closed, so that a slip
    of the pen would hang; possessive quantifiers never go back. And a string with letters beyond
    ASCII is printed in escapes that would come back as bytes: a module named "Größe", a path
    with an accent.
    """

    _unescaped_characters_regex = re.compile(
        r'"(?:[^"\\\n\v\f]++|\\(?:["nt\\]|[0-9A-Fa-f]{2}))*+"'
    )

    def _lex_string_literal(self, start_pos: Position) -> Token[MLIRTokenKind]:
        try:
            token = super()._lex_string_literal(start_pos)
        except ParseError as error:
            raise ParseError(error.span, "the string is not closed on its line") from None
        if token.kind is MLIRTokenKind.BYTES_LIT and _is_utf8(token.span):
            return Token(MLIRTokenKind.STRING_LIT, token.span)
        return token


class TextParser(Parser):
    """xDSL's parser on a `TextLexer`."""

    def __init__(self, context: Context, text: str, name: str = "<text>") -> None:
        super().__init__(context, "", name)
        self._parser_state = ParserState(TextLexer(Input(text, name)))


def _is_utf8(span: object) -> bool:
    assert isinstance(span, StringLiteral)
    try:
        span.bytes_contents.decode()
    except UnicodeDecodeError:
        return False
    return True
