"""The values of a region at an index: one handler for each kind of op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from xdsl.ir import SSAValue

from shardweave.backends.triton.source.formulas import (
    FORMULAS,
    common_dtype,
    computed_in,
    converted,
    literal,
    type_text,
)
from shardweave.backends.triton.source.index import ZERO, Base, Index, of_base, raveled, unraveled
from shardweave.backends.triton.source.source import KernelDraft
from shardweave.backends.triton.source.writer import (
    Guard,
    Guards,
    Indices,
    Term,
    UnfitError,
    Writer,
)
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.ops.records.views import padded_dim
from shardweave.ir.ops.registry import spec_of

Special = Callable[[AtenOp, SSAValue, Indices, Guards], Term]


_Handler = Callable[["Values", AtenOp, Indices, Guards], Term]

_HANDLERS: dict[str, _Handler] = {}
"""By op name, the functions that write ops that only select elements of their operands."""


def _handles(name: str) -> Callable[[_Handler], _Handler]:
    def register(handler: _Handler) -> _Handler:
        _HANDLERS[name] = handler
        return handler

    return register


@dataclass
class Values:
    """Finds the variable of a region's value at an index; writes statements to compute new ones.

    special: by op name, handlers of ops that a template computes (reductions, matrix products).
    """

    writer: Writer
    special: dict[str, Special] = field(default_factory=lambda: dict[str, Special]())

    def at(self, value: SSAValue, indices: Indices, guards: Guards = ()) -> Term:
        """Return the variable of the element of `value` at `indices`; writes it if it is new."""
        key = (value, indices, guards)
        if key not in self.writer.known:
            self.writer.known[key] = self._compute(value, indices, guards)
        return self.writer.known[key]

    def indices(self, value: SSAValue, place: Index) -> Indices:
        """Return the indices, one per dim, of the element at flat index `place`."""
        return unraveled(place, shape_of(value), self.writer.name_index)

    def store(
        self, draft: KernelDraft, value: SSAValue, place: Index, axes: frozenset[str]
    ) -> None:
        """Write statements that store the element at flat index `place` of a stored value."""
        term = self.variable(self.at(value, self.indices(value, place)))
        dtype = draft.region.dtype_of(value)
        self.writer.store(draft.outputs[value], dtype, place, term, axes)

    def _compute(self, value: SSAValue, indices: Indices, guards: Guards) -> Term:
        op = value.owner
        if not isinstance(op, AtenOp):
            return self.writer.load(value, indices, guards)
        if op.name in self.special:
            return self.special[op.name](op, value, indices, guards)
        if op.name in FORMULAS or op.name == "aten.full":
            return self._pointwise(op, indices, guards)
        handler = _HANDLERS.get(op.name)
        if handler is None:
            raise UnfitError(f"{op.name} cannot be in a generated kernel")
        return handler(self, op, indices, guards)

    def broadcast(self, value: SSAValue, indices: Indices) -> Indices:
        """Return the indices of an operand whose shape is broadcast to the dims of `indices`."""
        shape = shape_of(value)
        own = indices[len(indices) - len(shape) :]
        return tuple(i if size > 1 else ZERO for i, size in zip(own, shape, strict=True))

    def _pointwise(self, op: AtenOp, indices: Indices, guards: Guards) -> Term:
        own = dtype_of_value(op.results[0])
        dtype = computed_in(own)
        hint, comment = op.name.split(".")[1], op.name
        if op.name == "aten.full":
            return Term(literal(op.value("fill_value"), own), dtype, frozenset())
        given = [self.at(v, self.broadcast(v, indices), guards) for v in op.operands]
        # A literal takes the dtype of the other operand in an infix formula. A function would read
        # it as float32, and two literals would be computed by Python's rules.
        formula = FORMULAS[op.name]
        if not formula.takes_numbers or all(term.is_literal for term in given):
            given = list(map(self.variable, given))
        axes = frozenset[str]().union(*(term.axes for term in given))
        words = self._converted(op, given, dtype)
        return self.writer.assign(hint, formula.write(op, *words), dtype, axes, comment)

    def variable(self, term: Term) -> Term:
        """Return a term as a variable: a literal number is assigned to one of its dtype."""
        if not term.is_literal:
            return term
        text = f"tl.full((), {term.name}, {type_text(term.dtype)})"
        return self.writer.assign("constant", text, term.dtype, frozenset())

    def _converted(self, op: AtenOp, given: list[Term], dtype: torch.dtype) -> list[str]:
        """Return the operands as text, converted to the dtype that the op computes in."""
        spec = spec_of(op)
        if spec.operands_as == "common":
            common = common_dtype([term.dtype for term in given])
            is_fraction = len(given) == 1 and isinstance(op.value("other"), float)
            if is_fraction and not common.is_floating_point:
                common = torch.float32
            return [_as(term, common) for term in given]
        others = torch.bool if spec.operands_as == "bool" else dtype
        return [_as(t, torch.bool if i == spec.mask else others) for i, t in enumerate(given)]

    # Views

    @_handles("aten.view")
    def view(self, op: AtenOp, indices: Indices, guards: Guards) -> Term:
        flat = raveled(indices, shape_of(op.results[0]))
        source = op.operands[0]
        return self.at(source, self.indices(source, flat), guards)

    @_handles("aten.permute")
    def permute(self, op: AtenOp, indices: Indices, guards: Guards) -> Term:
        own: list[Index] = [ZERO] * len(indices)
        for position, dim in enumerate(op.value("dims")):
            own[dim] = indices[position]
        return self.at(op.operands[0], tuple(own), guards)

    @_handles("aten.expand")
    def expand(self, op: AtenOp, indices: Indices, guards: Guards) -> Term:
        return self.at(op.operands[0], self.broadcast(op.operands[0], indices), guards)

    # Elements of an operand, found by an index

    @_handles("aten.slice.Tensor")
    def slice(self, op: AtenOp, indices: Indices, guards: Guards) -> Term:
        source = op.operands[0]
        dim = op.value("dim") % len(indices)
        start = _wrapped(op.value("start") or 0, shape_of(source)[dim])
        return self.at(source, _shifted(indices, dim, start), guards)

    @_handles("aten.select.int")
    def select(self, op: AtenOp, indices: Indices, guards: Guards) -> Term:
        source = op.operands[0]
        shape = shape_of(source)
        dim = op.value("dim") % len(shape)
        chosen = Index(constant=_wrapped(op.value("index"), shape[dim]))
        return self.at(source, (*indices[:dim], chosen, *indices[dim:]), guards)

    @_handles("aten.slice_backward")
    def slice_backward(self, op: AtenOp, indices: Indices, guards: Guards) -> Term:
        dim = op.value("dim") % len(indices)
        start = _wrapped(op.value("start") or 0, shape_of(op.results[0])[dim])
        return self._among(op, dim, start, indices, guards)

    @_handles("aten.select_backward")
    def select_backward(self, op: AtenOp, indices: Indices, guards: Guards) -> Term:
        dim = op.value("dim") % len(indices)
        chosen = _wrapped(op.value("index"), shape_of(op.results[0])[dim])
        tests = [f"{self._text(indices[dim])} == {chosen}"]
        own = (*indices[:dim], *indices[dim + 1 :])
        return self._where(op, tests, op.operands[0], own, indices[dim], guards)

    @_handles("aten.constant_pad_nd")
    def pad(self, op: AtenOp, indices: Indices, guards: Guards) -> Term:
        padding = padded_dim(op)
        assert padding is not None
        value = literal(op.value("value"), dtype_of_value(op.operands[0]))
        return self._among(op, *padding, indices, guards, value)

    def _among(
        self, op: AtenOp, dim: int, start: int, indices: Indices, guards: Guards, other: str = "0"
    ) -> Term:
        """Return the element of the operand, which begins at `start` along `dim`, else `other`."""
        source, size = op.operands[0], shape_of(op.results[0])[dim]
        tests = self._between(indices[dim], start, start + shape_of(source)[dim], size)
        own = _shifted(indices, dim, -start)
        return self._where(op, tests, source, own, indices[dim], guards, other)

    @_handles("aten.arange.start_step")
    def arange(self, op: AtenOp, indices: Indices, guards: Guards) -> Term:
        dtype = dtype_of_value(op.results[0])
        place = indices[0] * op.value("step") + Index(constant=op.value("start"))
        text = place.text(self.writer.symbols, wide=True)
        if not place.axes:
            return Term(text, dtype, frozenset())
        return self.writer.assign(
            "arange", converted(f"({text})", torch.int64, dtype), dtype, place.axes
        )

    def _where(
        self,
        op: AtenOp,
        tests: list[str],
        source: SSAValue,
        own: Indices,
        index: Index,
        guards: Guards,
        other: str = "0",
    ) -> Term:
        """Return the element of `source` if all tests of `index` hold, else `other`."""
        value = self.at(source, own, (*guards, *self._guard(tests, index)))
        if not tests:
            return value
        zero = "False" if value.dtype == torch.bool and other == "0" else other
        text = f"tl.where({_both(tests)}, {value.name}, {zero})"
        hint = op.name.split(".")[1]
        return self.writer.assign(hint, text, value.dtype, index.axes | value.axes, op.name)

    def _guard(self, tests: list[str], index: Index) -> Guards:
        if not tests:
            return ()
        if not index.axes:
            raise UnfitError("an op reads a single fixed element of a sliced value")
        inside = self.writer.assign("inside", _both(tests), torch.bool, index.axes)
        return (Guard(inside.name, index.axes),)

    def _between(self, index: Index, start: int, stop: int, size: int) -> list[str]:
        text = self._text(index)
        above = [f"{text} >= {start}"] if start > 0 else []
        return above + ([f"{text} < {stop}"] if stop < size else [])

    @_handles("aten.cat")
    def cat(self, op: AtenOp, indices: Indices, guards: Guards) -> Term:
        dim = op.value("dim") % len(indices)
        index, size = indices[dim], shape_of(op.results[0])[dim]
        dtype = computed_in(dtype_of_value(op.results[0]))
        axes, end, word = index.axes, size, ""
        for piece in reversed(op.operands):
            begin = end - shape_of(piece)[dim]
            tests = self._between(index, begin, end, size)
            shifted = _shifted(indices, dim, -begin)
            own = self.at(piece, shifted, (*guards, *self._guard(tests, index)))
            name = _as(own, dtype)
            word = f"tl.where({self._text(index)} < {end}, {name}, {word})" if word else name
            axes, end = axes | own.axes, begin
        return self.writer.assign("cat", word, dtype, axes, op.name)

    @_handles("aten.embedding")
    def embedding(self, op: AtenOp, indices: Indices, guards: Guards) -> Term:
        table, places = op.operands
        place = self.at(places, indices[:-1], guards)
        row, inside = self._looked_up(op, place, shape_of(table)[0], guards)
        return self.at(table, (row, indices[-1]), inside)

    @_handles("aten.gather")
    def gather(self, op: AtenOp, indices: Indices, guards: Guards) -> Term:
        source, places = op.operands
        place = self.at(places, (*indices[:-1], ZERO), guards)
        chosen, inside = self._looked_up(op, place, shape_of(source)[-1], guards)
        return self.at(source, (*indices[:-1], chosen), inside)

    def _looked_up(
        self, op: AtenOp, place: Term, size: int, guards: Guards
    ) -> tuple[Index, Guards]:
        """Return a looked-up index as an Index below `size`, and guards that limit loads to it. An
        index out of range fails a device assertion, as in ATen on a GPU."""
        place = self.variable(place)
        text = f"({place.name} >= 0) & ({place.name} < {size})"
        inside = self.writer.assign("inside", text, torch.bool, place.axes)
        self.writer.require(inside.name, f"{op.name}: index out of range", place.axes, guards)
        index = of_base(Base(place.name, size, place.axes))
        return index, (*guards, Guard(inside.name, place.axes, looked_up=True))

    @_handles("aten.scatter_add")
    def scatter_add(self, op: AtenOp, indices: Indices, guards: Guards) -> Term:
        into, places, source = op.operands
        own = (*indices[:-1], ZERO)
        place, added = self.at(places, own, guards), self.at(source, own, guards)
        self._looked_up(op, place, shape_of(into)[-1], guards)
        before = self.at(into, indices, guards)
        axes = place.axes | added.axes | before.axes | indices[-1].axes
        # Elements that nothing is added to stay as they are: -0.0 + 0 would be 0.
        total, kept = f"{before.name} + {added.name}", before.name
        if before.name in ("0.0", "0"):
            total = added.name
        text = f"tl.where({self._text(indices[-1])} == {place.name}, {total}, {kept})"
        return self.writer.assign("scatter_add", text, before.dtype, axes, op.name)

    def _text(self, index: Index) -> str:
        return index.text(self.writer.symbols)


def _both(tests: list[str]) -> str:
    return " & ".join(f"({test})" for test in tests)


def _as(term: Term, dtype: torch.dtype) -> str:
    if term.is_literal:
        return term.name
    if dtype == torch.bool and term.dtype != torch.bool:
        return f"({term.name} != 0)"
    return converted(term.name, term.dtype, dtype)


def _wrapped(position: int, size: int) -> int:
    return position + size if position < 0 else min(position, size)


def _shifted(indices: Indices, dim: int, offset: int) -> Indices:
    return (*indices[:dim], indices[dim] + Index(constant=offset), *indices[dim + 1 :])
