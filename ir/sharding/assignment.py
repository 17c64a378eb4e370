"""Choosing which mesh axes shard which factors of one op.

The choice is by priority, not by a guess at speed: a planned weight is never moved; then as many
axes as possible keep sharding the op; then the fewest bytes move, so that the larger tensor stays
where it is. Given the shardings of the operands (and those wanted of the results, if any), the
number of candidates is the product over mesh axes of the number of seats that operands propose for
the axis: a handful.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Literal, NamedTuple

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import DimSharding, Placement, Sharding, fits, ordered
from shardweave.ir.sharding.reshard import UnreachableSharding, reshard
from shardweave.ir.sharding.rules.base import Rule

Seat = tuple[int, int] | Literal["carry"] | None
"""Use of a mesh axis: shard (factor, stride), "carry" a partial sum through the op, or None."""

Price = tuple[int, float, int]
"""Messages, bytes sent by one rank, local steps: compared in this order."""

Cost = tuple[float, int, Price, int]
"""Bytes of planned weights moved, axes that no longer shard the op, price of all resharding, axes
that shard the op though nothing asks for it."""

FREE: Price = (0, 0.0, 0)


class Operand(NamedTuple):
    """An operand in the search for shardings: its global shape, element size in bytes, and
    versions.

    versions: the shardings in which the value exists already, the annotated one first. pinned:
    whether it is a weight that a plan or the user has sharded.
    """

    shape: tuple[int, ...]
    itemsize: int
    versions: tuple[Sharding, ...]
    pinned: bool = False


@dataclass(frozen=True)
class Assignment:
    """The placements of an op's factors, with the shardings of its operands and results."""

    factors: tuple[DimSharding, ...]
    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    cost: Cost


@lru_cache(maxsize=16384)
def assign(
    mesh: Mesh,
    rule: Rule,
    operands: tuple[Operand, ...],
    result_shapes: tuple[tuple[int, ...], ...],
    goals: tuple[Sharding | None, ...],
    hints: tuple[tuple[str, int, int], ...] = (),
) -> Assignment:
    """Find the assignment of lowest cost.

    goals: shardings that results should have (None: free). hints: further candidates (axis, factor,
    stride), known from the consumers of the results.

    Raises UnreachableSharding if a goal is unreduced and no assignment gives such a result.
    """
    return _Question(mesh, rule, operands, result_shapes, goals, hints).best()


