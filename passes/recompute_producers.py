from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.kernel import FusedOp
from shardweave.ir.program import Program
from shardweave.ir.rewrite.recompute_producers import recompute_producers
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class RecomputeProducersPass(PassOnProgram):
    """Let each kernel compute again what it would read, where that saves bytes or a kernel.

    A value that only kernels read, and that follows element by element from values in memory, is
    computed by each of its readers: across phases, messages and products, which no region crosses.
    `matmul=false` as in `fuse-kernels`, which is to follow.

    Requires: a verified program without regions. Ensures: numerics unchanged, bit for bit, op by
    op; `fuse-kernels` with the same option makes regions that move no more bytes, but for a MiB
    where there is a kernel less.
    """

    name = "recompute-producers"
    matmul: bool = True

    def run(self, program: Program) -> None:
        if any(isinstance(op, FusedOp) for op in program.ops):
            raise ValueError("the program has fused regions already; run unfuse-kernels first.")
        if not recompute_producers(program, matmul=self.matmul):
            note("nothing that kernels hand on is cheaper to compute again; leave the pass out.")
