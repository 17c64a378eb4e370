"""The whole numbers that a rank knows of itself: its position on axes, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.proof.relations.held import ProofAxes, RankNumber, Value


def rank_position(
    names: Sequence[str], axes: ProofAxes, at: dict[str, frozenset[int]]
) -> RankNumber:
    """A rank's position on axes, the first slowest; those of sub-batches have a coordinate."""
    found, weight = RankNumber(()), 1
    for name in reversed(names):
        if name in at:
            (coordinate,) = at[name]
            found = found.plus(RankNumber((), coordinate * weight))
        elif axes.size(name) > 1:
            found = found.plus(RankNumber(((name, weight),)))
        weight *= axes.size(name)
    return found


def index_of(op: AtenOp, operands: Sequence[Value | None]) -> RankNumber | None:
    """What an op computes of whole numbers that a rank knows of itself."""
    if op.name == "aten.full" and shape_of(op.results[0]) == ():
        constant = op.value("fill_value")
        return RankNumber((), constant) if type(constant) is int else None
    numbers = [value for value in operands if isinstance(value, RankNumber)]
    if len(numbers) != len(operands) or not numbers:
        return None
    if op.name == "aten.add.Tensor":
        return numbers[0].plus(numbers[1]) if op.value("alpha") == 1 else None
    if op.name not in ("aten.mul.Scalar", "aten.add.Scalar"):
        return None
    other = op.value("other")
    if type(other) is not int:
        return None
    if op.name == "aten.mul.Scalar":
        return numbers[0].times(other)
    return numbers[0].plus(RankNumber((), other)) if op.value("alpha") == 1 else None
