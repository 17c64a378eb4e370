"""Where a sum is wanted in shards: the seats that its uses, a few linear ops down, give an axis.

A sum that is reduced anyway is better scattered to where its uses hold the axis. Asking for that
follows the uses of a value through ops that are linear in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from xdsl.dialects import func
from xdsl.ir import SSAValue

from shardweave.ir.aten import AtenOp
from shardweave.ir.placement import Placement, Sharding
from shardweave.ir.program import Slot, wishes_of
from shardweave.ir.sharding.flow import Flow
from shardweave.ir.sharding.rules import Rule

LOOKAHEAD = 6
"""Linear ops that are looked through: a gradient passes a view, a permutation, a cast and an
addition or two on its way to what holds its axis. More would only cost time on long chains."""

Seat = tuple[int, Placement]
"""A dim of a value, and the placement on it."""


class WantedSeats:
    """Answers where uses want an axis, given the shardings known so far.

    result_slots: the program's results. stored: from a result to how its parameter is stored.
    """

    def __init__(
        self,
        flow: Flow,
        result_slots: Sequence[Slot],
        stored: Callable[[Slot], Sharding | None],
    ) -> None:
        self.flow = flow
        self.result_slots = result_slots
        self.stored = stored

    def hints(self, op: AtenOp) -> Iterator[tuple[str, int, int]]:
        """Seats (axis, factor, stride) for axes of a sum, read off what its uses hold.

        Either the sum comes with an operand, or the op itself would make one over shards: that
        of an embedding's gradient over tokens, where the embedding is cut along its rows.
        """
        rule = self.flow.rule(op)
        for axis in _stopped_axes(rule, tuple(map(self.flow.sharding, op.operands))):
            for result, dims in zip(op.results, rule.results, strict=True):
                wanted = self.of(result, axis)
                seat = None if wanted is None else rule.seat(dims[wanted[0]], wanted[1])
                if seat is not None:
                    yield (axis, *seat)

    def of(self, value: SSAValue, axis: str, depth: int = LOOKAHEAD) -> Seat | None:
        """Where the uses of a value, at most `depth` ops down, hold `axis`, if they do."""
        if depth == 0:
            return None
        for use in value.uses:
            user = use.operation
            if isinstance(user, func.ReturnOp):
                seat = _seat_in(self.stored(self.result_slots[use.index]), axis)
            elif isinstance(user, AtenOp):
                seat = self._at(user, use.index, axis, depth)
            else:
                seat = None
            if seat is not None:
                return seat
        return None

    def _at(self, user: AtenOp, index: int, axis: str, depth: int) -> Seat | None:
        rule = self.flow.rule(user)
        for other, dims in zip(user.operands, rule.operands, strict=True):
            versions = self.flow.versions.get(other)
            if versions is None or other is user.operands[index] or other in self.flow.pinned:
                continue
            held = _seat_in(versions[0], axis)
            if held is not None:
                return _on_operand(rule, index, rule.seat(dims[held[0]], held[1]), held[1])
        if len(user.results) != 1 or index not in rule.linear:
            return None
        wish = wishes_of(user, self.flow.program)[0]
        # Where a plan places a value, nothing below it counts.
        below = _seat_in(wish, axis) if wish else self.of(user.results[0], axis, depth - 1)
        if below is None:
            return None
        return _on_operand(rule, index, rule.seat(rule.results[0][below[0]], below[1]), below[1])


def _seat_in(sharding: Sharding | None, axis: str) -> Seat | None:
    """The seat that a sharding gives an axis."""
    for dim, placements in enumerate(sharding.dims if sharding is not None else ()):
        for placement in placements:
            if placement.axis == axis:
                return dim, placement
    return None


def _on_operand(
    rule: Rule, index: int, seat: tuple[int, int] | None, placement: Placement
) -> Seat | None:
    """A factor's seat as one of an operand's dims."""
    if seat is None:
        return None
    cuts = rule.one_cut(seat[0], Placement(placement.axis, placement.size, seat[1]))
    for dim, placements in enumerate(rule.dims_of(rule.operands[index], cuts)):
        if placements:
            return dim, placements[0]
    return None


@lru_cache(maxsize=16384)
def _stopped_axes(rule: Rule, operands: tuple[Sharding, ...]) -> list[str]:
    """The axes of sums that do not travel through an op, and of those that the op itself makes."""
    pending = {a for sharding in operands for a in sharding.unreduced}
    placed = {a for sharding in operands for a in sharding.placed_axes}
    travels = {
        a for a in pending if all(a in operands[i].unreduced for i in rule.linear) and rule.linear
    }
    return sorted((pending - placed - travels) | _summed_axes(rule, operands))


def _summed_axes(rule: Rule, operands: Sequence[Sharding]) -> set[str]:
    """The axes that cut a factor which the first result lacks."""
    kept = {factor for factors in rule.results[0] for factor in factors}
    summed: set[str] = set()
    for dims, sharding in zip(rule.operands, operands, strict=True):
        for factors, placements in zip(dims, sharding.dims, strict=True):
            for placement in placements:
                seat = rule.seat(factors, placement)
                if seat is not None and seat[0] not in kept:
                    summed.add(placement.axis)
    return summed
