"""Facts that backends read from a program: shardings held, last uses of values, unique names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from xdsl.ir import BlockArgument, Operation, SSAValue

from shardweave.ir.dialects.dist import StartedOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.staged import STAGE_KINDS
from shardweave.ir.program.storage import storage_of

Key = tuple[str, str]
"""Kind and name of an argument or result: `("param", "wte.weight")`, `("output", "0")`."""


def sharding_held(program: Program, slot: Slot) -> Sharding:
    if not program.is_local:
        return Sharding.replicated(len(shape_of(slot.value)))
    return program.sharding_of_slot(slot)


def last_uses(program: Program) -> dict[Operation, list[SSAValue]]:
    """Map each op to the values to free after it; never the step's arguments or results."""
    kept = {slot.value for slot in program.results}
    kept |= {slot.value for slot in program.arguments if slot.kind not in STAGE_KINDS}
    dying: dict[Operation, list[SSAValue]] = {}
    for value, op in last_touches(program).items():
        if value not in kept:
            dying.setdefault(op, []).append(value)
    return dying


def last_touches(program: Program) -> dict[SSAValue, Operation]:
    return {value: op for op in program.ops for value in (*op.results, *op.operands)}


def completions(
    program: Program, joined: Mapping[SSAValue, Operation] | None = None
) -> dict[Operation, list[Slot]]:
    """Map each op to the gradients that are complete after it, so the caller may take them.

    Neither the gradient's memory nor its parameter's is read or written later, by an op or by a
    message in flight. Leaves out gradients that share memory with other results. joined: the op
    before which a value is joined from partial results. Takes time linear in the ops.
    """
    last = _last_touches_of_memory(program)
    ops = [*program.ops, program.return_op]
    places = {op: place for place, op in enumerate(ops)}
    joins = {value: places[op] for value, op in (joined or {}).items()}
    held = {slot.name: slot.value for slot in program.arguments if slot.kind == "param"}
    complete: dict[int, list[Slot]] = {}
    for slot in program.results:
        if slot.kind == "grad":
            value = slot.value
            touched = last[storage_of(value, program.mesh)]
            place = max(touched, last.get(held.get(slot.name, value), 0), joins.get(value, 0))
            complete.setdefault(place, []).append(slot)
    complete.pop(len(ops) - 1, None)
    return {ops[place]: complete[place] for place in sorted(complete)}


def _last_touches_of_memory(program: Program) -> dict[SSAValue, int]:
    """Map each value that owns memory to the index of the last op that reads or writes it.

    An asynchronous collective reads until its wait. The return reads all results, except for
    gradients that share their memory with no other result.
    """
    ops = [*program.ops, program.return_op]
    places = {op: place for place, op in enumerate(ops)}
    last: dict[SSAValue, int] = {}

    def touch(value: SSAValue, place: int) -> None:
        root = storage_of(value, program.mesh)
        last[root] = max(last.get(root, 0), place)

    for place, op in enumerate(ops[:-1]):
        for value in (*op.operands, *op.results):
            touch(value, place)
        if isinstance(op, StartedOp):
            waits = [places[use.operation] for result in op.results for use in result.uses]
            for value in op.operands:
                touch(value, max(waits, default=len(ops) - 1))
    roots = [storage_of(slot.value, program.mesh) for slot in program.results]
    counts = Counter(roots)
    for slot, root in zip(program.results, roots, strict=True):
        if slot.kind != "grad" or counts[root] > 1 or isinstance(root, BlockArgument):
            touch(root, len(ops) - 1)
    return last


def free_name(word: str, taken: set[str], joint: str = "") -> str:
    """Return `word`, with `joint` and a number appended if it is taken; add it to `taken`."""
    name, count = word, 1
    while name in taken:
        count += 1
        name = f"{word}{joint}{count}"
    taken.add(name)
    return name
