"""split-addmm: products and additions apart, where the contracted dim is cut."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.passes import ModulePass

from shardweave.ir.program import Program
from shardweave.ir.sharding.split_addmm import split_addmms


@dataclass(frozen=True)
class SplitAddmmPass(ModulePass):
    """Make an addmm whose weight is cut along the contracted dim a matrix product and an addition.

    An addmm adds its bias once, so that it cannot be computed on shards of the contracted dim.
    Everywhere else it stays whole, which rounds once where half precision would round twice.

    Requires: a global program before `propagate-shardings`; weights annotated. Ensures: numerics
    unchanged. Linear in the ops.
    """

    name = "split-addmm"

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        split_addmms(Program(op))