@dataclass(frozen=True)
class _Question:
    mesh: Mesh
    rule: Rule
    operands: tuple[Operand, ...]
    result_shapes: tuple[tuple[int, ...], ...]
    goals: tuple[Sharding | None, ...]
    hints: tuple[tuple[str, int, int], ...]

    def best(self) -> Assignment:
        candidates = list(filter(None, map(self.candidate, self.seatings())))
        if not candidates:
            pending = sorted({axis for goal in self.goals if goal for axis in goal.unreduced})
            raise UnreachableSharding(
                f"the result is asked to be unreduced over {pending}, but no sharding of the "
                "op's operands makes it a sum over these axes; remove 'unreduced' from the "
                "annotation."
            )
        return min(candidates, key=lambda choice: choice.cost)

    def seatings(self) -> Iterator[dict[str, Seat]]:
        seats = self.proposed()
        axes = [axis for axis in self.mesh.names if axis in seats]
        for combination in product(*(seats[axis] for axis in axes)):
            yield dict(zip(axes, combination, strict=True))

    def proposed(self) -> dict[str, dict[Seat, None]]:
        """Map each axis to the seats that operands, goals and hints propose, and None."""
        seats: dict[str, dict[Seat, None]] = {}
        for axis, seat in self._proposals():
            seats.setdefault(axis, {})[seat] = None
        for places in seats.values():
            places[None] = None
        return seats

    def _proposals(self) -> Iterator[tuple[str, Seat]]:
        rule = self.rule
        for dims, operand in zip(rule.operands, self.operands, strict=True):
            for version in operand.versions:
                yield from ((p.axis, seat) for p, seat in rule.seats(dims, version.dims))
        for dims, goal in zip(rule.results, self.goals, strict=True):
            if goal is not None:
                yield from ((p.axis, seat) for p, seat in rule.seats(dims, goal.dims))
        yield from ((axis, (factor, stride)) for axis, factor, stride in self.hints)
        for axis in self._carried_axes():
            yield axis, "carry"

    @cached_property
    def _held_axes(self) -> frozenset[str]:
        """Axes of the operands' first versions, the goals and the hints. It costs nothing to drop
        another axis, which only a later version of an operand uses."""
        held = frozenset(axis for axis, _, _ in self.hints)
        held = held.union(*(operand.versions[0].axes for operand in self.operands))
        return held.union(*(goal.axes for goal in self.goals if goal is not None))

    def _carried_axes(self) -> list[str]:
        """Axes over which all operands in `rule.linear` are unreduced sums. Empty if another
        operand is unreduced too: that operand must be reduced anyway."""
        linear = [self.operands[index].versions[0] for index in sorted(self.rule.linear)]
        others = [o for index, o in enumerate(self.operands) if index not in self.rule.linear]
        if not linear or any(s.reduction != "sum" for s in linear):
            return []
        if any(operand.versions[0].unreduced for operand in others):
            return []
        return [axis for axis in linear[0].unreduced if all(axis in s.unreduced for s in linear)]

    def candidate(self, seats: dict[str, Seat]) -> Assignment | None:
        cuts: list[list[Placement]] = [[] for _ in self.rule.factors]
        for axis, seat in seats.items():
            if isinstance(seat, tuple):
                factor, stride = seat
                cuts[factor].append(Placement(axis, self.mesh.size(axis), stride))
        factors = tuple(self.rule.completed(map(ordered, cuts)))
        if not all(map(self.rule.can_cut, range(len(factors)), factors)):
            return None
        carried = tuple(axis for axis, seat in seats.items() if seat == "carry")
        results: list[Sharding] = []
        for index in range(len(self.rule.results)):
            result = self.rule.result(index, factors, carried, self.mesh.names)
            if result is None:
                return None
            results.append(result)
        operands = tuple(
            Sharding(self.rule.dims_of(dims, factors), carried if i in self.rule.linear else ())
            for i, dims in enumerate(self.rule.operands)
        )
        held = self._held_axes
        dropped = sum(seat is None and axis in held for axis, seat in seats.items())
        taken_up = sum(seat is not None and axis not in held for axis, seat in seats.items())
        price = self._price(operands, tuple(results))
        if price is None:
            return None
        pinned, total = price
        return Assignment(factors, operands, tuple(results), (pinned, dropped, total, taken_up))

    def _price(
        self, operands: tuple[Sharding, ...], results: tuple[Sharding, ...]
    ) -> tuple[float, Price] | None:
        """Bytes of planned weights moved, and the price of all resharding; None if impossible."""
        pinned, total = 0.0, FREE
        for operand, wanted in zip(self.operands, operands, strict=True):
            price = price_of(self.mesh, operand, wanted)
            if price is None:
                return None
            total = sum_of(total, price)
            if operand.pinned:
                pinned += price[1]
        # A result is weighed like an operand of its size.
        itemsize = max((operand.itemsize for operand in self.operands), default=4)
        for index, (produced, shape) in enumerate(zip(results, self.result_shapes, strict=True)):
            target = self._target(index, produced)
            price = price_of(self.mesh, Operand(shape, itemsize, (produced,)), target)
            if price is None:
                return None
            total = sum_of(total, price)
        return pinned, total

    def _target(self, index: int, produced: Sharding) -> Sharding:
        """The sharding to price a result for: its goal, else reduced, sharded as hints propose."""
        goal = self.goals[index]
        if goal is not None or not produced.unreduced:
            return produced if goal is None else goal
        cuts: list[DimSharding] = [()] * len(self.rule.factors)
        seats = {axis: (factor, stride) for axis, factor, stride in reversed(self.hints)}
        for axis, (factor, stride) in seats.items():
            if axis in produced.unreduced and produced.reduction == "sum":
                cuts[factor] = (*cuts[factor], Placement(axis, self.mesh.size(axis), stride))
        hinted = self.rule.dims_of(self.rule.results[index], self.rule.completed(cuts))
        dims = tuple(ordered({*a, *b}) for a, b in zip(produced.dims, hinted, strict=True))
        if all(map(fits, dims, self.result_shapes[index])):
            return Sharding(dims)
        return produced.whole()


def sum_of(a: Price, b: Price) -> Price:
    """Add two prices, component by component."""
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def price_of(mesh: Mesh, operand: Operand, wanted: Sharding) -> Price | None:
    """The price to reshard an operand's cheapest version to `wanted`; None if impossible."""
    cheapest = _cheapest(mesh, operand, wanted)
    return None if cheapest is None else cheapest[0]


def cheapest_version(mesh: Mesh, operand: Operand, wanted: Sharding) -> Sharding:
    """The operand's version that is cheapest to reshard to `wanted`. Raises UnreachableSharding if
    no version can be resharded so."""
    cheapest = _cheapest(mesh, operand, wanted)
    if cheapest is None:
        raise UnreachableSharding(
            f"the value is fully reduced over {list(wanted.unreduced)} and cannot become an "
            "unreduced sum again; ask for a sharding without 'unreduced'."
        )
    return operand.versions[cheapest[1]]


def _cheapest(mesh: Mesh, operand: Operand, wanted: Sharding) -> tuple[Price, int] | None:
    """The lowest price to reshard a version to `wanted`, and that version's index, or None."""
    prices: list[tuple[Price, int]] = []
    for index, version in enumerate(operand.versions):
        try:
            steps = reshard(operand.shape, version, wanted, mesh)
        except UnreachableSharding:
            continue
        # A sum over sub-batches is local, as a slice is.
        messages = sum(step.sent_elements > 0 for step in steps)
        sent = sum(step.sent_elements for step in steps) * operand.itemsize
        prices.append(((messages, sent, len(steps) - messages), index))
    return min(prices, default=None)
