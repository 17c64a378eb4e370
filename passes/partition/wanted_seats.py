"""Dims on which the consumers of a partial sum, a few linear ops later, are sharded over its axis.

A sum that must be reduced is better reduce-scattered to the dim on which its consumers hold the
axis. The search follows a value's uses through ops that are linear in it, and through ops that
scale it, such as rotary embeddings of keys; the sum is reduced before the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from xdsl.dialects import func
from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.mesh.placement import Placement, Sharding
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.program import Slot, wishes_of
from shardweave.ir.sharding.flow import Flow
from shardweave.ir.sharding.rules.base import Dims, Rule

LOOKAHEAD = 6
"""Most linear ops that the search follows: a gradient passes a view, a permutation, a cast and an
addition or two before it meets a tensor that holds its axis. More would only cost time."""

Seat = tuple[int, Placement]
"""A dim of a value, and the placement on it."""


@dataclass(frozen=True)
class WantedSeats:
    """Finds the dims on which a value's consumers need an axis, given the shardings known so far.

    result_slots: the program's results. stored: maps a result to its parameter's stored sharding.
    """

    flow: Flow
    result_slots: Sequence[Slot]
    stored: Callable[[Slot], Sharding | None]

    def hints(self, op: AtenOp) -> Iterator[tuple[str, int, int]]:
        """Yield (axis, factor, stride) for each axis that `op` sums over and its consumers shard
        by.

        The factor of the op's rule and the stride place the axis in the result as consumers hold
        it. The op reads an unreduced operand, or would itself sum over a sharded dim, as an
        embedding's gradient does over tokens when the embedding is sharded by rows.
        """
        rule = self.flow.rule(op)
        for axis in _stopped_axes(rule, tuple(map(self.flow.sharding, op.operands))):
            for result, dims in zip(op.results, rule.results, strict=True):
                wanted = self.of(result, axis)
                seat = None if wanted is None else rule.seat(dims[wanted[0]], wanted[1])
                if seat is not None:
                    yield (axis, *seat)

    def of(self, value: SSAValue, axis: str, depth: int = LOOKAHEAD) -> Seat | None:
        """The seat of `axis` in a consumer at most `depth` ops away, on `value`; None if none."""
        if depth == 0:
            return None
        for use in value.uses:
            user = use.operation
            if isinstance(user, func.ReturnOp):
                stored = self.stored(self.result_slots[use.index])
                seat = None if stored is None else stored.seat_of(axis)
            elif isinstance(user, AtenOp):
                seat = self._at(user, use.index, axis, depth)
            else:
                seat = None
            if seat is not None:
                return seat
        return None

    def _at(self, user: AtenOp, index: int, axis: str, depth: int) -> Seat | None:
        rule, operands = self.flow.rule(user), tuple(user.operands)
        for other, dims in zip(operands, rule.operands, strict=True):
            if other is operands[index]:
                continue
            versions = self.flow.versions.get(other)
            if versions is None or not versions[0].placed_axes or other in self.flow.pinned:
                continue
            held = versions[0].seat_of(axis)
            if held is not None:
                return _carried(rule, held, dims, rule.operands[index])
        passing = (*rule.linear, *spec_of(user).scaled)
        if len(user.results) != 1 or index not in passing:
            return None
        wish = wishes_of(user, self.flow.program)[0]
        # Where a plan places a value, nothing below it counts.
        below = wish.seat_of(axis) if wish else self.of(user.results[0], axis, depth - 1)
        if below is None:
            return None
        return _carried(rule, below, rule.results[0], rule.operands[index])


def _carried(rule: Rule, seat: Seat, source: Dims, goal: Dims) -> Seat | None:
    """Translate a seat on a value with factors `source` to one with factors `goal`, or None."""
    dim, placement = seat
    cut = [(placement,) if index == dim else () for index in range(len(source))]
    dims = rule.carry(source, goal, cut)
    return None if dims is None else Sharding(dims).seat_of(placement.axis)


@lru_cache(maxsize=16384)
def _stopped_axes(rule: Rule, operands: tuple[Sharding, ...]) -> list[str]:
    pending = {a for sharding in operands for a in sharding.unreduced}
    placed = {a for sharding in operands for a in sharding.placed_axes}
    travels = {
        a for a in pending if rule.linear and all(a in operands[i].unreduced for i in rule.linear)
    }
    return sorted((pending - placed - travels) | _summed_axes(rule, operands))


def _summed_axes(rule: Rule, operands: Sequence[Sharding]) -> set[str]:
    kept = {factor for factors in rule.results[0] for factor in factors}
    return {
        placement.axis
        for dims, sharding in zip(rule.operands, operands, strict=True)
        for placement, seat in rule.seats(dims, sharding.dims)
        if seat is not None and seat[0] not in kept
    }
