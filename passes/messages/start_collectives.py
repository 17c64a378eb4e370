"""start-collectives: each blocking collective becomes a start and a wait."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.rewriter import Rewriter

from shardweave.ir.dialects.annotations import annotate, set_sharding_attrs, sharding_attrs_of
from shardweave.ir.dialects.dist import STARTS, DistOp, WaitOp
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import StageFunction
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram


def started(op: DistOp, kind: type[DistOp]) -> tuple[DistOp, WaitOp]:
    """Create a start, of op class `kind`, and a wait to replace `op`; neither is inserted yet."""
    start = kind.create(
        operands=op.operands,
        result_types=op.result_types,
        properties=op.properties,
        location=op.location,
    )
    wait = WaitOp.create(operands=start.results, result_types=op.result_types)
    annotate(wait, op)
    set_sharding_attrs(wait, sharding_attrs_of(op))
    for result in start.results:
        result.name_hint = "started"
    return start, wait


@dataclass(frozen=True)
class StartCollectivesPass(PassOnProgram):
    """Replace each collective by its `dist.start_*` and a `dist.wait` right after it.

    Requires: a local program without time axes. Ensures: numerics unchanged; the schedule still
    blocks, but another pass can move work between a start and its wait. Linear in the ops.
    """

    name = "start-collectives"

    def run(self, program: Program) -> None:
        times = list(program.mesh.time_names) if program.mesh else []
        if times and not isinstance(program, StageFunction):
            raise ValueError(
                f"the program still has the time axes {times}, whose sub-batches are not "
                "unrolled; run unroll-time-axes first."
            )
        blocking = [op for op in program.ops if isinstance(op, DistOp) and type(op) in STARTS]
        for op in blocking:
            start, wait = started(op, STARTS[type(op)])
            Rewriter.replace_op(op, [start, wait], wait.results)
        if not blocking:
            note(
                "the program has no collective that blocks; shard it first (apply-plan or "
                "plan-<planner>, then preset:partition)."
            )
