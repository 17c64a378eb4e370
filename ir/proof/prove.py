"""Prove that a program computes the same results as another, without running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import Rewriter

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import set_sharding_attrs, sharding_attrs_of
from shardweave.ir.dialects.aten import create
from shardweave.ir.dialects.builder import Builder
from shardweave.ir.dialects.dist_base import StartedOp
from shardweave.ir.dialects.dist_rows import AddRowsOp, FetchRowsOp, RowsOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of, tensor_type
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program, Slot, require_program
from shardweave.ir.program.staged import is_staged, ops_of_parts, parts_of
from shardweave.ir.proof.diagnose import (
    explain_collective,
    explain_mismatch,
    explain_same,
    relation_of,
)
from shardweave.ir.proof.model.expressions import Expressions
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.relations.held import ProofAxes, Relation
from shardweave.ir.proof.signature import Key, argument_of, check_signature, is_declared
from shardweave.ir.proof.stages.stages import axes_of_stages, relate_stages
from shardweave.ir.proof.walk import Walk


def with_whole_tables(program: Program) -> Program:
    """Replace sends of table rows by all-gathers and reduce-scatters of whole tables."""
    if not any(isinstance(op, RowsOp) for op in ops_of_parts(program)):
        return program
    program = program.clone()
    for part in parts_of(program):
        for op in list(part.ops):
            if isinstance(op, FetchRowsOp):
                _gather(op)
            elif isinstance(op, AddRowsOp):
                _scatter(op)
    return program


def _gather(op: FetchRowsOp) -> None:
    table, numbers, routes = op.operands
    size, *rest = shape_of(table)
    type_ = tensor_type((shape_of(routes)[1], *rest), dtype_of_value(table))
    new = Builder.before(op)
    whole = dist.create_dist(
        dist.AllGatherOp, [table], [type_], axes=list(op.axes), dim=0, block=size
    )
    new.insert(whole)
    rows = create("aten.index.Tensor", [whole.results[0], [numbers]], [op.results[0].type])
    new.insert(rows, op.results[0])
    _replace(op, rows)


def _scatter(op: AddRowsOp) -> None:
    rows, numbers, routes = op.operands
    shape = shape_of(routes)[1], *shape_of(rows)[1:]
    new = Builder.before(op)
    whole = create(
        "aten.embedding_dense_backward", [rows, numbers],
        [tensor_type(shape, dtype_of_value(rows))],
        {"padding_idx": -1, "scale_grad_by_freq": False},
    )  # fmt: skip
    new.insert(whole)
    made = dist.create_dist(
        dist.ReduceScatterOp, [whole.results[0]], [op.results[0].type], axes=list(op.axes), dim=0,
        block=shape_of(op.results[0])[0],
    )  # fmt: skip
    new.insert(made, op.results[0])
    _replace(op, made)


def _replace(op: RowsOp, made: Operation) -> None:
    """Replace an op, and the wait for it if it is started, by `made`."""
    set_sharding_attrs(made, sharding_attrs_of(op))
    waits = [use.operation for use in op.results[0].uses] if isinstance(op, StartedOp) else []
    for done in (*waits, op):
        done.results[0].replace_all_uses_with(made.results[0])
        Rewriter.erase_op(done)


@dataclass(frozen=True)
class Proof:
    """The result of a proof. num_ops: of the proved program; num_expressions: of the program it was
    compared with; walk: the relations of a local program's values."""

    num_ops: int
    num_results: int
    num_expressions: int
    walk: Walk | None = None

    def relations(self, program: Program) -> list[tuple[str, str]]:
        """Return (name, relation in words) for each value of the local `program`; [] if global."""
        walk = self.walk
        if walk is None:
            return []
        ops = [op for part in parts_of(program) for op in part.ops]
        values = [result for op in ops for result in op.results]
        return [(f"%{v.name_hint}", relation_of(walk, v)) for v in values]

    def __str__(self) -> str:
        return (
            f"proved: {self.num_ops} ops compute the {self.num_results} results of the program "
            f"that they were compared with ({self.num_expressions} expressions)."
        )


