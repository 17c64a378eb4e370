"""Moving reshards up: a value that several uses want in another sharding is resharded once.

Where ops read a value in its producer's sharding, but all consumers of their results want another,
each result would be resharded separately. The consumers' wish is passed back through the ops, by
their sharding rules, to the value that they share. If one reshard of it is cheaper, the value is
resharded, and the ops in between are sharded accordingly. No op loses an axis by this: gathers stay
where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from xdsl.ir import Block, Operation, SSAValue, Use

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.sharding.assignment import FREE, Assignment, Operand, Price, price_of, sum_of
from shardweave.ir.sharding.flow import Flow

LOOKAHEAD = 6
"""Most ops that a wish travels back through: casts, scalings and views of an activation. A higher
limit would only cost time on long chains."""


@dataclass(frozen=True)
class Wish:
    """The sharding in which a consumer wants to read a value. remade: ops between the value and the
    consumer, with their new assignments. price: cost of the reshards of these ops' results that a
    reshard of the value saves."""

    sharding: Sharding
    remade: tuple[tuple[AtenOp, Assignment], ...] = ()
    price: Price = FREE


@dataclass(frozen=True)
class SharedWishes:
    """Reshards a value once at its producer if several consumers want the same sharding.

    assignments: for all ops; changed in place. wishes: shardings that the plan wants of results.
    returned: maps a result's index to the sharding in which it is returned; None if any will do.
    """

    flow: Flow
    assignments: dict[AtenOp, Assignment]
    wishes: Mapping[AtenOp, Sequence[Sharding | None]]
    returned: Callable[[int], Sharding | None]

    def travel(self, ops: Sequence[AtenOp], returned: Sequence[SSAValue]) -> None:
        """Pass the wishes of consumers back to producers. Takes time linear in the ops."""
        moved = {v for i, v in enumerate(returned) if self._is_moved(v, self.returned(i))}
        for op in reversed(ops):
            for result in op.results:
                if result in moved:
                    self._travel_to(result)
            if len(op.results) == 1 and op.results[0] in moved:
                moved.update(op.operands)
                continue
            for value, read in zip(op.operands, self.assignments[op].operands, strict=True):
                if self._is_moved(value, read):
                    moved.add(value)
        for value in moved:
            if isinstance(value.owner, Block):
                self._travel_to(value)

    def _is_moved(self, value: SSAValue, read: Sharding | None) -> bool:
        """True if a use reads a value in another sharding that keeps all of the value's axes."""
        now = self.flow.versions[value][0]
        if read is now or read is None or not now.axes or read.dims == now.dims:
            return False
        return now.axes <= read.axes

    def _travel_to(self, value: SSAValue) -> None:
        """Reshard a value once for several uses, if that costs less than their own reshards."""
        now, by_sharding = self.flow.sharding(value), dict[Sharding, list[Wish]]()
        if now.unreduced:
            return
        for use in _one_each(value):
            wish = self._of_use(use, now, LOOKAHEAD)
            if wish is not None:
                by_sharding.setdefault(wish.sharding, []).append(wish)
        for wanted, wishes in by_sharding.items():
            once = self._price(value, wanted)
            if once is None:
                continue
            before = once if any(not wish.remade for wish in wishes) else FREE
            for wish in wishes:
                before = sum_of(before, wish.price)
            if once < before and once[1] <= before[1]:  # many small messages may join later
                for op, assignment in (pair for wish in wishes for pair in wish.remade):
                    self.assignments[op] = assignment
                    self.flow.versions[op.results[0]] = [assignment.results[0]]
                self.flow.remember(value, wanted)

    def _of_use(self, use: Use, now: Sharding, depth: int) -> Wish | None:
        """The wish that a use has for a value whose sharding is `now`; None if it has no other."""
        op = use.operation
        is_end = not isinstance(op, AtenOp)
        read = self.returned(use.index) if is_end else self.assignments[op].operands[use.index]
        if read is None or read.unreduced or read != now:
            return Wish(read) if read and not read.unreduced else None
        if is_end or depth == 0 or len(op.results) != 1 or self.wishes[op][0] is not None:
            return None
        (result,) = op.results
        if self.flow.sharding(result) != self.assignments[op].results[0]:
            return None  # a sum that is reduced where it is made
        below = self._of_all_uses(result, depth - 1)
        return None if below is None else self._through(op, use, below)

    def _of_all_uses(self, value: SSAValue, depth: int) -> Wish | None:
        """The wish that all uses of a value share; None if they do not agree."""
        now, remade = self.flow.sharding(value), list[tuple[AtenOp, Assignment]]()
        price: Price = FREE
        wanted: Sharding | None = None
        is_moved = False
        for use in _one_each(value):
            wish = self._of_use(use, now, depth)
            if wish is None or wanted not in (None, wish.sharding):
                return None
            wanted = wish.sharding
            price = sum_of(price, wish.price)
            remade += wish.remade
            is_moved |= not wish.remade
        own = self._price(value, wanted) if wanted is not None and is_moved else FREE
        if wanted is None or own is None:
            return None
        return Wish(wanted, tuple(remade), sum_of(price, own))

    def _through(self, op: AtenOp, use: Use, below: Wish) -> Wish | None:
        """Turn `below`, a wish for an op's result, into a wish for its operand, or None."""
        value, old = op.operands[use.index], self.assignments[op]
        if below.price[0] == 0 or not old.results[0].axes <= below.sharding.axes:
            return None
        rule = self.flow.rule(op)
        dims = rule.carry(rule.results[0], rule.operands[use.index], below.sharding.dims)
        if dims is None or dims == old.operands[use.index].dims:
            return None
        wanted = Sharding(dims)
        new = self.flow.assign(op, [below.sharding], moved={value: wanted})
        if new.results[0] != below.sharding:
            return None
        for operand, before, after in zip(op.operands, old.operands, new.operands, strict=True):
            if operand is value:
                if after != wanted:
                    return None
            elif after != before:
                price = price_of(self.flow.mesh, self.flow.operand(operand), after)
                if price is None or price[0] > 0:
                    return None
        return Wish(wanted, ((op, new), *below.remade), below.price)

    def _price(self, value: SSAValue, wanted: Sharding) -> Price | None:
        """The price of resharding a value from its producer's sharding; None if impossible."""
        made = (self.flow.sharding(value),)
        operand = Operand(shape_of(value), dtype_of_value(value).itemsize, made)
        return price_of(self.flow.mesh, operand, wanted)


def _one_each(value: SSAValue) -> Iterator[Use]:
    """The uses of a value; only the first for an ATen op that reads it several times."""
    seen: set[Operation] = set()
    for use in value.uses:
        is_end = not isinstance(use.operation, AtenOp)
        if is_end or use.operation not in seen:
            seen.add(use.operation)
            yield use
