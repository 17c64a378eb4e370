"""Facts that backends read from a program: shardings held, last uses of values, unique names."""

from __future__ import annotations

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.staged import STAGE_KINDS

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


def free_name(word: str, taken: set[str], joint: str = "") -> str:
    """Return `word`, with `joint` and a number if it is in `taken`; add the name to `taken`."""
    name, count = word, 1
    while name in taken:
        count += 1
        name = f"{word}{joint}{count}"
    taken.add(name)
    return name
