"""Reductions of rows and columns: for each reducing op, its accumulations and its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from xdsl.ir import SSAValue

from shardweave.backends.triton.source.formulas import computed_in, converted, number
from shardweave.backends.triton.source.index import Index, quotient_and_remainder, raveled
from shardweave.backends.triton.source.source import Kind
from shardweave.backends.triton.source.values import Values
from shardweave.backends.triton.source.writer import (
    Guards,
    Indices,
    NotReadyError,
    Term,
    UnfitError,
)
from shardweave.ir.dialects.aten import AtenOp, maker
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.ops.fusible import reductions_of
from shardweave.ir.ops.records.normalization import LAYER_NORM_BACKWARD
from shardweave.ir.ops.registry import spec_of

Key = tuple[AtenOp, str]

_SAFE_SOFTMAX = "aten._safe_softmax"


def accumulation_kind(op: AtenOp) -> Kind:
    """Return the kind of an op's accumulation: max, min or sum."""
    return spec_of(op).combine or "sum"


def keeps_nan(op: AtenOp) -> bool:
    """True if an op's max or min must keep NaN. A plain softmax's need not: its sum becomes NaN."""
    return accumulation_kind(op) != "sum" or op.name == _SAFE_SOFTMAX


class Accumulation(NamedTuple):
    """One accumulation of a reducing op. result: the op's result that a column reduction writes;
    None for rows.

    peak: for a sum of exp(x - max x), the key of that maximum, so that one pass can compute both;
    else None.
    """

    key: Key
    kind: Kind
    term: Callable[[], Term]
    result: SSAValue | None = None
    peak: Key | None = None


_Result = Callable[["Reducer", AtenOp, SSAValue, Indices, Guards], Term]
_Steps = Callable[["Reducer", AtenOp], list[Accumulation]]

_REDUCERS: dict[str, tuple[_Result, _Steps]] = {}
"""By op name of each reducing op, the methods that write its results and list its accumulations."""


def _reduces(*names: str, result: _Result) -> Callable[[_Steps], _Steps]:
    def register(steps: _Steps) -> _Steps:
        _REDUCERS.update(dict.fromkeys(names, (result, steps)))
        return steps

    return register


