"""Writing the body of a kernel: from the values of a region to Triton statements, on demand.

A value is asked for at an index, as a sum of parts of the kernel's loop variables. The op that
makes it asks for its operands at the indices that it needs, down to loads of the inputs. So views
cost nothing, and an op is written where, and only if, something needs it.
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
"""The comment of a statement for the first and the last block of a row, which are cut."""


class UnfitError(ValueError):
    """No template computes this region; the message says why."""


class NotReadyError(Exception):
    """A value needs a reduction that is not finished yet."""


class Term(NamedTuple):
    """A variable of the kernel. axes: of the loop variables that it varies along."""

    name: str
    dtype: torch.dtype
    axes: frozenset[str]

    @property
    def is_literal(self) -> bool:
        return not self.name.isidentifier() or self.name in ("True", "False")


class Guard(NamedTuple):
    """A condition under which alone a value is wanted; loads outside it are masked.

    looked_up: whether it is about an index that was read, not about a loop's.
    """

    name: str
    axes: frozenset[str]
    looked_up: bool = False


Guards = tuple[Guard, ...]


class DensePlace(NamedTuple):
    """The variable of a place in memory at which blocks begin at multiples of 16 bytes.

    text: of the place in other words. mask: where it may be read, which is more than is wanted.
    inner: the variable that is true of a block that is wanted whole, and so may be written.
    """

    text: str
    name: str
    mask: str
    inner: str


@dataclass
class Writer:
    """The statements of one kernel so far.

    pointers: the parameter of each input. strides: of each input, in elements. masks: by axis,
    the variable that is true inside the space; an axis that needs none is absent. widens:
    whether halves are loaded as float32. dense: how rows are read that begin anywhere. requires:
    whether a device assertion is among the statements. known: the variables that may be used
    from here on.
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
        """A new variable, named after `hint`."""
        word = "".join(c if c.isalnum() else "_" for c in hint).strip("_") or "value"
        count = self._used[word] = self._used.get(word, 0) + 1
        return f"{word}_{count}"

    def assign(
        self, hint: str, text: str, dtype: torch.dtype, axes: frozenset[str], comment: str = ""
    ) -> Term:
        """Write `name = text`; the same text is written once."""
        key = (text, dtype)
        if key not in self.known:
            name = self.fresh(hint)
            self.line(f"{name} = {text}" + (f"  # {comment}" if comment else ""))
            self.known[key] = Term(name, dtype, axes)
        return self.known[key]

    def state(self) -> tuple[int, dict[object, Term]]:
        """Snapshot for `restore`, which forgets all that is written after it."""
        return len(self.lines), dict(self.known)

    def restore(self, state: tuple[int, dict[object, Term]], *, erase: bool) -> None:
        """Forget the variables made since `state` (they went out of scope), or also their lines."""
        count, known = state
        self.known = dict(known)
        if erase:
            del self.lines[count:]

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        """The statements of a loop, whose variables are forgotten after it."""
        self.line(header)
        state = self.state()
        self.indent += "    "
        yield
        self.indent = self.indent[4:]
        self.restore(state, erase=False)

    # Indices

    def name_index(self, index: Index) -> Base:
        """A variable that holds an index, for a division that has no closed form."""
        text = index.text(self.symbols)
        term = self.assign("at", text, torch.int64, index.axes)
        return Base(term.name, max(1, index.highest + 1), index.axes)

    def mask(self, axes: frozenset[str], guards: Guards) -> str:
        """The condition for touching memory at indices that vary along `axes`."""
        words = [self.masks[axis] for axis in sorted(axes) if axis in self.masks]
        words += [guard.name for guard in guards]
        return " & ".join(dict.fromkeys(words))

    def require(self, name: str, message: str, axes: frozenset[str], guards: Guards) -> None:
        """Stop the kernel, with a message, where a condition does not hold inside the space."""
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
        """An element of an input, widened to what is computed with."""
        strides, dtype = self.strides[value], dtype_of_value(value)
        offset = Index()
        for index, stride, size in zip(indices, strides, shape_of(value), strict=True):
            offset = offset + index * (stride if size > 1 else 0)
        axes = offset.axes
        # A mask is never wider than what is loaded; what does not vary along an axis that is
        # guarded does not depend on the index that the guard is about. Nor does what lies at
        # places of loop variables alone depend on an index that was read.
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
        """Write a value at a place of a dense output of a dtype."""
        mask = self.mask(axes, ())
        text = term.name if term.is_literal else converted(term.name, term.dtype, dtype)
        place = offset.text(self.symbols)
        # Along an axis of one element the place does not vary, but the block still has it.
        place = " + ".join([place, *(f"{axis} * 0" for axis in sorted(axes - offset.axes))])
        masked = f"tl.store({pointer} + {place}, {text}{f', mask={mask}' if mask else ''})"
        if self.dense is None or place != self.dense.text:
            self.line(masked)
            return
        self.line(f"if {self.dense.inner}:")
        self.line(f"    tl.store({pointer} + {self.dense.name}, {text})")
        self.line(f"else:\n    {masked}  # {AT_AN_EDGE}")


def short_name(value: SSAValue) -> str:
    """A word for a value, without the path of its module, in which equal layers differ."""
    hint = (value.name_hint or "x").rstrip("0123456789.").split(".")[-1]
    word = "".join(c if c.isalnum() else "_" for c in hint).strip("_")
    return word if word and not word[0].isdigit() else "x"
