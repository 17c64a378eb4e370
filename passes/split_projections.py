from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.sharding.split_projections import split_projections
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class SplitProjectionsPass(PassOnProgram):
    """Compute each part of a fused projection by a linear map of its own, on a slice of its weight.

    Which are split, and in how many parts, a plan's `projections` say, and `apply-plan` writes it
    on the weights (`dist.parts`). Heads that do not divide can then be cut in each part: padding
    after each of them could not be said of the one map's outputs.

    Requires: a global program, before `propagate-shardings`; the map's outputs are read in such
    parts alone. Ensures: numerics unchanged, but for the order of sums over the parts. Linear in
    the ops.
    """

    name = "split-projections"

    def run(self, program: Program) -> None:
        split_projections(program)
