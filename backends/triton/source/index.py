"""Indices of elements, as symbolic sums of terms of a kernel's loop variables.

An index is `constant + sum(coefficient * ((base // divisor) % size))`. Views split and merge such
sums exactly: (x // 16) * 16 + x % 16 becomes x again, so that a chain of views costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Base:
    """A variable of the kernel with values in [0, size). axes: the axes along which it varies."""

    name: str
    size: int
    axes: frozenset[str]


@dataclass(frozen=True)
class IndexTerm:
    """One term of an index: coefficient * ((base // divisor) % size)."""

    base: Base
    divisor: int
    size: int
    coefficient: int

    def text(self, *, wide: bool = False) -> str:
        """Return the term, without its coefficient, as Triton text. wide: in 64 bits."""
        name = f"{self.base.name}.to(tl.int64)" if wide else self.base.name
        bare = name
        if self.divisor > 1:
            name = f"{name} // {self.divisor}"
        if self.divisor * self.size < self.base.size:
            name = f"{name} % {self.size}"
        return name if name == bare else f"({name})"


@dataclass(frozen=True)
class Index:
    """A sum of index terms (`parts`) and a constant; neighbouring terms of a `Base` are merged."""

    parts: tuple[IndexTerm, ...] = ()
    constant: int = 0

    @property
    def axes(self) -> frozenset[str]:
        return frozenset[str]().union(*(part.base.axes for part in self.parts))

    @property
    def highest(self) -> int:
        return self.constant + sum(part.coefficient * (part.size - 1) for part in self.parts)

    def __add__(self, other: Index) -> Index:
        return _merged([*self.parts, *other.parts], self.constant + other.constant)

    def __mul__(self, factor: int) -> Index:
        if factor == 0:
            return ZERO
        parts = [IndexTerm(p.base, p.divisor, p.size, p.coefficient * factor) for p in self.parts]
        return Index(tuple(parts), self.constant * factor)

    def text(self, symbols: Symbols = (), *, wide: bool = False) -> str:
        """Return Triton text: `row * n_cols + col`. symbols: (value, name) of size parameters.
        wide: whether to compute in 64 bits, because the index may exceed 32."""
        words: list[str] = []
        for part in self.parts:
            scale = _scaled(part.coefficient, symbols)
            words.append(f"{part.text(wide=wide)}{scale}")
        if self.constant or not words:
            words.append(str(self.constant))
        return " + ".join(words).replace("+ -", "- ")


Symbols = Sequence[tuple[int, str]]
Namer = Callable[[Index], Base]

ZERO = Index()


def of_base(base: Base) -> Index:
    """Return the index that is the variable itself; 0 if its only value is 0."""
    return ZERO if base.size == 1 else Index((IndexTerm(base, 1, base.size, 1),))


def quotient_and_remainder(index: Index, divisor: int, namer: Namer) -> tuple[Index, Index]:
    """Return quotient and remainder of an index that is not negative. namer: assigns an index to a
    variable, if it cannot be divided term by term."""
    if divisor == 1:
        return index, ZERO
    high: list[IndexTerm] = []
    low: list[IndexTerm] = []
    for part in index.parts:
        for piece in _split(part, divisor):
            (high if piece.coefficient % divisor == 0 else low).append(piece)
    quotient, rest = divmod(index.constant, divisor)
    remainder = Index(tuple(low), rest)
    if index.constant >= 0 and remainder.highest < divisor:
        parts = [IndexTerm(p.base, p.divisor, p.size, p.coefficient // divisor) for p in high]
        return _merged(parts, quotient), _merged(low, rest)
    base = namer(index)
    return (
        Index((IndexTerm(base, divisor, max(1, math.ceil(base.size / divisor)), 1),)),
        Index((IndexTerm(base, 1, divisor, 1),)),
    )


def raveled(indices: Sequence[Index], shape: Sequence[int]) -> Index:
    """Return the flat index of an element of a dense value."""
    flat = ZERO
    for index, size in zip(indices, shape, strict=True):
        flat = flat * size + index
    return flat


def unraveled(flat: Index, shape: Sequence[int], namer: Namer) -> tuple[Index, ...]:
    """Return the index along each dim of the element at a flat index; inverse of `raveled`."""
    indices: list[Index] = []
    for position, size in enumerate(reversed(shape)):
        if position == len(shape) - 1:
            indices.append(flat if size > 1 else ZERO)
        else:
            flat, index = quotient_and_remainder(flat, size, namer)
            indices.append(index if size > 1 else ZERO)
    return tuple(reversed(indices))


def _split(part: IndexTerm, divisor: int) -> list[IndexTerm]:
    """Split a term at the divisor into low and high digits; unchanged if it cannot or need not."""
    if divisor % part.coefficient or part.coefficient * part.size <= divisor:
        return [part]
    inner = divisor // part.coefficient
    if inner == 1 or part.size % inner:
        return [part]
    return [
        IndexTerm(part.base, part.divisor, inner, part.coefficient),
        IndexTerm(part.base, part.divisor * inner, part.size // inner, divisor),
    ]


def _merged(parts: list[IndexTerm], total: int) -> Index:
    """Sum terms and a constant: joins adjoining digits of one base, and adds equal digits."""
    merged: list[IndexTerm] = []
    for part in sorted(parts, key=lambda p: (p.base.name, p.divisor, p.size)):
        last = merged[-1] if merged else None
        if last is not None and last.base == part.base:
            if (last.divisor, last.size) == (part.divisor, part.size):
                merged[-1] = IndexTerm(
                    last.base, last.divisor, last.size, last.coefficient + part.coefficient
                )
                continue
            if _continues(last, part):
                size = last.size * part.size
                merged[-1] = IndexTerm(last.base, last.divisor, size, last.coefficient)
                continue
        merged.append(part)
    kept = [part for part in merged if part.size > 1 and part.coefficient]
    return Index(tuple(sorted(kept, key=lambda p: -p.coefficient)), total)


def _continues(low: IndexTerm, high: IndexTerm) -> bool:
    return high.divisor == low.divisor * low.size and high.coefficient == low.coefficient * low.size


def _scaled(coefficient: int, symbols: Symbols) -> str:
    if coefficient == 1:
        return ""
    for value, name in symbols:
        if value > 1 and coefficient % value == 0:
            rest = coefficient // value
            return f" * {name}" + (f" * {rest}" if rest > 1 else "")
    return f" * {coefficient}"
