from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.rewrite.redundancy import delete_redundant_collectives
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class DeleteRedundantCollectivesPass(PassOnProgram):
    """Replace each recomputed collective by the kept result of its forward twin.

    A twin is found by value numbering: the same collective on equal operands. Its result is
    kept for the backward pass instead; what only fed the recomputed collective dies with it
    (Oases: the recomputed all-reduce and the row-parallel product before it; AxoNN: the second
    all-gather of a weight). With `budget` (bytes on one device, beyond what is kept already)
    the collectives that save most traffic per byte kept go first. `kind`, such as `all_gather`,
    leaves all others as they are (AxoNN keeps gathered weights alone). What was kept and saved is
    logged, and stands in `Program.stats()`.

    Requires: a local program before `start-collectives`. Ensures: numerics unchanged, bit
    for bit. Linear in the ops.
    """

    name = "delete-redundant-collectives"
    budget: int | None = None
    kind: str = ""

    def run(self, program: Program) -> None:
        deleted, redundant = delete_redundant_collectives(program, self.budget, self.kind)
        if not redundant:
            note(
                "no recomputed collective repeats an earlier one; run rematerialize before it, "
                "behind insert-collectives, on a program that is sharded."
            )
        elif not deleted:
            note(f"budget={self.budget} bytes keep none of {redundant} results; give more.")
