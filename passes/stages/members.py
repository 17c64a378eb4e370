"""Ops of each stage's functions, and the values that pass between these functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from xdsl.ir import BlockArgument, Operation, SSAValue

from shardweave.ir.dialects.annotations import layer_of, phase_of
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import Direction
from shardweave.ir.program.storage import arguments_behind
from shardweave.passes.stages.batches import MicroBatches
from shardweave.passes.stages.places import Places


@dataclass(eq=False)
class Members:
    """Contents of one stage function.

    given: arguments with their kinds; a `kept` value comes from an earlier function of the stage.
    received: values with the stage that sends them. left: values for later functions of the stage,
    each with a kind; an output that the backward pass reads is left as two kinds. sent: values with
    the stages that they are sent to. returned: results of the step, by kind and name.
    """

    stage: int
    direction: Direction
    ops: dict[Operation, None] = field(default_factory=dict[Operation, None])
    given: dict[SSAValue, str] = field(default_factory=dict[SSAValue, str])
    received: dict[SSAValue, int] = field(default_factory=dict[SSAValue, int])
    left: dict[tuple[SSAValue, str], None] = field(default_factory=dict[tuple[SSAValue, str], None])
    sent: dict[SSAValue, list[int]] = field(default_factory=dict[SSAValue, list[int]])
    returned: dict[tuple[str, str], SSAValue] = field(
        default_factory=dict[tuple[str, str], SSAValue]
    )

    def has(self, value: SSAValue) -> bool:
        """True if the function computes, takes or receives the value."""
        return value.owner in self.ops or value in self.given or value in self.received

    @property
    def is_empty(self) -> bool:
        return not (self.ops or self.received or self.sent or self.returned)

    def send(self, value: SSAValue, stage: int) -> None:
        """Send a value to another stage."""
        goals = self.sent.setdefault(value, [])
        if stage not in goals:
            goals.append(stage)


Key = tuple[int, Direction]


class Membership:
    """Assigns the ops of a program to functions; `functions` has them by (stage, direction).

    at: the coordinates of each stage on the stage axis.
    """

    def __init__(
        self,
        program: Program,
        batches: MicroBatches,
        places: Places,
        at: Sequence[Sequence[int]],
        *,
        splits_weights: bool,
    ) -> None:
        self.program = program
        self.batches = batches
        self.places = places
        self.at = at
        self.kinds = {slot.value: slot.kind for slot in program.arguments}
        self.directions: Sequence[Direction] = (
            ("forward", "inputs", "weights") if splits_weights else ("forward", "backward")
        )
        every: tuple[Direction, ...] = (*self.directions, "share", "after")
        self.functions: dict[Key, Members] = {
            (stage, direction): Members(stage, direction)
            for direction in every
            for stage in range(places.num_stages)
        }
        self.of_op: dict[Operation, Key] = {}
        self.homes: dict[tuple[str, str], int] = {}
        """The stage whose value the step returns, by kind and name of a result."""

    def run(self) -> None:
        self._deal()
        for members in self.functions.values():
            self._demand(members, [value for op in members.ops for value in op.operands])
        self._return()

    # Ops that stand in one stage

    def _deal(self) -> None:
        early = self._on_the_way() if "inputs" in self.directions else set[Operation]()
        for op, stage in self.places.stage.items():
            direction: Direction = "forward"
            if phase_of(op) != "forward":
                direction = self.directions[1 if op in early else -1]
            self.of_op[op] = stage, direction
            self.functions[stage, direction].ops[op] = None

    def _on_the_way(self) -> set[Operation]:
        """The backward ops whose results lead to other stages, or to gradients of inputs."""
        stage, after = self.places.stage, self.batches.after
        outputs = {slot.value for slot in self.program.results if slot.kind == "output"}
        leading: set[Operation] = set()
        for op in reversed(list(self.program.ops)):
            if op in after or phase_of(op) == "forward":
                continue
            users = [use.operation for result in op.results for use in result.uses]
            crosses = op in stage and any(
                stage.get(user, stage[op]) != stage[op] and user not in after for user in users
            )
            is_output = any(result in outputs for result in op.results)
            if crosses or is_output or any(user in leading for user in users):
                leading.add(op)
        return leading

    # What they need

    def _demand(self, members: Members, values: Iterable[SSAValue]) -> None:
        """Make values available in a function: it computes, takes or receives each."""
        stack = list(values)[::-1]
        while stack:
            value = stack.pop()
            if members.has(value):
                continue
            op = self._made_there(value, members)
            if op is not None:
                members.ops[op] = None
                stack += op.operands

    def _made_there(self, value: SSAValue, members: Members) -> Operation | None:
        """The op by which a function itself computes a value; None if it gets it otherwise."""
        op = value.owner
        if isinstance(op, BlockArgument) or not isinstance(op, Operation):
            members.given[value] = self.kinds[value]
        elif value in self.batches.whole or value in self.batches.parts:
            members.given[value] = "whole"
        elif self.places.freedom.get(op) == "free":
            return op
        elif members.direction == "after":
            return self._taken_after(value, op, members)
        else:
            return self._taken(value, op, members)
        return None

    def _taken(self, value: SSAValue, op: Operation, members: Members) -> Operation | None:
        index = self.directions.index(members.direction)
        earlier = (self.functions[members.stage, before] for before in self.directions[:index])
        holder = next((function for function in earlier if function.has(value)), None)
        if holder is not None:
            holder.left[value, "kept"] = None
            members.given[value] = "kept"
        elif op in self.places.freedom:
            return op
        else:
            self._receive(value, self.functions[self.of_op[op]], members)
        return None

    def _receive(self, value: SSAValue, sender: Members, members: Members) -> None:
        if sender.stage == members.stage:
            maker = cast(Operation, value.owner)
            raise ValueError(
                f"{maker.name} (%{value.name_hint}) in layer '{layer_of(maker)}' belongs to the "
                f"{sender.direction} pass of its stage, but the {members.direction} pass, which "
                "runs earlier, reads it; run cut-stages before the pass that moved this op."
            )
        sender.send(value, members.stage)
        members.received[value] = sender.stage

    def _taken_after(self, value: SSAValue, op: Operation, members: Members) -> Operation | None:
        """`op` if the function `after` computes the value; None if another function gives it."""
        if op in self.batches.after:
            return op
        if op in self.places.freedom:
            if value not in self.batches.varying:
                return op
            maker = self.functions[members.stage, "forward"]
            self._demand(maker, [value])
        else:
            maker = self.functions[self.of_op[op]]
        kind = self._kind_of_total(value)
        maker.left[value, kind] = None
        if maker.stage == members.stage:
            members.given[value] = kind
        else:
            sharing = self.functions[maker.stage, "share"]
            sharing.given[value] = kind
            self._receive(value, sharing, members)
        return None

    def _kind_of_total(self, value: SSAValue) -> str:
        """The slot kind of a value of all micro-batches: sum, part (joined), or same."""
        if value in self.batches.terms:
            return "sum"
        return "part" if value in self.batches.varying else "same"

    # What the step returns

    def _return(self) -> None:
        holders = self.holders()
        for slot in self.program.results:
            held = holders.get(("param" if slot.kind == "grad" else slot.kind, slot.name), ())
            home = self._home(slot.value, held)
            goals = {home, *held}
            if slot.kind == "output" and not shape_of(slot.value):
                goals.update(self._one_everywhere(home))
            self.homes[slot.kind, slot.name] = home
            for stage in goals:
                members = self.functions[stage, "after"]
                members.returned[slot.kind, slot.name] = slot.value
                self._demand(members, [slot.value])

    def _one_everywhere(self, home: int) -> Iterable[int]:
        """One stage for each set of coordinates on the stage axis; `home` for its own set."""
        stages = {tuple(places): stage for stage, places in enumerate(self.at)}
        return {**stages, tuple(self.at[home]): home}.values()

    def _home(self, value: SSAValue, held: Iterable[int]) -> int:
        """The stage that computes a result of the step; else the first that holds its parameter."""
        owner = value.owner
        if isinstance(owner, Operation) and owner in self.of_op:
            return self.of_op[owner][0]
        return min(held, default=self.places.num_stages - 1)

    def holders(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """Map each argument (kind, name) to the stages that read it, or a value computed from it
        before the first micro-batch."""
        stages: dict[SSAValue, set[int]] = {}
        for function in self.functions.values():
            for value, kind in function.given.items():
                for argument in arguments_behind(value) if kind == "whole" else [value]:
                    stages.setdefault(argument, set()).add(function.stage)
        return {
            (slot.kind, slot.name): tuple(sorted(stages.get(slot.value, ())))
            for slot in self.program.arguments
        }
