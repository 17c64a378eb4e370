"""Suggestions for a misspelt word."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str], count: int = 1) -> str:
    """Make `did you mean 'gpt2'? ` with at most `count` similar words; '' if none is similar."""
    close = get_close_matches(word, list(known), count)
    return f"did you mean {' or '.join(map(repr, close))}? " if close else ""
