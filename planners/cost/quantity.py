"""Numbers with units, as people write them (`24GiB`, `250mbit/s`, `35.6T`, `5us`) and read them."""

from __future__ import annotations

import math
import re

GIB = 2**30
"""Bytes of a GiB."""

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_FORM = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)(/s|ps)?\s*", re.IGNORECASE)


def quantity(text: object, unit: str) -> float | None:
    """Parse a text or number as a quantity in `unit`; None if it is not one.

    unit: `bytes` (also per second; bits are turned into bytes), `s`, or `` for plain numbers,
    which may have a scale, as in 142T. All but seconds take k, M, G, T; bytes also Ki, Mi, ...
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        try:
            return float(text)
        except OverflowError:
            return None
    form = _FORM.fullmatch(text) if isinstance(text, str) else None
    if form is None:
        return None
    try:
        number = float(form[1])
    except ValueError:
        return None
    scale = _scale(form[2].lower(), unit)
    return None if scale is None else number * scale


LEAST_PLAIN_BYTES = 2**20
"""Least memory of a device in bytes: a smaller number without a unit means GiB or MiB."""


def memory_size(text: str) -> float:
    """Parse a size such as `70GiB` to bytes. ValueError for <= 0, or few bytes without a unit."""
    size = quantity(text, "bytes")
    if not size or not math.isfinite(size) or size <= 0:
        raise ValueError(f"memory is '{text}'; give bytes with a unit, as 70GiB.")
    if size < LEAST_PLAIN_BYTES and not re.search("[a-z]$", text.strip(), re.IGNORECASE):
        unit = "GiB" if size <= 1024 else "MiB"
        raise ValueError(
            f"memory is '{text}', without a unit, which means {size:g} bytes; write "
            f"{text.strip()}{unit}, or {text.strip()}B for so few bytes."
        )
    return size


def _scale(word: str, unit: str) -> float | None:
    if unit == "s":
        return 1.0 if not word else _SECONDS.get(word)
    divisor = 1.0
    if unit == "bytes":
        for ending, size in (("bit", 8.0), ("byte", 1.0), ("bytes", 1.0), ("b", 1.0)):
            if word.endswith(ending):
                word, divisor = word.removesuffix(ending), size
                break
    else:
        for ending in ("flops", "flop"):
            word = word.removesuffix(ending)
    scale = (_SCALES | _BINARY).get(word)
    return None if scale is None else scale / divisor


def counted(count: int, noun: str, verb: str = "") -> str:
    """Write a count with its noun: `1 point`, `3 points`; with verb `was`, `1 point was`, `3 points
    were`. A verb in s, such as `needs`, loses it in the plural."""
    if count == 1:
        return f"1 {noun} {verb}".rstrip()
    head, of, tail = noun.partition(" of ")
    verb = "were" if verb == "was" else verb.removesuffix("s")
    plural = "es" if head.endswith("ch") else "s"
    return f"{count} {head}{plural}{of}{tail} {verb}".rstrip()


def seconds_text(seconds: float) -> str:
    """Format seconds: 0.0123 as `12.30 ms`; below a tenth of a millisecond in microseconds."""
    if 0 < seconds < 1e-4:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.3f} s"


def bytes_text(count: float) -> str:
    """1536 -> `1.5 KiB`; from a GiB on to two decimals."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB" if count < 1024 else f"{count / 1024:.2f} TiB"


def memory_text(needed: float, there: float) -> str:
    """Return text such as `9.0 MiB of 12.00 GiB`, which also says if `needed` exceeds `there`."""
    over = " - MORE THAN THE DEVICE HAS" if needed > there else ""
    return f"{bytes_text(needed)} of {bytes_text(there)}{over}"


def gib(size_bytes: float) -> str:
    """Format bytes as a number of GiB, to two decimals or, if that is small, two digits."""
    size = size_bytes / GIB
    return f"{size:.2f}" if abs(size) >= 0.1 or size == 0 else f"{size:.2g}"