def prove(local: Program, *, against: Program) -> Proof:
    """Prove that `local` computes the same results as `against`, for all values.

    local: a program of one rank or of stages, if `against` is global; else one of the same kind.
    Numbers are taken as real; factor rules and collectives are trusted as defined (docs/proof.md).
    Takes time linear in the ops of all functions, plus the runs of a staged program.

    Raises ProofError, which names the first op that matches nothing in `against`, the expected
    value, and the likely cause.
    """
    require_program(local, against)
    if against.is_local and (not local.is_local or is_staged(against) or is_staged(local)):
        raise ProofError(
            "a local program (of one rank) can only be compared with another local one without "
            "stages; to prove a staged or global program, give the global program as `against`."
        )
    local = with_whole_tables(local)
    table = Expressions()
    values = table.read(against.function.body.block, _arguments_of(table, against))
    table.num_read = len(table.shapes)
    check_signature(local, against)
    if local.is_local != against.is_local:
        numbers = {(slot.kind, slot.name): values[slot.value] for slot in against.results}
        return _prove_local(local, table, numbers)
    wanted = {(slot.kind, slot.name): (values[slot.value], slot) for slot in against.results}
    return _same_level(local, table, wanted)


def _arguments_of(table: Expressions, program: Program) -> dict[SSAValue, int]:
    return {
        slot.value: table.argument(slot.kind, slot.name, slot.value) for slot in program.arguments
    }


def _same_level(
    program: Program, table: Expressions, wanted: Mapping[Key, tuple[int, Slot]]
) -> Proof:
    """Prove two global or two local programs equal: their results have equal expressions."""
    values = table.read(program.function.body.block, _arguments_of(table, program))
    for slot in program.results:
        number, other = wanted[slot.kind, slot.name]
        if values[slot.value] != number:
            raise ProofError(explain_same(table, values, slot, number))
        if program.is_local and slot.sharding_attr != other.sharding_attr:
            raise ProofError(
                f"{slot.kind} '{slot.name}' has another dist.sharding than in the other program."
            )
    return Proof(_count(program), len(program.results), table.num_read)


def _count(program: Program) -> int:
    return sum(1 for part in parts_of(program) for _ in part.ops)


def _prove_local(local: Program, table: Expressions, wanted: Mapping[Key, int]) -> Proof:
    walk, results = _walked_stages(local, table) if is_staged(local) else _walked(local, table)
    for part in parts_of(local):
        problem = explain_collective(walk, part.ops)
        if problem is not None:
            raise ProofError(problem)
    for part, slot in results:
        problem = _problem(walk, part, slot, wanted[slot.kind, slot.name])
        if problem is not None:
            raise ProofError(problem)
    return Proof(_count(local), len(local.results), table.num_read, walk)


def _walked(local: Program, table: Expressions) -> tuple[Walk, Sequence[tuple[Program, Slot]]]:
    """Relate all values of a program of one rank. Also returns its results."""
    walk = Walk(table, ProofAxes(local.mesh or Mesh()))
    for slot in local.arguments:
        walk.values[slot.value] = argument_of(table, local, slot)
    walk.sub_batches(local.ops)
    walk.block(local.function.body.block.ops)
    return walk, [(local, slot) for slot in local.results]


def _walked_stages(
    local: Program, table: Expressions
) -> tuple[Walk, Sequence[tuple[Program, Slot]]]:
    walk = Walk(table, axes_of_stages(local))
    return walk, relate_stages(local, walk)


def _problem(walk: Walk, part: Program, slot: Slot, wanted: int) -> str | None:
    """Explain why a result differs from expression `wanted`, as declared; None if it does not."""
    value, declared = walk.values[slot.value], part.sharding_of_slot(slot)
    if isinstance(value, Relation) and value.held.number == wanted and value.held.layout is None:
        if is_declared(value.held.sharding, declared) and not value.at:
            return None
    return explain_mismatch(walk, slot, declared, wanted)
