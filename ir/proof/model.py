"""The expressions of a global program, as the check of a certificate counts them.

A second numbering: equal ops on equal operands give equal values, a cast of floating-point numbers
is the value itself, a sum is its terms in any order, and a product with an addend a sum. Where that
does not do, the certificate says so, and what `pieces.py` and `key_heads.py` equate is equal, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from xdsl.ir import Block, Operation, SSAValue

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import arguments_of
from shardweave.ir.dialects.aten import AtenOp, create
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.ops.facts import facts_of
from shardweave.ir.program.program import Program
from shardweave.ir.proof.claims import Json
from shardweave.ir.proof.key_heads import range_to, repeated_heads
from shardweave.ir.proof.local_forms import OpForm
from shardweave.ir.proof.ops import ProofError, draws, is_cast, kind_of, signs_of
from shardweave.ir.proof.pieces import Pieces
from shardweave.ir.sharding.rules.attention import (
    FLASH,
    FLASH_BACKWARD,
    POSITIONS,
    first_of_attention,
    shares_key_heads,
)

Shape = tuple[int, ...]


@dataclass
class ModelExpressions:
    """By number the shape of each expression, the op that makes it, and the terms of a sum. ops:
    those of the program, and of what follows from it, in the order in which they were read."""

    shapes: list[Shape] = field(default_factory=list[Shape])
    makers: list[AtenOp | None] = field(default_factory=list[AtenOp | None])
    sums: dict[int, dict[int, float]] = field(default_factory=dict[int, dict[int, float]])
    ops: list[OpForm] = field(default_factory=list[OpForm])
    values: dict[SSAValue, int] = field(default_factory=dict[SSAValue, int])
    pieces: Pieces | None = None
    places: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    """Of a key the place of its op among all."""
    _known: dict[Hashable, tuple[int, ...]] = field(default_factory=dict[Hashable, tuple[int, ...]])

    @staticmethod
    def of(program: Program, *, has_pieces: bool) -> ModelExpressions:
        """All expressions of a global program. Linear in its ops. has_pieces: whether also those
        that `pieces.py` and `key_heads.py` say are equal."""
        made = ModelExpressions()
        made.pieces = Pieces(made) if has_pieces else None
        for slot in program.arguments:
            made.values[slot.value] = made.argument(slot.kind, slot.name, slot.value)
        made._read(program.function.body.block)
        return made

    def _read(self, block: Block) -> None:
        for op in block.ops:
            if any(value not in self.values for value in op.operands):
                raise ProofError(f"{op.name} reads what is not made before; order the program.")
            operands = [self.values[value] for value in op.operands]
            if isinstance(op, FusedOp):
                self.values.update(zip(op.block.args, operands, strict=True))
                self._read(op.block)
                made = [self.values[value] for value in op.yielded]
            elif isinstance(op, AtenOp):
                made = self.apply(op, operands)
            elif isinstance(op, dist.ReshardOp):
                made = operands
            elif not op.results:
                break
            else:
                raise ProofError(f"{op.name} stands in no global program.")
            self.values.update(zip(op.results, made, strict=True))

    def argument(self, kind: str, name: str, value: SSAValue) -> int:
        return self._number(("argument", kind, name), [shape_of(value)])[0]

    def _number(
        self, key: Hashable, shapes: Sequence[Shape], maker: AtenOp | None = None
    ) -> tuple[int, ...]:
        known = self._known.get(key)
        if known is None:
            start = len(self.shapes)
            known = self._known[key] = tuple(range(start, start + len(shapes)))
            self.shapes += shapes
            self.makers += [maker] * len(shapes)
        return known

    def apply(self, op: Operation, operands: Sequence[int]) -> list[int]:
        """The numbers of an op's results."""
        if is_cast(op):
            return list(operands)
        assert isinstance(op, AtenOp)
        numbers = self._computed(op, operands)
        if self.pieces is not None and len(numbers) == 1:
            self.pieces.note(op, operands, numbers[0])
        return numbers

    def _computed(self, op: AtenOp, operands: Sequence[int]) -> list[int]:
        shape, signs = shape_of(op.results[0]), signs_of(op)
        if signs is not None:
            return [self.sum_of(list(zip(operands, signs, strict=True)), shape)]
        product = facts_of(op).product
        if product is not None and product.plain and product.addend is not None:
            return self._added_product(op, product.plain, product.factors, product.addend, operands)
        piece = self.pieces.taken(op, operands[0]) if self.pieces and operands else None
        return self.form(op, operands, None if piece is None else [piece])

    def _added_product(
        self, op: AtenOp, name: str, places: Sequence[int], addend: int, operands: Sequence[int]
    ) -> list[int]:
        """A product with an addend: the sum of both."""
        if op.value("alpha") != 1 or op.value("beta") != 1:
            return self.form(op, operands)
        factors = Block(arg_types=[op.operands[place].type for place in places]).args
        plain = create(name, factors, list(op.result_types))
        (made,) = self.form(plain, [operands[place] for place in places])
        shape = shape_of(op.results[0])
        return self.form(op, operands, [self.sum_of([(made, 1), (operands[addend], 1)], shape)])

    def key(self, op: AtenOp, operands: Sequence[int]) -> Hashable:
        """What an op computes of its operands."""
        results = tuple([(shape_of(result), kind_of(result)) for result in op.results])
        return op.name, arguments_of(op), tuple(operands), results

    def form(
        self, op: AtenOp, operands: Sequence[int], results: Sequence[int] | None = None
    ) -> list[int]:
        """The numbers of an op's results, which are `results` if it gives what is known."""
        key = self.key(op, operands)
        if draws(op):
            key = key, len(self.shapes)
        known = self._known.get(key)
        if results is not None:
            self._known[key] = tuple(results)
        numbers = self._number(key, [shape_of(result) for result in op.results], op)
        if known != numbers:
            self.places[key] = len(self.ops)
            self.ops.append(OpForm(op, tuple(operands), numbers))
            if self.pieces is not None:
                self._equate(op, operands, numbers)
        return list(numbers)

    def _equate(self, op: AtenOp, operands: Sequence[int], numbers: Sequence[int]) -> None:
        """Let an attention be what it is in positions, and on a head of keys for each query."""
        if op.name in (FLASH, FLASH_BACKWARD) and op.value("is_causal"):
            self.form(range_to(shape_of(op.operands[first_of_attention(op)])[POSITIONS]), [])
        if shares_key_heads(op):
            for alias, inputs, results in repeated_heads(op, operands, numbers, self.form):
                self.form(alias, inputs, results)

    def note_sum(self, number: int, terms: Sequence[int]) -> None:
        """Let a value be the sum of others, too."""
        total: dict[int, float] = {}
        for term in terms:
            for inner, factor in self.terms(term).items():
                total[inner] = total.get(inner, 0.0) + factor
        self.sums[number] = total
        self._known.setdefault(("sum", frozenset(total.items()), self.shapes[number]), (number,))

    def terms(self, number: int) -> dict[int, float]:
        return self.sums.get(number, {number: 1.0})

    def sum_of(self, terms: Sequence[tuple[int, float]], shape: Shape) -> int:
        """The number of a sum, which is known by the terms that are no sums, and how often each
        counts."""
        total: dict[int, float] = {}
        for number, coefficient in terms:
            for inner, factor in self.terms(number).items():
                total[inner] = total.get(inner, 0.0) + factor * coefficient
        if len(total) == 1:
            ((only, coefficient),) = total.items()
            if coefficient == 1 and self.shapes[only] == shape:
                return only
        (number,) = self._number(("sum", frozenset(total.items()), shape), [shape])
        self.sums[number] = total
        return number

    def defined(self, given: Json) -> int:
        """The number of an expression that a certificate defines. Raises ProofError, KeyError."""
        terms = [(int(number), float(factor)) for number, factor in given["sum"]]
        return self.sum_of(terms, tuple(map(int, given["shape"])))
