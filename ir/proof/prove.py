"""Showing that a program computes what another does, without running it."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.ir import SSAValue

from shardweave.ir.mesh import Mesh
from shardweave.ir.placement import Sharding
from shardweave.ir.program import Program, Slot
from shardweave.ir.proof.cuts import stands_for
from shardweave.ir.proof.diagnose import explain
from shardweave.ir.proof.expressions import Expressions, ProofError
from shardweave.ir.proof.held import Axes, Held, Part, Value
from shardweave.ir.proof.walk import Walk
from shardweave.ir.staged import is_staged
from shardweave.ir.types import shape_of

Key = tuple[str, str]
"""Kind and name of an argument or a result."""


@dataclass(frozen=True)
class Proof:
    """What was shown. num_ops: of the program; num_expressions: of the one that it was proved
    against; relations: how each value of a local program relates to that."""

    num_ops: int
    num_results: int
    num_expressions: int
    walk: Walk | None = None

    def __str__(self) -> str:
        return (
            f"proved: {self.num_ops} ops compute the {self.num_results} results of the program "
            f"that they were compared with ({self.num_expressions} expressions)."
        )


def prove(local: Program, *, against: Program) -> Proof:
    """Show that a program computes what another one does, on every mesh and for all values.

    local: the program of one rank against the global one; or two programs of one kind. Numbers
    are real, and factor rules and collectives are as defined (docs/proof.md). Linear in the ops.

    Raises ProofError, which names the first op that computes nothing of the other program, what
    was wanted, and the likely cause.
    """
    for program in (local, against):
        if is_staged(program):
            raise ProofError(
                "a program of stages is not proved; prove the program before it is cut."
            )
    if against.is_local and not local.is_local:
        raise ProofError(
            "the program is global, and the one to compare it with local; give them the other way "
            "round."
        )
    table = Expressions()
    values = table.read(against.function.body.block, _arguments(table, against))
    wanted = {(slot.kind, slot.name): (values[slot.value], slot) for slot in against.results}
    _check_results(local, wanted)
    if local.is_local == against.is_local:
        return _same_level(local, table, wanted)
    return _prove_local(local, against, table, {key: n for key, (n, _) in wanted.items()})


def _arguments(table: Expressions, program: Program) -> dict[SSAValue, int]:
    return {
        slot.value: table.argument(slot.kind, slot.name, slot.value) for slot in program.arguments
    }


def _check_results(local: Program, wanted: dict[Key, tuple[int, Slot]]) -> None:
    keys = [(slot.kind, slot.name) for slot in local.results]
    for kind, name in wanted:
        if (kind, name) not in keys:
            raise ProofError(f"{kind} '{name}' is not returned; return it.")
    for kind, name in keys:
        if (kind, name) not in wanted:
            raise ProofError(f"{kind} '{name}' is none of the other program's results; drop it.")


def _same_level(program: Program, table: Expressions, wanted: dict[Key, tuple[int, Slot]]) -> Proof:
    """Two global programs, or two local ones: the same expressions."""
    num_known = table.num_read
    values = table.read(program.function.body.block, _arguments(table, program))
    for slot in program.results:
        number, other = wanted[slot.kind, slot.name]
        found = values[slot.value]
        if found != number:
            raise ProofError(explain_same(table, num_known, slot, found, number))
        if program.sharding_of_slot(slot) != program.sharding_of_slot(other) and program.is_local:
            raise ProofError(f"{slot.kind} '{slot.name}' is declared in other shards.")
    return Proof(_count(program), len(program.results), num_known)


def explain_same(table: Expressions, num_known: int, slot: Slot, found: int, wanted: int) -> str:
    maker = table.describe(found)
    new = "computes what the other program does not" if found >= num_known else "is another value"
    return (
        f"{slot.kind} '{slot.name}' is the result of {maker}, which {new}; expected that of "
        f"{table.describe(wanted)}."
    )


def _count(program: Program) -> int:
    return sum(1 for _ in program.ops)


def _prove_local(
    local: Program, against: Program, table: Expressions, wanted: dict[Key, int]
) -> Proof:
    axes = Axes(local.mesh or Mesh())
    walk = Walk(table, axes)
    for slot in local.arguments:
        walk.values[slot.value] = _argument(table, local, slot)
    walk.block(local.ops)
    for slot in local.results:
        problem = _problem(walk, local, slot, wanted[slot.kind, slot.name])
        if problem is not None:
            raise ProofError(problem)
    return Proof(_count(local), len(local.results), table.num_read, walk)


def _argument(table: Expressions, local: Program, slot: Slot) -> Value:
    """An argument as it is declared: the part of the global one that its sharding says."""
    count = len(table.shapes)
    sharding = local.sharding_of_slot(slot)
    shape = sharding.global_shape(shape_of(slot.value))
    number = table.argument(slot.kind, slot.name, slot.value)
    if number >= count:
        raise ProofError(f"{slot.kind} '{slot.name}' is no argument of the other program.")
    if table.shapes[number] != shape:
        raise ProofError(
            f"{slot.kind} '{slot.name}' has parts of a tensor of shape {shape}, expected "
            f"{table.shapes[number]}; correct its type or its dist.sharding."
        )
    return Part(Held(number, shape, sharding))


def _problem(walk: Walk, local: Program, slot: Slot, wanted: int) -> str | None:
    """Why a result is not what it should be; None if it is."""
    value = walk.values[slot.value]
    declared = local.sharding_of_slot(slot)
    if isinstance(value, Part) and value.held.number == wanted and value.held.layout is None:
        held = value.held
        if _is_declared(held.sharding, declared) and not value.at:
            return None
    return explain(walk, slot, declared, wanted)


def _is_declared(sharding: Sharding, declared: Sharding) -> bool:
    same_sum = (sharding.unreduced, sharding.reduction) == (declared.unreduced, declared.reduction)
    return same_sum and all(map(stands_for, sharding.dims, declared.dims))
