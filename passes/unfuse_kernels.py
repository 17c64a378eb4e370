"""unfuse-kernels: put the ops of fused regions back where they stood."""

from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.unfuse import unfuse
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class UnfuseKernelsPass(PassOnProgram):
    """Replace each `kernel.fused` by its ops.

    Requires: a verified program. Ensures: a program without regions; right after `fuse-kernels`
    the same one as before it. Linear.
    """

    name = "unfuse-kernels"

    def run(self, program: Program) -> None:
        unfuse(program)
