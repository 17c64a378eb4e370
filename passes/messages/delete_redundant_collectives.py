"""Deletion of recomputed collectives that repeat an earlier one."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.annotations import arguments_of, phase_of
from shardweave.ir.dialects.dist import KINDS, CollectiveOp, DistOp, StartedOp, sent_bytes
from shardweave.ir.dialects.types import num_bytes, tensor_type_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.ops.registry import is_random
from shardweave.ir.program.dead_code import remove_dead_ops
from shardweave.ir.program.program import Program
from shardweave.ir.program.storage import kept_values, storage_of
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Redundant:
    """A recomputed collective and the earlier one that gave the same values.

    is_read: whether the return depends on it, so that the earlier one's results must be kept.
    """

    op: DistOp
    twin: DistOp
    sent_bytes: float
    is_read: bool


def _new_bytes(redundant: _Redundant, kept: set[SSAValue]) -> int:
    """Bytes kept for the backward pass only because of this deletion."""
    if not redundant.is_read:
        return 0
    return sum(
        num_bytes(tensor_type_of(value))
        for value in redundant.twin.results
        if storage_of(value) not in kept
    )


def _find(program: Program) -> list[_Redundant]:
    """Recomputed collectives that equal an earlier one on equal operands, in program order."""
    mesh = program.mesh or Mesh()
    live = _live_ops(program)
    number: dict[SSAValue, SSAValue] = {}
    first: dict[tuple[object, ...], Operation] = {}
    redundant: list[_Redundant] = []
    for op in program.ops:
        if is_random(op):
            continue
        operands = tuple(number.get(v, v) for v in op.operands)
        key = (op.name, operands, arguments_of(op, "copy"), tuple(op.result_types))
        twin = first.setdefault(key, op)
        if twin is op:
            continue
        for mine, others in zip(op.results, twin.results, strict=True):
            number[mine] = others
        if isinstance(op, CollectiveOp) and phase_of(op) == "recompute":
            assert isinstance(twin, DistOp)
            redundant.append(_Redundant(op, twin, sent_bytes(op, mesh), op in live))
    return redundant


def _live_ops(program: Program) -> set[Operation]:
    live: set[Operation] = {program.return_op}
    for op in reversed(list(program.ops)):
        if any(use.operation in live for result in op.results for use in result.uses):
            live.add(op)
    return live


@dataclass(frozen=True)
class DeleteRedundantCollectivesPass(PassOnProgram):
    """Replace each recomputed collective by the kept result of its forward twin.

    A twin is found by value numbering: the same collective on equal operands. Its result is
    kept for the backward pass instead; what only fed the recomputed collective dies with it
    (Oases: the recomputed all-reduce and the row-parallel product before it; AxoNN: the second
    all-gather of a weight). With `budget` (bytes on one device, beyond what is kept already)
    the collectives that save most traffic per byte kept go first. `kind`, such as `all_gather`,
    leaves all others as they are (AxoNN keeps gathered weights alone). What was kept and saved is
    logged, and is in `Program.stats()`.

    Requires: a local program before `start-collectives`. Ensures: numerics unchanged, bit
    for bit. Takes time linear in the ops.
    """

    name = "delete-redundant-collectives"
    budget: int | None = None
    kind: str = ""

    def run(self, program: Program) -> None:
        if self.kind and self.kind not in KINDS:
            known = ", ".join(sorted(KINDS))
            raise ValueError(f"kind '{self.kind}' is not a kind of collective; use one of {known}.")
        if self.budget is not None and self.budget < 0:
            raise ValueError(f"budget={self.budget} bytes; use a budget >= 0.")
        if any(isinstance(op, StartedOp) for op in program.ops):
            raise ValueError(
                "the program has started collectives already; run delete-redundant-collectives "
                "before start-collectives."
            )
        wanted = f"dist.{self.kind}" if self.kind else None
        redundant = [each for each in _find(program) if wanted in (None, each.op.name)]
        deleted = self._delete(program, redundant)
        if not redundant:
            note(
                "no recomputed collective repeats an earlier one; run insert-collectives and "
                "then rematerialize before this pass, on a sharded program."
            )
        elif not deleted:
            note(
                f"budget={self.budget} bytes keep none of {len(redundant)} redundant results; "
                "give more."
            )

    def _delete(self, program: Program, redundant: list[_Redundant]) -> int:
        """Replace collectives, most traffic saved per kept byte first; returns how many."""
        kept = set(kept_values(program))
        redundant.sort(key=lambda r: -r.sent_bytes / max(_new_bytes(r, kept), 1))
        total, saved, deleted = 0, 0.0, 0
        for each in redundant:
            extra = _new_bytes(each, kept)
            if self.budget is not None and total + extra > self.budget:
                continue
            for old, new in zip(each.op.results, each.twin.results, strict=True):
                old.replace_all_uses_with(new)
                if each.is_read:
                    kept.add(storage_of(new))
            total += extra
            saved += each.sent_bytes
            deleted += 1
        removed = remove_dead_ops(program)
        logger.info(
            "deleted %d of %d recomputed collectives and %d ops that fed them: %d bytes kept, "
            "%d bytes less to send per rank",
            deleted, len(redundant), removed - deleted, total, saved,
        )  # fmt: skip
        return deleted
