"""Texts with slips of the pen, for tests of what reads them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

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
    if not words:
        return text
    one, other = rng.choice(words), rng.choice(words)
    if kind == 2:
        return text[: one.start()] + text[one.end() :]
    return text[: one.start()] + other.group() + text[one.end() :]


NUMBERS = ("0", "-1", "1", "2", "3", "7", "9223372036854775807", "9999999999999999999", "1e400")
"""What stands for a number in a structural mutation: edges of types, and small ones."""


def restructured(text: str, rng: random.Random) -> str:
    """The text with a larger change: lines gone, doubled or exchanged, parts nested or cut off, and
    numbers at the edges of what they may be."""
    lines = text.splitlines(keepends=True)
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(7)
    if kind == 0:
        del lines[one]
    elif kind == 1:
        lines.insert(other, lines[one])
    elif kind == 2:
        lines[one], lines[other] = lines[other], lines[one]
    elif kind == 3:
        return text[: rng.randrange(len(text))]
    elif kind == 4:
        return _with_other_number(text, rng)
    elif kind == 5:
        opening, closing = rng.choice(("[]", "{}", "()"))
        at, depth = rng.randrange(len(text)), rng.choice((1, 50, 5000))
        return text[:at] + opening * depth + closing * depth + text[at:]
    else:
        begin, end = sorted((one, other))
        return "".join(lines[:begin] + lines[end:])
    return "".join(lines)


def _with_other_number(text: str, rng: random.Random) -> str:
    numbers = list(re.finditer(r"\d+", text))
    if not numbers:
        return text
    number = rng.choice(numbers)
    return text[: number.start()] + rng.choice(NUMBERS) + text[number.end() :]


def any_mutation(text: str, rng: random.Random) -> str:
    """One to three changes of either kind."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text = rng.choice((mutated, restructured))(text, rng) if text.split() else text
    return text


def mutated_data(data: Any, rng: random.Random) -> Any:
    """JSON-like data with one value changed: for another one of it, for another kind, its text
    mutated; gone, or under another key."""
    data = json.loads(json.dumps(data))
    places = list(_places(data))
    holder, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[mutated(f"{key}", rng)] = holder.pop(key)
    elif kind == 2:
        other_holder, other = rng.choice(places)
        holder[key] = json.loads(json.dumps(other_holder[other]))
    elif kind == 3 and isinstance(holder[key], str):
        holder[key] = mutated(holder[key], rng) if holder[key] else "x"
    elif kind == 4 and isinstance(holder[key], int | float):
        holder[key] = rng.choice((0, -1, 1, 2, 3, 4, 8, 2**63, 1e300, 0.5, True))
    else:
        holder[key] = rng.choice((None, True, 0, -1, 1.5, "", "data", [], {}, [[]], {"": None}))
    return data


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Each place that holds a value: what it is in, and under which key or index."""
    pairs = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in list(pairs):
        yield data, key
        if isinstance(value, dict | list):
            yield from _places(value)


_RESULT = re.compile(r"^\s*(%[\w.]+) = [\w.]+\((.*?)\).* : (tensor<[^>]*>)\s*$")
_ARGUMENT = re.compile(r"^\s*(%[\w.]+): (tensor<[^>]*>)")


def rewired(text: str, rng: random.Random) -> str:
    """The text of a program in which one op reads another value of the same type: a program still,
    but of something else."""
    lines = text.splitlines()
    types: dict[str, str] = {}
    choices: list[tuple[int, str, str]] = []
    for number, line in enumerate(lines):
        argument, result = _ARGUMENT.match(line), _RESULT.match(line)
        for name in re.findall(r"%[\w.]+", result[2]) if result else ():
            others = [n for n, kind in types.items() if kind == types.get(name) and n != name]
            choices += [(number, name, other) for other in others]
        if argument is not None:
            types[argument[1]] = argument[2]
        elif result is not None:
            types[result[1]] = result[3]
    if not choices:
        return text
    number, name, other = rng.choice(choices)
    head, equals, body = lines[number].partition(" = ")
    body = re.sub(rf"{re.escape(name)}(?![\w.])", other, body, count=1)
    lines[number] = head + equals + body
    return "\n".join(lines) + "\n"