@dataclass
class Reducer:
    """Writes the reductions of a region over its rows and columns, at indices `row` and `col`."""

    values: Values
    row: Index
    col: Index
    columns: int

    def __post_init__(self) -> None:
        self.finished: dict[Key, Term] = {}
        self.values.special |= {
            name: partial(result, self) for name, (result, _) in _REDUCERS.items()
        }

    def steps(self, op: AtenOp) -> list[Accumulation]:
        """List the accumulations of an op, over rows and over columns."""
        _, steps = _REDUCERS[op.name]
        return steps(self, op)

    # Pieces

    def each(self, value: SSAValue) -> Term:
        """Return the element of `value` at the current row and column, as a variable."""
        place = self.row * self.columns + self.col
        return self.values.variable(self.values.at(value, self.values.indices(value, place)))

    def of_row(self, value: SSAValue) -> Term:
        """Return the element at the current row of a value with one element per row."""
        return self.values.at(value, self.values.indices(value, self.row))

    def done(self, key: Key) -> Term:
        if key not in self.finished:
            raise NotReadyError
        return self.finished[key]

    def write(self, hint: str, text: str, *terms: Term, comment: str = "") -> Term:
        """Assign a formula, in which {0}, {1}, .. stand for the terms, to a variable."""
        axes = frozenset[str]().union(*(term.axes for term in terms))
        words = text.format(*(self.values.variable(term).name for term in terms))
        return self.values.writer.assign(hint, words, terms[0].dtype, axes, comment)

    def _position(self, indices: Indices, value: SSAValue) -> Index:
        """Return the column of the element at `indices`. Raises UnfitError if in another row."""
        flat = raveled(indices, shape_of(value))
        row, col = quotient_and_remainder(flat, self.columns, self.values.writer.name_index)
        if row != self.row:
            raise UnfitError("an element of another row reads a reduced row")
        return col

    def _check_row(self, indices: Indices, value: SSAValue) -> None:
        if raveled(indices, shape_of(value)) != self.row:
            raise UnfitError("an element of another row reads the result of a row")

    # sum, amax, amin

    def _total(self, op: AtenOp, value: SSAValue, indices: Indices, guards: Guards) -> Term:
        self._check_row(indices, value)
        return self.done((op, "total"))

    @_reduces("aten.sum.dim_IntList", "aten.amax", "aten.amin", result=_total)
    def _total_steps(self, op: AtenOp) -> list[Accumulation]:
        source = op.operands[0]
        kind = accumulation_kind(op)
        dtype = computed_in(dtype_of_value(op.results[0]))

        def term() -> Term:
            value = self.each(source)
            if value.dtype == dtype:
                return value
            text = converted(value.name, value.dtype, dtype)
            return self.values.writer.assign("wide", text, dtype, value.axes)

        if reductions_of(op)[0].over == "column":
            return [Accumulation((op, "total"), kind, term, op.results[0])]
        peak = _peak_of(op) if kind == "sum" else None
        return [Accumulation((op, "total"), kind, term, peak=peak)]

    # softmax

    def _softmax(self, op: AtenOp, value: SSAValue, indices: Indices, guards: Guards) -> Term:
        self._position(indices, value)
        power = self._exponential(op, self.values.at(op.operands[0], indices, guards))
        terms = [power, self.done((op, "sum"))]
        text = "{0} / {1}"
        if op.name == _SAFE_SOFTMAX:  # a row of -inf is a row of 0
            terms.append(self.done((op, "max")))
            text = 'tl.where({2} == float("-inf"), 0.0, {0} / {1})'
        return self.write("softmax", text, *terms, comment=op.name)

    @_reduces("aten._softmax", _SAFE_SOFTMAX, result=_softmax)
    def _softmax_steps(self, op: AtenOp) -> list[Accumulation]:
        source = op.operands[0]
        highest: Key = (op, "max")
        return [
            Accumulation(highest, "max", lambda: self.each(source)),
            Accumulation(
                (op, "sum"), "sum", lambda: self._exponential(op, self.each(source)), peak=highest
            ),
        ]

    def _exponential(self, op: AtenOp, x: Term) -> Term:
        return self.write("exp", "tl.exp({0} - {1})", x, self.done((op, "max")), comment=op.name)

    def _softmax_backward(
        self, op: AtenOp, value: SSAValue, indices: Indices, guards: Guards
    ) -> Term:
        self._position(indices, value)
        g, y = (self.values.at(operand, indices, guards) for operand in op.operands)
        total = self.done((op, "sum"))
        return self.write("softmax_grad", "{1} * ({0} - {2})", g, y, total, comment=op.name)

    @_reduces("aten._softmax_backward_data", result=_softmax_backward)
    def _softmax_backward_steps(self, op: AtenOp) -> list[Accumulation]:
        grad, output = op.operands

        def term() -> Term:
            return self.write(
                "product", "{0} * {1}", self.each(grad), self.each(output), comment=op.name
            )

        return [Accumulation((op, "sum"), "sum", term)]

    # layer norm

    def _layer_norm(self, op: AtenOp, value: SSAValue, indices: Indices, guards: Guards) -> Term:
        if value is not op.results[0]:
            self._check_row(indices, value)
            return self._mean(op) if value is op.results[1] else self._rstd(op)
        col = self._position(indices, value)
        x = self.values.at(op.operands[0], indices, guards)
        text, terms = "({0} - {1}) * {2}", [x, self._mean(op), self._rstd(op)]
        for name, symbol in (("weight", "*"), ("bias", "+")):
            given = op.tensor(name)
            if isinstance(given, SSAValue):
                text += f" {symbol} {{{len(terms)}}}"
                terms.append(self._of_column(given, col))
        return self.write("layer_norm", text, *terms, comment=op.name)

    @_reduces("aten.native_layer_norm", result=_layer_norm)
    def _layer_norm_steps(self, op: AtenOp) -> list[Accumulation]:
        source = op.operands[0]

        def square() -> Term:
            center = self.write("center", "{0} - {1}", self.each(source), self._mean(op))
            return self.write("square", "{0} * {0}", center)

        return [
            Accumulation((op, "sum"), "sum", lambda: self.each(source)),
            Accumulation((op, "squares"), "sum", square),
        ]

    def _mean(self, op: AtenOp) -> Term:
        return self.write("mean", "{0} / n_cols", self.done((op, "sum")), comment=op.name)

    def _rstd(self, op: AtenOp) -> Term:
        text = f"1.0 / tl.sqrt({{0}} / n_cols + {number(op.value('eps'))})"
        return self.write("rstd", text, self.done((op, "squares")), comment=op.name)

    def _of_column(self, value: SSAValue, col: Index) -> Term:
        return self.values.at(value, self.values.indices(value, col))

    def _layer_norm_backward(
        self, op: AtenOp, value: SSAValue, indices: Indices, guards: Guards
    ) -> Term:
        if self._position(indices, value) != self.col:
            raise UnfitError("an op reads the gradient of a layer norm in another order")
        tilt, shift = self.done((op, "tilt")), self.done((op, "shift"))
        grad, normal, rstd = self._weighted(op), self._normal(op), self.of_row(op.operands[3])
        text = "({0} - ({1} * {2} + {3}) / n_cols) * {4}"
        terms = grad, normal, tilt, shift, rstd
        return self.write("layer_norm_grad", text, *terms, comment=op.name)

    @_reduces(LAYER_NORM_BACKWARD, result=_layer_norm_backward)
    def _layer_norm_backward_steps(self, op: AtenOp) -> list[Accumulation]:
        dx, dweight, dbias = op.value("output_mask")
        given = iter(op.results)
        steps: list[Accumulation] = []
        if dx:
            next(given)
            steps += [
                Accumulation((op, "tilt"), "sum", lambda: self._product(op, weighted=True)),
                Accumulation((op, "shift"), "sum", lambda: self._weighted(op)),
            ]
        if dweight:
            term = lambda: self._product(op, weighted=False)  # noqa: E731
            steps.append(Accumulation((op, "weight"), "sum", term, next(given)))
        if dbias:
            grad = op.operands[0]
            steps.append(Accumulation((op, "bias"), "sum", lambda: self.each(grad), next(given)))
        return steps

    def _normal(self, op: AtenOp) -> Term:
        terms = self.each(op.operands[1]), *map(self.of_row, op.operands[2:4])
        return self.write("normal", "({0} - {1}) * {2}", *terms, comment=op.name)

    def _weighted(self, op: AtenOp) -> Term:
        grad, weight = self.each(op.operands[0]), op.tensor("weight")
        if not isinstance(weight, SSAValue):
            return grad
        w = self._of_column(weight, self.col)
        return self.write("weighted", "{0} * {1}", grad, w, comment=op.name)

    def _product(self, op: AtenOp, *, weighted: bool) -> Term:
        grad = self._weighted(op) if weighted else self.each(op.operands[0])
        return self.write("product", "{0} * {1}", grad, self._normal(op), comment=op.name)


def _peak_of(op: AtenOp) -> Key | None:
    """Return the key of amax(x) if `op` sums exp(x - amax(x)) over rows; else None."""
    power = maker(op.operands[0], "aten.exp")
    distance = None if power is None else maker(power.operands[0], "aten.sub.Tensor")
    if distance is None:
        return None
    x, peak = distance.operands[0], maker(distance.operands[1], "aten.amax")
    if peak is None or peak.operands[0] is not x:
        return None
    same_rows = reductions_of(peak) == reductions_of(op)
    same_dtype = dtype_of_value(x) == dtype_of_value(op.results[0])
    return (peak, "total") if same_rows and same_dtype and distance.value("alpha") == 1 else None
