"""The expressions that a program computes. Each has a number; equal expressions share one.

Numbers are real: a cast from one floating-point type to another is the value itself, sums are
kept as their terms with coefficients, in whatever order and grouping they were added, and a
product with an addend is a sum.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from xdsl.dialects import func
from xdsl.ir import Block, Operation, SSAValue

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import annotate, arguments_of, describe
from shardweave.ir.dialects.aten import AtenOp, create
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.dialects.types import shape_of, tensor_type
from shardweave.ir.ops.registry import first_of_attention, is_attention, is_positional, spec_of
from shardweave.ir.ops.spec import Product
from shardweave.ir.proof.model.local_forms import OpForm
from shardweave.ir.proof.model.pieces import Pieces
from shardweave.ir.proof.ops import check_order, draws, dtype_kind_of, is_cast, signs_of
from shardweave.ir.sharding.rules.attention import POSITIONS


def range_to(count: int) -> AtenOp:
    """Return an `arange` op of the int64 values 0 to `count` - 1."""
    type_ = tensor_type((count,), torch.int64)
    return create("aten.arange.start_step", [], [type_], {"start": 0, "step": 1})


Shape = tuple[int, ...]
Terms = dict[int, float]
"""A sum: maps the number of each summed expression to its coefficient."""


def stand_in(name: str, operands: Sequence[SSAValue], like: SSAValue) -> AtenOp:
    """Create an op outside any program, from operand and result types, to look up its rule."""
    block = Block(arg_types=[value.type for value in operands])
    return create(name, block.args, [like.type])


@dataclass
class Expressions:
    """Hash-consed expressions, each with a number. shapes, makers: by number, an expression's shape
    and the first op or argument that computes it."""

    shapes: list[Shape] = field(default_factory=list[Shape])
    makers: list[Operation | str] = field(default_factory=list[Operation | str])
    forms: dict[tuple[str, tuple[int, ...]], list[OpForm]] = field(
        default_factory=dict[tuple[str, tuple[int, ...]], list[OpForm]]
    )
    localized: dict[str, list[OpForm]] = field(default_factory=dict[str, list[OpForm]])
    """By op name, the global ops whose rule has a `localize` (see `local_forms`)."""
    sums: dict[int, Terms] = field(default_factory=dict[int, Terms])
    num_read: int = 0
    """Numbers below this one belong to the program that was read first."""
    pieces: Pieces = field(init=False)
    _known: dict[Hashable, tuple[int, ...]] = field(default_factory=dict[Hashable, tuple[int, ...]])

    def __post_init__(self) -> None:
        self.pieces = Pieces(self)

    def number(self, key: Hashable, shapes: Sequence[Shape], maker: Operation | str) -> list[int]:
        """Return the expression numbers of a computation's results; a new `key` gets new ones."""
        known = self._known.get(key)
        if known is None:
            start = len(self.shapes)
            known = self._known[key] = tuple(range(start, start + len(shapes)))
            self.shapes += shapes
            self.makers += [maker] * len(shapes)
        return list(known)

    def argument(self, kind: str, name: str, value: SSAValue) -> int:
        return self.number(("argument", kind, name), [shape_of(value)], f"{kind} '{name}'")[0]

    def sum_of(self, terms: Sequence[tuple[int, float]], shape: Shape, maker: Operation) -> int:
        """Number a sum of (expression number, coefficient) terms; nested sums are flattened."""
        total = self._flattened(terms)
        if len(total) == 1:
            ((only, coefficient),) = total.items()
            if coefficient == 1 and self.shapes[only] == shape:
                return only
        key = "sum", frozenset(total.items()), shape
        (number,) = self.number(key, [shape], maker)
        self.sums[number] = total
        return number

    def _flattened(self, terms: Sequence[tuple[int, float]]) -> Terms:
        total: Terms = {}
        for number, coefficient in terms:
            for inner, factor in self.sums.get(number, {number: 1.0}).items():
                total[inner] = total.get(inner, 0.0) + factor * coefficient
        return total

    def note_sum(self, number: int, terms: Sequence[int]) -> None:
        """Record that an expression also equals the sum of `terms`."""
        total = self.sums[number] = self._flattened([(term, 1.0) for term in terms])
        self._known.setdefault(("sum", frozenset(total.items()), self.shapes[number]), (number,))

    def apply(self, op: Operation, operands: Sequence[int]) -> list[int]:
        """Return the expression numbers of an op's results. operands: the operands' numbers."""
        numbers = self._apply(op, operands)
        if isinstance(op, AtenOp) and len(numbers) == 1:
            self.pieces.note(op, operands, numbers[0])
        return numbers

    def _apply(self, op: Operation, operands: Sequence[int]) -> list[int]:
        if isinstance(op, dist.ReshardOp) or is_cast(op):
            return list(operands)
        signs = signs_of(op)
        if signs is not None:
            terms = list(zip(operands, signs, strict=True))
            return [self.sum_of(terms, shape_of(op.results[0]), op)]
        if not isinstance(op, AtenOp):
            return self._opaque(op, operands)
        product = spec_of(op).product
        if product is not None and product.plain:
            return self._added_product(op, product, operands)
        piece = self.pieces.taken(op, operands[0]) if operands else None
        if piece is not None:
            return self.form(op, operands, [piece])
        numbers = self.form(op, operands)
        if is_attention(op) and not is_positional(op) and op.value("is_causal"):
            # Queries and keys may be given by their positions.
            count = shape_of(op.operands[first_of_attention(op)])[POSITIONS]
            self.form(range_to(count), [])
        return numbers

    def form(
        self, op: AtenOp, operands: Sequence[int], results: Sequence[int] | None = None
    ) -> list[int]:
        """Number an op's results (`results`, if given); record the op as a form of them."""
        inputs = tuple(operands)
        kinds = tuple(map(dtype_kind_of, op.results))
        shapes = [shape_of(result) for result in op.results]
        key: Hashable = (op.name, arguments_of(op), inputs, tuple(shapes), kinds)
        if draws(op):
            key = key, len(self.shapes)
        is_new = key not in self._known
        if results is not None:
            is_new = self._known.get(key) != tuple(results)
            self._known[key] = tuple(results)
        numbers = self.number(key, shapes, op)
        if is_new:
            form = OpForm(op, inputs, tuple(numbers))
            known = self.forms.setdefault((op.name, inputs), [])
            # What is said to be known stands before what was numbered anew.
            known.insert(0 if results is not None else len(known), form)
            if form.rule.localize is not None:
                self.localized.setdefault(op.name, []).append(form)
        return numbers

    def known(self, name: str, operands: tuple[int, ...]) -> Sequence[OpForm]:
        """Return the recorded ops with this name on operands with these expression numbers."""
        return self.forms.get((name, operands), ())

    def _added_product(self, op: AtenOp, product: Product, operands: Sequence[int]) -> list[int]:
        """Number a product with an addend (`addmm`) as the sum of product and addend."""
        assert product.addend is not None
        if op.value("alpha") != 1 or op.value("beta") != 1:
            return self.form(op, operands)
        result = op.results[0]
        plain = stand_in(product.plain, [op.operands[i] for i in product.factors], result)
        annotate(plain, op)
        made = self.form(plain, [operands[i] for i in product.factors])
        terms = [(made[0], 1.0), (operands[product.addend], 1.0)]
        return self.form(op, operands, [self.sum_of(terms, shape_of(result), op)])

    def _opaque(self, op: Operation, operands: Sequence[int]) -> list[int]:
        """Number a collective's results, each as an uninterpreted function of its operand."""
        if isinstance(op, (dist.WaitOp, dist.HostCopyOp)):
            return list(operands)
        name = op.name.replace("dist.start_", "dist.")
        arguments = arguments_of(op)
        if not operands:
            shapes = [shape_of(result) for result in op.results]
            return self.number((name, arguments), shapes, op)
        return [
            self.number((name, arguments, operand), [shape_of(result)], op)[0]
            for operand, result in zip(operands, op.results, strict=True)
        ]

    def read(self, block: Block, values: dict[SSAValue, int]) -> dict[SSAValue, int]:
        """Number each value of `block`. values: maps the block's arguments to numbers; is extended
        and returned."""
        in_flight: set[SSAValue] = set()
        for op in block.ops:
            check_order(op, values, in_flight)
            if isinstance(op, func.ReturnOp):
                break
            operands = [values[value] for value in op.operands]
            if isinstance(op, FusedOp):
                inner: dict[SSAValue, int] = dict(zip(op.block.args, operands, strict=True))
                self.read_fused(op, inner)
                made = [inner[value] for value in op.yielded]
            else:
                made = self.apply(op, operands)
            values.update(zip(op.results, made, strict=True))
        return values

    def read_fused(self, op: FusedOp, values: dict[SSAValue, int]) -> None:
        """Number a fused region's values in `values`, which holds the region's arguments."""
        for inner in op.fused_ops:
            made = self.apply(inner, [values[value] for value in inner.operands])
            values.update(zip(inner.results, made, strict=True))

    def describe(self, number: int) -> str:
        """Name an expression for messages."""
        maker = self.makers[number]
        return maker if isinstance(maker, str) else describe(maker)
