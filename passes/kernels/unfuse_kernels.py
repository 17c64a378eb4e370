"""unfuse-kernels: fused regions are replaced by the ops in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.kernel import FusedOp, inline
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import ops_of_parts, parts_of
from shardweave.passes.program_pass import PassOnProgram


def unfuse(program: Program) -> int:
    """Inline every fused op, and move its ops back to their old places; return how many there were.

    If other passes have changed the program since, and an op at its old place would read a value
    that is not defined yet, each region's ops stay together. Takes time linear in the ops.
    """
    fused = [op for op in program.ops if isinstance(op, FusedOp)]
    places: dict[Operation, int] = {}
    is_known = True
    for op in fused:
        is_known &= bool(op.places)
        given = op.places
        inlined = inline(op)
        places.update(zip(inlined, given, strict=bool(given)))
    order = _original_order(list(program.ops), places) if fused and is_known else None
    if order is not None and _is_in_order(order, program):
        program.reorder(order)
    return len(fused)


def _original_order(ops: list[Operation], places: dict[Operation, int]) -> list[Operation] | None:
    """Order `ops` so that those in `places` have their index and the rest lies between, or None."""
    slots: list[Operation | None] = [None] * len(ops)
    for op, place in places.items():
        if place >= len(ops) or slots[place] is not None:
            return None
        slots[place] = op
    others: Iterator[Operation] = (op for op in ops if op not in places)
    return [next(others) if slot is None else slot for slot in slots]


def _is_in_order(ops: list[Operation], program: Program) -> bool:
    defined: set[SSAValue] = set(program.function.body.block.args)
    for op in ops:
        if any(operand not in defined for operand in op.operands):
            return False
        defined.update(op.results)
    return True


def has_regions(program: Program) -> bool:
    """True if a program, or a function of a program of stages, has fused ops."""
    return any(isinstance(op, FusedOp) for op in ops_of_parts(program))


def require_no_regions(program: Program) -> None:
    """Raise ValueError if the program has fused regions."""
    if has_regions(program):
        raise ValueError("the program has fused regions; run unfuse-kernels before this pass.")


def without_regions(program: Program) -> Program:
    """Return the program, or a copy in which fused ops, also of stage functions, are inlined."""
    if not has_regions(program):
        return program
    copy = program.clone()
    for part in parts_of(copy):
        unfuse(part)
    return copy


@dataclass(frozen=True)
class UnfuseKernelsPass(PassOnProgram):
    """Replace each `kernel.fused` by the ops in its region.

    Requires: a verified program. Ensures: a program without regions; right after `fuse-kernels`,
    the program from before it. Takes time linear in the ops.
    """

    name = "unfuse-kernels"

    def run(self, program: Program) -> None:
        unfuse(program)
