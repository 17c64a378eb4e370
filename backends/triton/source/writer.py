"""Write the body of a kernel: Triton statements for the values of a region, on demand.

A template asks for a value at an index, an expression of the kernel's loop variables. The op that
computes the value asks for its operands at the indices it needs, down to loads of the inputs. So
views cost nothing, and an op is written only if, and where, its value is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from xdsl.ir import SSAValue

from shardweave.backends.triton.source.formulas import computed_in, converted, type_text
from shardweave.backends.triton.source.index import Base, Index, Symbols
from shardweave.ir.dialects.types import dtype_of_value, shape_of

Indices = tuple[Index, ...]

AT_AN_EDGE = "at an edge"
"""The comment of a statement for the first and last block of a row, which are incomplete."""


class UnfitError(ValueError):
    """Raised if no template can compute a region; the message says why."""


class NotReadyError(Exception):
    """Raised for a value that needs a reduction that is not finished yet."""


class Term(NamedTuple):
    """A variable of the kernel, or a literal. axes: the loop variables that it depends on."""

    name: str
    dtype: torch.dtype
    axes: frozenset[str]

    @property
    def is_literal(self) -> bool:
        return not self.name.isidentifier() or self.name in ("True", "False")


class Guard(NamedTuple):
    """A condition: a value is needed only where it holds, so that loads are masked by it.

    looked_up: whether it limits an index loaded from memory, rather than a loop variable.
    """

    name: str
    axes: frozenset[str]
    looked_up: bool = False


Guards = tuple[Guard, ...]


class DensePlace(NamedTuple):
    """The variable of a flat index whose blocks begin at multiples of 16 bytes.

    text: the plain expression that it replaces. mask: condition for reading memory, which is also
    true at elements that are not needed. inner: condition that a whole block is needed, and so may
    be written.
    """

    text: str
    name: str
    mask: str
    inner: str


@dataclass
class Writer:
    """The statements of one kernel so far.

    pointers: the parameter of each input. strides: of each input, in elements. masks: by axis, the
    variable that is true inside the space; an axis without a mask is absent. widens: whether halves
    are loaded as float32. dense: how to address rows that are not aligned to 16 bytes. requires:
    whether the statements contain a device assertion. known: the variables that are in scope, by
    the key of their computation.
    """

    pointers: Mapping[SSAValue, str]
    strides: Mapping[SSAValue, Sequence[int]]
    masks: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    symbols: Symbols = ()
    lines: list[str] = field(default_factory=lambda: list[str]())
    indent: str = "    "
    widens: bool = True
    dense: DensePlace | None = None
    requires: bool = False
    known: dict[object, Term] = field(default_factory=lambda: dict[object, Term]())
    _used: dict[str, int] = field(default_factory=lambda: dict[str, int]())

    # Statements

    def line(self, text: str) -> None:
        """Write a statement, or several on lines of their own."""
        self.lines += [f"{self.indent}{row}" for row in text.splitlines()]

    def fresh(self, hint: str) -> str:
        """Return an unused variable name that begins with `hint`."""
        word = "".join(c if c.isalnum() else "_" for c in hint).strip("_") or "value"
        count = self._used[word] = self._used.get(word, 0) + 1
        return f"{word}_{count}"

    def assign(
        self, hint: str, text: str, dtype: torch.dtype, axes: frozenset[str], comment: str = ""
    ) -> Term:
        """Write `name = text` and return the variable; the same text is written only once."""
        key = (text, dtype)
        if key not in self.known:
            name = self.fresh(hint)
            self.line(f"{name} = {text}" + (f"  # {comment}" if comment else ""))
            self.known[key] = Term(name, dtype, axes)
        return self.known[key]

    def state(self) -> tuple[int, dict[object, Term]]:
        """Return a snapshot, to which `restore` goes back."""
        return len(self.lines), dict(self.known)

    def restore(self, state: tuple[int, dict[object, Term]], *, erase: bool) -> None:
        """Forget variables since `state`, now out of scope. erase: also remove their lines."""
        count, known = state
        self.known = dict(known)
        if erase:
            del self.lines[count:]

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        """Write `header`, and indent the statements of the `with` body; forget their variables."""
        self.line(header)
        state = self.state()
        self.indent += "    "
        yield
        self.indent = self.indent[4:]
        self.restore(state, erase=False)

    # Indices

    def name_index(self, index: Index) -> Base:
        """Assign an index to a new variable, to divide it where no closed form exists."""
        text = index.text(self.symbols)
        term = self.assign("at", text, torch.int64, index.axes)
        return Base(term.name, max(1, index.highest + 1), index.axes)

    def mask(self, axes: frozenset[str], guards: Guards) -> str:
        """Return the mask, as text, of memory accesses at indices that vary along `axes`."""
        words = [self.masks[axis] for axis in sorted(axes) if axis in self.masks]
        words += [guard.name for guard in guards]
        return " & ".join(dict.fromkeys(words))

    def require(self, name: str, message: str, axes: frozenset[str], guards: Guards) -> None:
        """Write a device assertion that condition `name` holds inside the space and guards."""
        key = ("require", name, guards)
        if key in self.known:
            return
        mask = self.mask(axes, guards)
        masked = f", mask={mask}" if mask else ""
        self.line(f'tl.device_assert({name}, "{message}"{masked})')
        self.known[key] = Term(name, torch.bool, axes)
        self.requires = True

    # Memory

    def load(self, value: SSAValue, indices: Indices, guards: Guards) -> Term:
        """Write the load of an element of an input, widened to the dtype to compute in."""
        strides, dtype = self.strides[value], dtype_of_value(value)
        offset = Index()
        for index, stride, size in zip(indices, strides, shape_of(value), strict=True):
            offset = offset + index * (stride if size > 1 else 0)
        axes = offset.axes
        # A mask varies only along axes of the load. So guards of other axes are left out: the
        # element does not depend on their index. Nor does an element that is addressed by loop
        # variables alone depend on an index that was loaded.
        is_looped = all(part.base.name in self.masks for part in offset.parts)
        kept = [g for g in guards if g.axes <= axes and not (g.looked_up and is_looped)]
        mask = self.mask(axes, tuple(kept))
        place = offset.text(self.symbols, wide=offset.highest >= 2**31)
        if self.dense is not None and place == self.dense.text and not kept:
            place, mask = self.dense.name, self.dense.mask
        masked = f", mask={mask}, other=0" if mask else ""
        text = f"tl.load({self.pointers[value]} + {place}{masked})"
        if place == "0":
            text = f"tl.load({self.pointers[value]}{masked})"
        wide = computed_in(dtype) if self.widens else dtype
        if wide != dtype:
            text += f".to({type_text(wide)})"
        return self.assign(short_name(value), text, wide, axes)

    def store(
        self, pointer: str, dtype: torch.dtype, offset: Index, term: Term, axes: frozenset[str]
    ) -> None:
        """Write the store of a term at flat index `offset` of a dense output of dtype `dtype`."""
        mask = self.mask(axes, ())
        text = term.name if term.is_literal else converted(term.name, term.dtype, dtype)
        place = offset.text(self.symbols)
        # The index does not vary along an axis of one element, but the block still has that axis.
        place = " + ".join([place, *(f"{axis} * 0" for axis in sorted(axes - offset.axes))])
        masked = f"tl.store({pointer} + {place}, {text}{f', mask={mask}' if mask else ''})"
        if self.dense is None or place != self.dense.text:
            self.line(masked)
            return
        self.line(f"if {self.dense.inner}:")
        self.line(f"    tl.store({pointer} + {self.dense.name}, {text})")
        self.line(f"else:\n    {masked}  # {AT_AN_EDGE}")


def short_name(value: SSAValue) -> str:
    """Return a name for a value, without its module path, so that equal layers have equal names."""
    hint = (value.name_hint or "x").rstrip("0123456789.").split(".")[-1]
    word = "".join(c if c.isalnum() else "_" for c in hint).strip("_")
    return word if word and not word[0].isdigit() else "x"
