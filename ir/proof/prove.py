"""Showing that a program computes what another does, without running it."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.ir import SSAValue

from shardweave.ir.mesh import Mesh
from shardweave.ir.placement import Sharding
from shardweave.ir.program import Program, Slot
from shardweave.ir.proof.cuts import stands_for
from shardweave.ir.proof.diagnose import explain, explain_collective, explain_same, relation_of
from shardweave.ir.proof.expressions import Expressions, ProofError, kind_of
from shardweave.ir.proof.held import Held, ProofAxes, Relation, Value
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

    def relations(self, program: Program) -> list[tuple[str, str]]:
        """For each value of the local program that was proved: its name, and what it is."""
        walk = self.walk
        if walk is None:
            return []
        values = [result for op in program.ops for result in op.results]
        return [(f"%{v.name_hint}", relation_of(walk, v)) for v in values]

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
    table.num_read = len(table.shapes)
    wanted = {(slot.kind, slot.name): (values[slot.value], slot) for slot in against.results}
    _check_results(local, wanted)
    _check_kinds(local, against)
    if local.is_local == against.is_local:
        _check_signature(local, against)
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
        if (kind, name) not in wanted or keys.count((kind, name)) > 1:
            raise ProofError(
                f"{kind} '{name}' is none of the other program's results, or is returned twice; "
                "drop it."
            )


def _check_kinds(local: Program, against: Program) -> None:
    """Raises ProofError for an argument whose elements are not those of the other program's."""
    known = {(slot.kind, slot.name): slot.value for slot in against.arguments}
    for slot in local.arguments:
        other = known.get((slot.kind, slot.name))
        if other is None:
            raise ProofError(f"{slot.kind} '{slot.name}' is no argument of the other program.")
        if kind_of(other) != kind_of(slot.value):
            raise ProofError(
                f"{slot.kind} '{slot.name}' has elements of {kind_of(slot.value)}, expected "
                f"{kind_of(other)}."
            )


def _check_signature(program: Program, other: Program) -> None:
    """Raises ProofError unless two programs of one kind take arguments in equal parts."""
    if program.is_local and program.mesh != other.mesh:
        raise ProofError(f"the program is for mesh {program.mesh}, the other for {other.mesh}.")
    known = {(slot.kind, slot.name): slot for slot in other.arguments}
    for slot in program.arguments:
        twin = known[slot.kind, slot.name]
        same_parts = not program.is_local or (
            program.sharding_of_slot(slot) == other.sharding_of_slot(twin)
        )
        if shape_of(slot.value) != shape_of(twin.value) or not same_parts:
            raise ProofError(f"{slot.kind} '{slot.name}' is taken in other parts than declared.")


def _same_level(program: Program, table: Expressions, wanted: dict[Key, tuple[int, Slot]]) -> Proof:
    """Two global programs, or two local ones: the same expressions."""
    values = table.read(program.function.body.block, _arguments(table, program))
    for slot in program.results:
        number, other = wanted[slot.kind, slot.name]
        if values[slot.value] != number:
            raise ProofError(explain_same(table, values, slot, number))
        if program.is_local and slot.sharding_attr != other.sharding_attr:
            raise ProofError(f"{slot.kind} '{slot.name}' is declared in other shards.")
    return Proof(_count(program), len(program.results), table.num_read)


def _count(program: Program) -> int:
    return sum(1 for _ in program.ops)


def _prove_local(
    local: Program, against: Program, table: Expressions, wanted: dict[Key, int]
) -> Proof:
    axes = ProofAxes(local.mesh or Mesh())
    walk = Walk(table, axes)
    for slot in local.arguments:
        walk.values[slot.value] = _argument(table, local, slot)
    walk.block(local.ops)
    problem = explain_collective(walk, local.ops)
    if problem is not None:
        raise ProofError(problem)
    for slot in local.results:
        problem = _problem(walk, local, slot, wanted[slot.kind, slot.name])
        if problem is not None:
            raise ProofError(problem)
    return Proof(_count(local), len(local.results), table.num_read, walk)


def _argument(table: Expressions, local: Program, slot: Slot) -> Value:
    """An argument as it is declared: the part of the global one that its sharding says."""
    sharding = local.sharding_of_slot(slot)
    shape = sharding.global_shape(shape_of(slot.value))
    number = table.argument(slot.kind, slot.name, slot.value)
    if table.shapes[number] != shape:
        raise ProofError(
            f"{slot.kind} '{slot.name}' has parts of a tensor of shape {shape}, expected "
            f"{table.shapes[number]}; correct its type or its dist.sharding."
        )
    return Relation(Held(number, shape, sharding))


def _problem(walk: Walk, local: Program, slot: Slot, wanted: int) -> str | None:
    """Why a result is not what it should be; None if it is."""
    value = walk.values[slot.value]
    declared = local.sharding_of_slot(slot)
    if isinstance(value, Relation) and value.held.number == wanted and value.held.layout is None:
        held = value.held
        if _is_declared(held.sharding, declared) and not value.at:
            return None
    return explain(walk, slot, declared, wanted)


def _is_declared(sharding: Sharding, declared: Sharding) -> bool:
    same_sum = (sharding.unreduced, sharding.reduction) == (declared.unreduced, declared.reduction)
    return same_sum and all(map(stands_for, sharding.dims, declared.dims))
