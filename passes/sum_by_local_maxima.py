from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.rewrite.local_maxima import sum_by_local_maxima
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class SumByLocalMaximaPass(PassOnProgram):
    """Sum exponentials by each shard's own maximum, and scale the sums when that of all is known.

    A kernel then reads the logits of a cut vocabulary once before the message, and not again after
    it. Nothing changes where softmaxes are of whole rows.

    Requires: a local program without regions. Ensures: numerics unchanged, but for how sums are
    rounded: once more, by factors exp(m - max) of at most 1. Linear in the ops.
    """

    name = "sum-by-local-maxima"

    def run(self, program: Program) -> None:
        sum_by_local_maxima(program)
