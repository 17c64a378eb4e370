"""Check that a program's arguments and results match those of the program to prove it against."""

from __future__ import annotations

from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.proof.model.expressions import Expressions
from shardweave.ir.proof.ops import ProofError, dtype_kind_of
from shardweave.ir.proof.relations.held import Fill, Held, Relation, stands_for

Key = tuple[str, str]
"""Kind and name of an argument or a result."""


def argument_of(table: Expressions, local: Program, slot: Slot) -> Relation:
    """Relate an argument of a local program to the global program's, by its declared sharding."""
    sharding = local.sharding_of_slot(slot)
    shape = sharding.global_shape(shape_of(slot.value))
    number = table.argument(slot.kind, slot.name, slot.value)
    if table.shapes[number] != shape:
        raise ProofError(
            f"{slot.kind} '{slot.name}' is a shard of a tensor of shape {shape}, but the other "
            f"program's tensor has shape {table.shapes[number]}; correct its type or its "
            "dist.sharding."
        )
    # What a rank is given has zeros as its padding.
    return Relation(Held(number, shape, sharding).filled(Fill(0, frozenset(range(len(shape))))))


def is_declared(sharding: Sharding, declared: Sharding) -> bool:
    """True if `sharding` equals `declared`; dims along which the value is constant may differ."""
    same_sum = (sharding.unreduced, sharding.reduction) == (declared.unreduced, declared.reduction)
    return same_sum and all(map(stands_for, sharding.dims, declared.dims))


def check_signature(program: Program, against: Program) -> None:
    """Raise ProofError unless two programs have the same arguments and results. Two local programs
    must also have equal shardings; those of a global program are only hints."""
    _check_models(program, against)
    _check_results(program, against)
    known = {(slot.kind, slot.name): slot for slot in against.arguments}
    is_alike = program.is_local == against.is_local
    if is_alike and program.is_local and program.mesh != against.mesh:
        raise ProofError(
            f"the programs are for different meshes: {program.mesh} and {against.mesh}."
        )
    for slot in program.arguments:
        twin = known[slot.kind, slot.name]
        if dtype_kind_of(twin.value) != dtype_kind_of(slot.value):
            raise ProofError(
                f"{slot.kind} '{slot.name}' has elements of {dtype_kind_of(slot.value)}, but "
                f"{dtype_kind_of(twin.value)} in the other program; give it the same dtype."
            )
        same_cut = not program.is_local or (
            program.sharding_of_slot(slot) == against.sharding_of_slot(twin)
        )
        same_parts = not is_alike or (shape_of(slot.value) == shape_of(twin.value) and same_cut)
        if not same_parts:
            raise ProofError(
                f"{slot.kind} '{slot.name}' has another dist.sharding than in the other program."
            )


def _check_models(program: Program, against: Program) -> None:
    """Raise ProofError if one program lacks an argument of the other, or global shapes differ.
    `program` may lack inputs and buffers of `against`."""
    own, wanted = (
        {(slot.kind, slot.name): side.global_shape_of(slot) for slot in side.arguments}
        for side in (program, against)
    )
    added = [key for key in own if key not in wanted]
    lacking = [key for key in wanted if key not in own and key[0] == "param"]
    for keys, which in ((added, "the program"), (lacking, "the other program")):
        if keys:
            raise ProofError(
                f"the programs are of different models: {_first_of(keys)} only in {which}; "
                "compare it with the program captured from the same model, under the same names."
            )
    others = [key for key, shape in own.items() if wanted[key] != shape]
    if others:
        raise ProofError(
            f"the programs are of different models or batches: {_first_of(others)} of another "
            f"shape, globally {own[others[0]]} in the program and {wanted[others[0]]} in the "
            "other program; compare it with the program captured from the same model and batch, "
            "or correct its type or its dist.sharding."
        )


def _first_of(keys: list[Key]) -> str:
    kind, name = keys[0]
    more = f" and {len(keys) - 1} more arguments are" if len(keys) > 1 else " is"
    return f"{kind} '{name}'{more}"


def _check_results(program: Program, against: Program) -> None:
    keys = [(slot.kind, slot.name) for slot in program.results]
    wanted = [(slot.kind, slot.name) for slot in against.results]
    for kind, name in wanted:
        if (kind, name) not in keys:
            raise ProofError(
                f"{kind} '{name}' is a result of the other program only; return it here too."
            )
    for kind, name in keys:
        if (kind, name) not in wanted or keys.count((kind, name)) > 1:
            raise ProofError(
                f"the program returns {kind} '{name}', but the other program does not, or it "
                "returns it twice; remove this result from its return op."
            )
