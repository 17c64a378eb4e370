"""Texts with slips of the pen, for tests of what reads them."""

from __future__ import annotations

import random
import re

CHARACTERS = "%{}[]()<>:=,\"'@#-.x0129 abcf\n"


def mutated(text: str, rng: random.Random) -> str:
    """The text with one slip of the pen: a character or a word gone, doubled or changed."""
    kind = rng.randrange(4)
    if kind == 0:
        at = rng.randrange(len(text))
        return text[:at] + text[at + 1 :]
    if kind == 1:
        at = rng.randrange(len(text))
        return text[:at] + rng.choice(CHARACTERS) + text[at + 1 :]
    words = list(re.finditer(r"[\w.%]+", text))
    one, other = rng.choice(words), rng.choice(words)
    if kind == 2:
        return text[: one.start()] + text[one.end() :]
    return text[: one.start()] + other.group() + text[one.end() :]
