from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.sharding.split_addmm import split_addmms
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class SplitAddmmPass(PassOnProgram):
    """Make an addmm whose weight is cut along the contracted dim a matrix product and an addition.

    An addmm adds its bias once, so that it cannot be computed on shards of the contracted dim.
    Everywhere else it stays whole, which rounds once where half precision would round twice.

    Requires: a global program before `propagate-shardings`; weights annotated. Ensures: numerics
    unchanged. Linear in the ops.
    """

    name = "split-addmm"

    def run(self, program: Program) -> None:
        split_addmms(program)
