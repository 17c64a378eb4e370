from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.rewrite.unroll import unroll_time_axes
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class UnrollTimeAxesPass(PassOnProgram):
    """Clone each op once per coordinate on the time axes; what does not vary stays single.

    A collective over a time axis becomes local arithmetic: an all-reduce a sum of the copies,
    an all-gather a concatenation, a slice a slice. Copies carry `copy`, their coordinate.

    Requires: a local program. Ensures: the mesh has no time axis; numerics unchanged; the
    copies of an op stand side by side, in the order of their coordinates. Linear in the
    resulting ops. The time axis that `keep` names is left: that of a pipeline's micro-batches,
    which `cut-stages` makes a schedule of.
    """

    name = "unroll-time-axes"
    keep: str = ""

    def run(self, program: Program) -> None:
        if program.mesh is None or not set(program.mesh.time_names) - {self.keep}:
            note(
                "the mesh has no time axis; run split-batch before propagate-shardings, or leave "
                "the pass out."
            )
        unroll_time_axes(program, self.keep)
