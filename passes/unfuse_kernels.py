"""unfuse-kernels: put the ops of fused regions back where they stood."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.passes import ModulePass

from shardweave.ir.program import Program
from shardweave.ir.unfuse import unfuse


@dataclass(frozen=True)
class UnfuseKernelsPass(ModulePass):
    """Replace each `kernel.fused` by its ops.

    Requires: a verified program. Ensures: a program without regions; right after `fuse-kernels`
    the same one as before it. Linear.
    """

    name = "unfuse-kernels"

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        unfuse(Program(op))
