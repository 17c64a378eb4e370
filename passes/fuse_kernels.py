"""fuse-kernels: gather ops into regions that one generated kernel computes."""

from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.kernel import FusedOp
from shardweave.ir.program import Program
from shardweave.ir.rewrite.grow_regions import grown_units, write_region
from shardweave.ir.sharding.flow import is_propagated
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class FuseKernelsPass(PassOnProgram):
    """Put ops that exchange or share much data into regions, each to be one kernel.

    Regions grow greedily: of all pairs whose union one kernel can compute (`ir.iteration_space`),
    the one that saves most bytes of memory traffic is merged first. A region never reaches across a
    collective, its start or its wait, from one phase or sub-batch into another, and the ops that
    stay outside keep their order; each unit has a place at which all it needs is defined and
    nothing that it gives was wanted yet, so that there are no cycles. `matmul=false` leaves
    matrix products to the library.

    Requires: a verified program without regions, not between `propagate-shardings` and
    `insert-collectives`. Ensures: numerics unchanged; `unfuse-kernels`
    gives back the same program. Takes n log n steps for n ops: an op has few neighbours and a
    region few ops.
    """

    name = "fuse-kernels"
    matmul: bool = True

    def run(self, program: Program) -> None:
        if any(isinstance(one, FusedOp) for one in program.ops):
            raise ValueError("the program has fused regions already; run unfuse-kernels first.")
        if not program.is_local and is_propagated(program):
            raise ValueError(
                "the program is propagated but not partitioned, and a region of it would have no "
                "sharding; run insert-collectives first."
            )
        units = grown_units(program, matmul=self.matmul)
        for unit in units:
            write_region(unit)
        if not units:
            note(
                "no two ops that a kernel can compute share data, so that nothing is fused; leave "
                "the pass out."
            )
