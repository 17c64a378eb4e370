"""Writing chosen shardings into a global program: a `dist.reshard` wherever a value changes shards.

Each op reads its operands in the shardings of its assignment. If the producer's differs, one
reshard serves all uses that need the same sharding. It stands before the first of them or, if the
result has a goal (such as a gradient's stored sharding), right after the producer. A view whose
operand exists in the right sharding is recomputed instead, which is free. `stored_weights` tells
where weights that are stored in finer shards are gathered. Keys and values that attention gathers
along the sequence are treated alike: the backward pass gathers them again, so that devices keep
only shards of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from xdsl.dialects import func
from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from shardweave.ir.dialects.annotations import (
    follow_makers,
    phase_of,
    set_phase,
    set_shardings,
    set_wanted_attrs,
)
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.builder import Builder
from shardweave.ir.dialects.dist import ReshardOp, create_dist
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.ops.registry import first_of_attention, is_attention
from shardweave.ir.program.program import USED, Program, Slot
from shardweave.ir.sharding.assignment import Assignment
from shardweave.ir.sharding.flow import Flow, aten_ops
from shardweave.passes.partition.stored_weights import StoredWeights

Version = tuple[SSAValue, Sharding]


@dataclass(frozen=True)
class Chosen:
    """The assignment chosen for an op, and goals to which its results are resharded at once.
    is_wish: for each goal, whether the plan asks for it."""

    assignment: Assignment
    goals: tuple[Sharding, ...]
    is_wish: tuple[bool, ...]


def place_reshards(program: Program, chosen: dict[AtenOp, Chosen]) -> None:
    """Write the chosen shardings and reshards into a global program. Takes time linear in the ops.

    Requires `dist.sharding` on arguments and results. Ensures: numerics unchanged; every op carries
    the `sharding` of its results; no `wanted` and no `dist.used` remains.
    """
    _Placing(program, chosen).run()


class _Placing:
    def __init__(self, program: Program, chosen: dict[AtenOp, Chosen]) -> None:
        self.program = program
        self.chosen = chosen
        self.flow = Flow(program)
        self.weights = StoredWeights(self.flow)
        self.made: dict[Version, SSAValue] = {}
        self.passed: dict[Version, ReshardOp] = {}
        """Intermediate shardings of reshards of several steps, each with its reshard."""
        self.keys: set[SSAValue] = set()
        """Keys and values that attention of the forward pass gathers."""
        self.keys_again: set[SSAValue] = set()
        """Keys and values that attention of the backward pass gathers."""
        self.before: Operation = program.return_op
        """The op before which ops are added."""
        self.is_backward = False
        self.is_made_again = False
        self.slots = program.results
        self.returned: dict[SSAValue, list[Slot]] = {}
        for slot in self.slots:
            self.returned.setdefault(slot.value, []).append(slot)

    def run(self) -> None:
        for slot in self.program.arguments:
            self.made[slot.value, self.flow.stored[slot.value]] = slot.value
        dropped: list[AtenOp] = []
        for op in aten_ops(self.program):
            if self.weights.is_view(op):
                dropped.append(op)
                continue
            if not self.is_backward and phase_of(op) != "forward":
                self.is_backward = True
                self._free(self.weights.free(), self.weights.stored)
                self._free(self.keys, {v: self.flow.sharding(v) for v in self.keys})
            self._op(op)
        last = self.before = self.program.return_op
        for slot in self.slots:
            if (slot.value, self.program.sharding_of_slot(slot)) not in self.made:
                self._bring(slot.value, last)
        last.operands = [
            self._version(slot.value, self.program.sharding_of_slot(slot), last, index)
            for index, slot in enumerate(self.slots)
        ]
        for op in reversed(dropped):
            Rewriter.erase_op(op)
        indices = range(len(self.program.arguments))
        self.program.set_argument_attributes(USED, dict.fromkeys(indices))

    def _op(self, op: AtenOp) -> None:
        """Reshard an op's operands as its assignment says, and its results to their goals."""
        chosen = self.chosen[op]
        is_alone = [result.has_one_use() for result in op.results]
        self.before = op
        operands = self._operands(op)
        if operands != list(op.operands):
            op.operands = operands
        follow_makers(op)  # what the backward pass computes of forward values, in shards of its own
        set_wanted_attrs(op, None)
        self._define(op, op, chosen.assignment.results)
        assert op.next_op is not None
        self.before = op.next_op
        for index, (result, goal) in enumerate(zip(op.results, chosen.goals, strict=True)):
            self._settle(result, goal, op, chosen.is_wish[index])
            for slot in self.returned.get(result, []) if is_alone[index] else []:
                wanted = self.program.sharding_of_slot(slot)
                self._version(result, wanted, op, why=_returned(slot))

    def _operands(self, op: AtenOp) -> list[SSAValue]:
        for value in op.operands:
            self._bring(value, op)
        wanted = self.chosen[op].assignment.operands
        if is_attention(op):
            first = first_of_attention(op)
            pairs = zip(op.operands[first + 1 : first + 3], wanted[first + 1 :], strict=False)
            gathered = {
                v for v, sharding in pairs if sharding.dims[2] != self.flow.sharding(v).dims[2]
            }
            (self.keys_again if self.is_backward else self.keys).update(gathered)
        return [
            self._version(value, sharding, op, index)
            for index, (value, sharding) in enumerate(zip(op.operands, wanted, strict=True))
        ]

    def _define(self, original: AtenOp, op: Operation, shardings: Sequence[Sharding]) -> None:
        """Annotate `op`, the original or a copy, and record the shardings of its results."""
        shapes = [shape_of(result) for result in original.results]
        set_shardings(op, shardings, shapes)
        self.flow.define(original, shardings)
        for old, new, sharding in zip(original.results, op.results, shardings, strict=True):
            self.made[old, sharding] = new

    def _settle(self, value: SSAValue, goal: Sharding, op: Operation, is_wish: bool) -> None:
        """Reshard a result to `goal` right after its producer; later reshards start from `goal`."""
        produced = self.flow.sharding(value)
        if produced == goal:
            return
        why = "the plan wants it so" if is_wish else f"several ops read {_sum_of(produced)}"
        self._version(value, goal, op, why=why)
        # A version made by viewing another version of the operand is not listed yet.
        others = [version for version in self.flow.versions[value] if version != goal]
        self.flow.versions[value] = [goal, *others]

    # Stored weights

    def _bring(self, value: SSAValue, user: Operation) -> None:
        """Gather a stored weight, or repeat a view of one, before `user`, if it is freed."""
        if not self.weights.lacks(value):
            return
        outer, self.is_made_again = self.is_made_again, self.weights.is_made_again(value)
        if value in self.weights.stored:
            self._gather(value, user)
        else:
            view = value.owner
            assert isinstance(view, AtenOp)
            copy = self._copy(view, self._operands(view))
            self._define(view, copy, self.chosen[view].assignment.results)
        self.is_made_again = outer

    def _gather(self, value: SSAValue, user: Operation) -> None:
        """Reshard a weight from its stored sharding to the sharding that ops read."""
        if isinstance(value.owner, AtenOp):
            self.flow.define(value.owner, self.chosen[value.owner].goals)
        used = self.flow.sharding(value)
        again = " again" if self.is_made_again else ""
        shards = self._shards(value)
        why = f"a weight in stored shards is used{again}"
        self.made[value, used] = self._reshard(value, shards, used, user, why).results[0]

    def _shards(self, value: SSAValue) -> SSAValue:
        """The stored shards of a weight: an argument, or a cast of one."""
        stored = self.weights.stored[value]
        shards = self.made.get((value, stored))
        if shards is None:
            cast = value.owner
            assert isinstance(cast, AtenOp)
            copy = self._copy(cast, [self._shards(cast.operands[0])])
            set_shardings(copy, [stored], [shape_of(value)])
            shards = self.made[value, stored] = copy.results[0]
        return shards

    def _free(self, freed: Set[SSAValue], kept: Mapping[SSAValue, Sharding]) -> None:
        """Forget versions of values except those in `kept`; the backward pass makes them again."""
        for value in freed:
            self.flow.versions[value] = self.flow.versions[value][:1]
        for value, sharding in list(self.made):
            if value in freed and sharding != kept.get(value):
                del self.made[value, sharding]
        for version in [version for version in self.passed if version[0] in freed]:
            del self.passed[version]

    # Versions

    def _version(
        self, value: SSAValue, wanted: Sharding, user: Operation, index: int = 0, why: str = ""
    ) -> SSAValue:
        """The value in sharding `wanted`; adds a reshard unless that version exists already."""
        known = self.made.get((value, wanted))
        if known is not None:
            return known
        if (value, wanted) in self.passed:
            return self._split(value, wanted)
        origin = self.flow.origin(value, wanted)
        if origin is not None:
            return self._viewed(value, self._version(*origin, user, index, why), wanted)
        version, steps = self.flow.steps(value, wanted)
        # Start at the last step that another use has taken already.
        for step in reversed(steps):
            if (value, step.after) in self.made or (value, step.after) in self.passed:
                version = step.after
                break
        source = self._existing(value, version)
        why = why or self._reason(value, wanted, user, index)
        op = self._reshard(value, source, wanted, user, why)
        for step in steps:
            key = (value, step.after)
            if key not in self.made and key not in self.passed:
                if self.flow.remember(value, step.after) and step.after != wanted:
                    self.passed[key] = op
        self.made[value, wanted] = op.results[0]
        return op.results[0]

    def _reason(self, value: SSAValue, wanted: Sharding, user: Operation, index: int) -> str:
        """The reason for resharding an operand of `user`, in words."""
        if isinstance(user, func.ReturnOp):
            return _returned(self.slots[index])
        if value in self.keys_again:
            return f"{user.name} reads it in these shards again"
        produced = self.flow.sharding(value)
        if any(axis not in wanted.unreduced for axis in produced.unreduced):
            return f"{_sum_of(produced)} meets {user.name}"
        return f"{user.name} reads it in these shards"

    def _split(self, value: SSAValue, wanted: Sharding) -> SSAValue:
        """Split a reshard via sharding `wanted` in two; returns the value in between."""
        second = self.passed[value, wanted]
        outer = self.before, self.is_made_again
        self.before, self.is_made_again = second, False
        first = self._reshard(value, second.operands[0], wanted, second, second.why)
        self.before, self.is_made_again = outer
        second.operands = [first.results[0]]
        on_the_way = [version for version, op in self.passed.items() if op is second]
        for version in on_the_way[: on_the_way.index((value, wanted))]:
            self.passed[version] = first
        del self.passed[value, wanted]
        self.made[value, wanted] = first.results[0]
        return first.results[0]

    def _existing(self, value: SSAValue, version: Sharding) -> SSAValue:
        """A version that needs no message: an existing one, or a view of an existing one."""
        known = self.made.get((value, version))
        if known is not None:
            return known
        if (value, version) in self.passed:
            return self._split(value, version)
        source = next(old for new, old in self.flow.moved_versions(value) if new == version)
        return self._viewed(value, self._existing(self.flow.views[value][1], source), version)

    def _viewed(self, value: SSAValue, operand: SSAValue, version: Sharding) -> SSAValue:
        """Repeat a view on a version of its operand; returns the new version of its result."""
        view = value.owner
        assert isinstance(view, AtenOp)
        copy = self._copy(view, [operand])
        set_shardings(copy, [version], [shape_of(value)])
        self.made[value, version] = copy.results[0]
        return copy.results[0]

    # New ops

    def _copy(self, op: AtenOp, operands: Sequence[SSAValue]) -> AtenOp:
        """Add a copy of an op that reads other operands."""
        copy = op.clone_without_regions(dict(zip(op.operands, operands, strict=True)))
        set_wanted_attrs(copy, None)
        self._add(copy)
        return copy

    def _reshard(
        self, value: SSAValue, source: SSAValue, wanted: Sharding, user: Operation, why: str
    ) -> ReshardOp:
        op = create_dist(ReshardOp, [source], [value.type], why=why)
        producer = value.owner
        is_end = isinstance(user, func.ReturnOp)
        like = producer if is_end and isinstance(producer, Operation) else user
        set_shardings(op, [wanted], [shape_of(value)])
        Builder(self._add, like).insert(op, value)
        if value in self.keys_again:
            set_phase(op, "recompute")
        return op

    def _add(self, op: Operation) -> None:
        if self.is_made_again:
            set_phase(op, "recompute")
        follow_makers(op)
        Rewriter.insert_op(op, InsertPoint.before(self.before))


def _sum_of(sharding: Sharding) -> str:
    """Describe an unreduced sharding: `a sum pending over tensor`."""
    kind = "sum" if sharding.reduction == "sum" else "maximum"
    return f"a {kind} pending over {', '.join(sharding.unreduced)}"


def _returned(slot: Slot) -> str:
    return f"{slot.kind} '{slot.name}' is returned in these shards"
