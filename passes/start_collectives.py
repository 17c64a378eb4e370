from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.rewrite.start import start_collectives
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class StartCollectivesPass(PassOnProgram):
    """Replace each collective by its `dist.start_*` and a `dist.wait` right behind it.

    Requires: a local program without time axes. Ensures: numerics unchanged; the schedule is
    still blocking, but another order can now put work between a start and its wait. Linear.
    """

    name = "start-collectives"

    def run(self, program: Program) -> None:
        if not start_collectives(program):
            note(
                "the program has no collective that blocks; shard it first (apply-plan or "
                "plan-<planner>, then preset:partition)."
            )
