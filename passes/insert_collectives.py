from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.sharding.padding import notes_on_padding
from shardweave.ir.sharding.partition import partition
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class InsertCollectivesPass(PassOnProgram):
    """Give every value the type of its shards, and lower every `dist.reshard`.

    A reshard becomes the collectives and slices that bring its operand to its sharding, with the
    reshard's layer and phase; ops that need more than local types on shards (offsets into a shard,
    masked lookups) get their local form. Nothing is chosen.

    Requires: a propagated global program (`propagate-shardings`), perhaps edited by hand. Ensures:
    a local program (`dist.local`), equal to the global one on the whole mesh; ops keep `sharding`.
    Linear in the ops.
    """

    name = "insert-collectives"

    def run(self, program: Program) -> None:
        partition(program)
        for text in notes_on_padding(program):
            note(text)
