"""Slips in what goes between functions of a program of stages, for tests of the proof."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation

from shardweave.ir.dialects.dist import RecvOp, RunOp, SendOp
from shardweave.ir.dialects.literals import to_attribute
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.staged import StageFunction, functions_of
from shardweave.tests.ir.proof.slips import Slip, in_flight, one

STAGE_SLIPS: dict[str, Slip] = {}
"""By kind: those of a whole program of stages."""

_T = TypeVar("_T")


def stage_slip(function: Slip) -> Slip:
    STAGE_SLIPS[function.__name__] = function
    return function


def _pair(
    rng: random.Random, items: Sequence[_T], is_like: Callable[[_T, _T], bool]
) -> tuple[_T, _T] | None:
    """Two items that are alike."""
    return one(rng, [(a, b) for a in items for b in items if a is not b and is_like(a, b)])


def _runs(program: Program) -> list[RunOp]:
    return [op for op in program.ops if isinstance(op, RunOp)]


def _all_ops(program: Program) -> list[Operation]:
    return [op for function in functions_of(program).values() for op in function.ops]


def _swap(first: Operation, second: Operation, name: str) -> None:
    a, b = first.properties[name], second.properties[name]
    first.properties[name], second.properties[name] = b, a


@stage_slip
def run_is_lost(program: Program, rng: random.Random) -> bool:
    """So the gradient of one micro-batch is not there."""
    op = one(rng, [op for op in _runs(program) if not op.results])
    if op is None:
        return False
    op.detach()
    op.erase()
    return True


@stage_slip
def run_is_doubled(program: Program, rng: random.Random) -> bool:
    """So the gradient of one micro-batch counts twice."""
    op = one(rng, [op for op in _runs(program) if not op.function.startswith("forward")])
    if op is None or (block := op.parent_block()) is None:
        return False
    block.insert_op_after(op.clone(), op)
    return True


@stage_slip
def run_is_on_another_micro_batch(program: Program, rng: random.Random) -> bool:
    op = one(rng, [op for op in _runs(program) if op.micro_batch is not None])
    if op is None or op.micro_batch is None:
        return False
    op.properties["micro_batch"] = to_attribute((op.micro_batch + 1) % 4)
    return True


@stage_slip
def run_is_at_another_stage(program: Program, rng: random.Random) -> bool:
    op = one(rng, [op for op in _runs(program) if op.micro_batch is not None])
    if op is None:
        return False
    op.properties["at"] = to_attribute((op.at + 1) % program.needed_mesh().num_stages)
    return True


@stage_slip
def run_is_moved_to_the_front(program: Program, rng: random.Random) -> bool:
    runs = _runs(program)
    op = one(rng, [op for op in runs[1:] if not op.function.startswith("forward_0")])
    if op is None or (block := op.parent_block()) is None:
        return False
    op.detach()
    block.insert_op_before(op, runs[0])
    return True


@stage_slip
def message_goes_to_another_stage(program: Program, rng: random.Random) -> bool:
    op = one(rng, [op for op in _all_ops(program) if isinstance(op, SendOp)])
    if op is None:
        return False
    op.properties["to"] = to_attribute(op.to + 1)
    return True


@stage_slip
def messages_are_exchanged(program: Program, rng: random.Random) -> bool:
    """Two of equal type have each other's names where they are sent."""
    sends = [op for op in _all_ops(program) if isinstance(op, SendOp)]
    pair = _pair(rng, sends, lambda a, b: a.to == b.to and a.value.type == b.value.type)
    if pair is None:
        return False
    _swap(*pair, "name")
    return True


@stage_slip
def receives_are_exchanged(program: Program, rng: random.Random) -> bool:
    """Two of equal type have each other's names where they are received."""
    receives = [op for op in _all_ops(program) if isinstance(op, RecvOp)]
    pair = _pair(
        rng,
        receives,
        lambda a, b: (
            a.parent_block() is b.parent_block()
            and a.source == b.source
            and a.value.type == b.value.type
        ),
    )
    if pair is None:
        return False
    _swap(*pair, "name")
    return True


