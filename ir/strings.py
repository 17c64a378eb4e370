"""Finding a string that is never closed before xDSL's lexer meets it.

The lexer's pattern for strings takes exponential time on such a string (xDSL 0.74): a text with
one quote too many would not be refused but hang.
"""

from __future__ import annotations

import re

# Possessive quantifiers never go back, so this takes linear time on every text.
_COMMENT_OR_STRING = re.compile(
    r'//[^\n]*|"(?:[^"\\\n\v\f]++|\\(?:["nt\\]|[0-9A-Fa-f]{2}))*+(?P<end>")?'
)


def unclosed_string(text: str) -> int | None:
    """Offset of the first quote that opens a string without an end on its line; None without."""
    for match in _COMMENT_OR_STRING.finditer(text):
        if text[match.start()] == '"' and match["end"] is None:
            return match.start()
    return None
