"""The expressions of a global program, as the check of a certificate counts them.

A second numbering, without what the proof searches for: equal ops on equal operands give equal
values, a cast of floating-point numbers is the value itself, a sum is its terms in any order, and a
product with an addend a sum. What else is equal stands in the certificate, step by step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from xdsl.ir import Block, SSAValue

from shardweave.ir import dist
from shardweave.ir.annotations import arguments_of
from shardweave.ir.aten import AtenOp, create
from shardweave.ir.facts import facts_of
from shardweave.ir.kernel import FusedOp
from shardweave.ir.program import Program
from shardweave.ir.proof.claims import Json
from shardweave.ir.proof.ops import ProofError, draws, is_cast, kind_of, signs_of
from shardweave.ir.sharding.rules import Rule, rule_of
from shardweave.ir.types import shape_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelOp:
    """An op of the global program: the numbers of its operands and its results."""

    op: AtenOp
    operands: tuple[int, ...]
    results: tuple[int, ...]

    @cached_property
    def rule(self) -> Rule:
        return rule_of(self.op)


@dataclass
class ModelExpressions:
    """By number the shape of each expression, the op that makes it, and the terms of a sum. ops:
    those of the program, and of what follows from it, in the order in which they were read."""

    shapes: list[Shape] = field(default_factory=list[Shape])
    makers: list[AtenOp | None] = field(default_factory=list[AtenOp | None])
    sums: dict[int, dict[int, float]] = field(default_factory=dict[int, dict[int, float]])
    ops: list[ModelOp] = field(default_factory=list[ModelOp])
    values: dict[SSAValue, int] = field(default_factory=dict[SSAValue, int])
    places: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    """Of a key the place of its op among all."""
    _known: dict[Hashable, tuple[int, ...]] = field(default_factory=dict[Hashable, tuple[int, ...]])

    @staticmethod
    def of(program: Program) -> ModelExpressions:
        """All expressions of a global program. Linear in its ops."""
        made = ModelExpressions()
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

    def apply(self, op: AtenOp, operands: Sequence[int]) -> tuple[int, ...]:
        """The numbers of an op's results."""
        if is_cast(op):
            return tuple(operands)
        shape, signs = shape_of(op.results[0]), signs_of(op)
        if signs is not None:
            return (self.sum_of(list(zip(operands, signs, strict=True)), shape),)
        product = facts_of(op).product
        if product is None or not product.plain or product.addend is None:
            return self._apply(op, operands)
        if op.value("alpha") != 1 or op.value("beta") != 1:
            return self._apply(op, operands)
        factors = Block(arg_types=[op.operands[i].type for i in product.factors]).args
        plain = create(product.plain, factors, list(op.result_types))
        (made,) = self._apply(plain, [operands[i] for i in product.factors])
        total = self.sum_of([(made, 1.0), (operands[product.addend], 1.0)], shape)
        return self.define(op, operands, (total,))

    def key(self, op: AtenOp, operands: Sequence[int]) -> Hashable:
        """What an op computes of its operands."""
        results = tuple([(shape_of(result), kind_of(result)) for result in op.results])
        return op.name, arguments_of(op), tuple(operands), results

    def _apply(self, op: AtenOp, operands: Sequence[int]) -> tuple[int, ...]:
        key = self.key(op, operands)
        if draws(op):
            key = key, len(self.shapes)
        is_new = key not in self._known
        numbers = self._number(key, [shape_of(result) for result in op.results], op)
        if is_new:
            self._add(op, operands, numbers)
        return numbers

    def _add(self, op: AtenOp, operands: Sequence[int], results: tuple[int, ...]) -> None:
        self.places[self.key(op, operands)] = len(self.ops)
        self.ops.append(ModelOp(op, tuple(operands), results))

    def define(
        self, op: AtenOp, operands: Sequence[int], results: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Let an op that is not known yet give what is."""
        known = self._known.setdefault(self.key(op, operands), results)
        if known is results:
            self._add(op, operands, results)
        elif known != results:
            raise ProofError(f"{op.name} is said to give another value than it does.")
        return results

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