@stage_slip
def another_value_is_sent(program: Program, rng: random.Random) -> bool:
    """What is sent is another value of its type that is there."""
    for function in _shuffled(program, rng):
        ops = list(function.ops)
        for op in [op for op in ops if isinstance(op, SendOp)]:
            there = [*function.function.body.block.args]
            there += [result for other in ops[: ops.index(op)] for result in other.results]
            moving = in_flight(ops)
            same = [v for v in there if v.type == op.value.type and v not in (op.value, *moving)]
            if same:
                op.operands[0] = rng.choice(same)
                return True
    return False


def _shuffled(program: Program, rng: random.Random) -> list[StageFunction]:
    functions = list(functions_of(program).values())
    rng.shuffle(functions)
    return functions


def _rename(function: StageFunction, renames: dict[Slot, str], *, results: bool) -> None:
    slots = function.results if results else function.arguments
    values = {
        index: StringAttr(new)
        for index, slot in enumerate(slots)
        for old, new in renames.items()
        if slot.kind == old.kind and slot.name == old.name
    }
    change = function.set_result_attributes if results else function.set_argument_attributes
    change("dist.name", values)


def _exchanged_names(program: Program, rng: random.Random, *kinds: str, results: bool) -> bool:
    """Let two slots of equal type of some function have each other's names."""
    for function in _shuffled(program, rng):
        slots = [
            slot
            for slot in (function.results if results else function.arguments)
            if slot.kind in kinds
        ]
        pair = _pair(rng, slots, lambda a, b: a.kind == b.kind and a.value.type == b.value.type)
        if pair is not None:
            first, second = pair
            _rename(function, {first: second.name, second: first.name}, results=results)
            return True
    return False


@stage_slip
def kept_values_are_exchanged(program: Program, rng: random.Random) -> bool:
    return _exchanged_names(program, rng, "kept", results=False)


@stage_slip
def values_are_kept_under_other_names(program: Program, rng: random.Random) -> bool:
    return _exchanged_names(program, rng, "kept", "sum", results=True)


@stage_slip
def parameters_are_exchanged(program: Program, rng: random.Random) -> bool:
    return _exchanged_names(program, rng, "param", "input", results=False)


@stage_slip
def gradients_are_exchanged(program: Program, rng: random.Random) -> bool:
    return _exchanged_names(program, rng, "grad", results=True)


@stage_slip
def sums_are_of_the_last_micro_batch(program: Program, rng: random.Random) -> bool:
    """A gradient is that of one micro-batch: what was a sum is what the last one gave."""
    sums = [
        (function, slot)
        for function in functions_of(program).values()
        for slot in function.results
        if slot.kind == "sum"
    ]
    place = one(rng, sums)
    if place is None:
        return False
    (giver, given), same = place, StringAttr("same")
    for function in functions_of(program).values():
        if function.stage == giver.stage:
            found = {i: same for i, s in enumerate(function.arguments) if s.name == given.name}
            function.set_argument_attributes("dist.kind", found)
    index = [slot.name for slot in giver.results].index(given.name)
    giver.set_result_attributes("dist.kind", {index: same})
    return True


@stage_slip
def what_is_the_same_is_summed(program: Program, rng: random.Random) -> bool:
    """What each micro-batch has is added up, as often as there are."""
    for function in _shuffled(program, rng):
        kept = [slot for slot in function.results if slot.kind in ("same", "kept", "sum")]
        pair = _pair(rng, kept, lambda a, b: b.kind == "sum" and a.value.type == b.value.type)
        if pair is not None:
            other, own = pair
            index = next(i for i, slot in enumerate(function.results) if slot.name == own.name)
            function.return_op.operands[index] = other.value
            return True
    return False
