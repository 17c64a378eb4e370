"""Figures of golden cases: how they are written down, and how two records of a case differ.

A case returns figures by name: texts, numbers, and lists and dicts of these. The record keeps short
texts and numbers as they are, and of a long text its digest and number of lines.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EXPECTED = Path(__file__).with_name("expected.json")

SHORT = 60
"""Most characters of a text that the record keeps as it is."""

DIGITS = 8
"""Significant digits of recorded numbers: another machine's mathematical functions may differ in
the last bits."""

_FOLDER = re.compile(r"""[^\s"'(]*/(?=driver/models/\w+\.py)""")
"""The package's folder, in a location of an op."""

Figures = Mapping[str, Any]


def text_of(value: Any) -> str:
    """Write a figure as text, floats with `DIGITS` digits, source files by their path here."""
    text = value if isinstance(value, str) else json.dumps(_rounded(value), indent=1, default=str)
    return _FOLDER.sub("", text)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def written(figures: Figures) -> dict[str, Any]:
    """Return what the record keeps of a case's figures."""
    return {name: _kept(value) for name, value in figures.items()}


def _kept(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        return _rounded(value)
    text = text_of(value)
    if len(text) <= SHORT:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{digest}, {text.count(chr(10)) + 1} lines"


def differences(expected: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the figures of a case that differ, as `name: recorded -> now`."""
    return [
        f"{name}: {expected.get(name, 'not there')} -> {now.get(name, 'not there')}"
        for name in dict.fromkeys([*expected, *now])
        if not _is_same(expected.get(name), now.get(name))
    ]


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=10.0 ** (1 - DIGITS))
    return type(a) is type(b) and a == b


def load_record() -> dict[str, Any]:
    """Load the versions and the figures of all cases that were recorded."""
    return json.loads(EXPECTED.read_text())


def save_record(versions: Mapping[str, str], cases: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the record, one line for each case."""
    lines = [f'"versions": {json.dumps(versions)}']
    lines += [f"{json.dumps(name)}: {json.dumps(cases[name])}" for name in sorted(cases)]
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
