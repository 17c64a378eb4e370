"""Building and inserting new ops, with the annotations and location of an existing op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from shardweave.ir.dialects.annotations import (
    annotate,
    properties_without,
    set_sharding_attrs,
    sharding_attrs_of,
)
from shardweave.ir.dialects.aten import create
from shardweave.ir.dialects.literals import Literal, to_attribute
from shardweave.ir.dialects.syntax import Operands

_Op = TypeVar("_Op", bound=Operation)


@dataclass(frozen=True)
class Builder:
    """Inserts ops one after another; if op `like` is given, with its annotations and location."""

    add: Callable[[Operation], object]
    like: Operation | None

    @staticmethod
    def before(place: Operation, like: Operation | None = None) -> Builder:
        """A builder that inserts before the op `place`; `like` defaults to it."""
        return Builder.at(InsertPoint.before(place), like or place)

    @staticmethod
    def after(place: Operation, like: Operation | None = None) -> Builder:
        """A builder that inserts after the op `place`; `like` defaults to it."""
        return Builder.at(InsertPoint.after(place), like or place)

    @staticmethod
    def at_end(block: Block, like: Operation | None = None) -> Builder:
        """A builder that appends to a block."""
        return Builder(block.add_op, like)

    @staticmethod
    def at(point: InsertPoint, like: Operation | None) -> Builder:
        """A builder that inserts at a point of a block."""
        return Builder(lambda op: Rewriter.insert_op(op, point), like)

    def insert(self, op: _Op, hint: str | SSAValue | None = "") -> _Op:
        """Insert an op and return it. hint: the name for its results, or a value with that name; by
        default the op's own name."""
        if self.like is not None:
            annotate(op, self.like)
        name = hint.name_hint if isinstance(hint, SSAValue) else hint
        if hint == "":
            name = op.name.split(".")[1].lstrip("_")
        for result in op.results:
            result.name_hint = name
        self.add(op)
        return op

    def aten(
        self,
        name: str,
        operands: Operands,
        type_: Attribute | None = None,
        hint: str | SSAValue | None = "",
        **values: Literal,
    ) -> SSAValue:
        """Insert an aten op; return its only result. type_: its type, by default operand 0's."""
        if type_ is None:
            first = operands[0]
            assert isinstance(first, SSAValue), f"give the result type of {name}"
            type_ = first.type
        return self.insert(create(name, operands, [type_], values), hint).results[0]


def remade(
    op: _Op, operands: Sequence[SSAValue], result_types: Sequence[Attribute], **values: Literal
) -> _Op:
    """Copy an op with other operands, result types and arguments `values`. The copy has no
    shardings and is not inserted."""
    properties = properties_without(op, "sharding", "wanted")
    properties.update({name: to_attribute(value) for name, value in values.items()})
    return type(op).create(
        operands=operands, result_types=result_types, properties=properties, location=op.location
    )


def on_some(op: _Op, indices: Sequence[int]) -> _Op:
    """Copy an op with only its operands and results at `indices`; the copy is not inserted."""
    some = remade(op, [op.operands[i] for i in indices], [op.results[i].type for i in indices])
    shardings = sharding_attrs_of(op)
    set_sharding_attrs(some, shardings and [shardings[i] for i in indices])
    for index, result in zip(indices, some.results, strict=True):
        result.name_hint = op.results[index].name_hint
    return some
