from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.rewrite.slice_lookups import slice_lookups
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class SliceLookupsPass(PassOnProgram):
    """Replace lookups at 0, 1, 2, .. by slices of the table, and their gradients by the slices'.

    So tables of positions are read as they lie, and no kernel finds rows that are known.

    Requires: a local program without regions. Ensures: numerics unchanged, but for the sign of a
    zero: a sum that is left out begins with 0. Linear in the ops.
    """

    name = "slice-lookups"

    def run(self, program: Program) -> None:
        slice_lookups(program)
