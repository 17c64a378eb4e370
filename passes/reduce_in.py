"""`reduce-in`: the dtype in which ranks add gradients up."""

from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.rewrite.reduce_dtype import REDUCE_DTYPES, reduce_in
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class ReduceInPass(PassOnProgram):
    """Let ranks add gradients up in a dtype, `float32` (the default), `bfloat16` or `float16`.

    Fewer digits send fewer bytes. Nothing else is added up in fewer digits than it has; what has
    fewer than `dtype`, such as the bfloat16 terms of a product that tensor parallelism cuts, is
    added up in `dtype` as well.

    Requires: a local program, with blocking collectives. Ensures: the program's types; numerics but
    for the rounding of sums. Linear.
    """

    name = "reduce-in"
    dtype: str = "float32"

    def run(self, program: Program) -> None:
        if self.dtype not in REDUCE_DTYPES:
            known = ", ".join(REDUCE_DTYPES)
            raise ValueError(f"{self.name}: dtype '{self.dtype}' is unknown; use one of {known}.")
        if not reduce_in(program, REDUCE_DTYPES[self.dtype]):
            note(
                f"{self.name} found nothing to do: no gradient is added up over ranks in another "
                f"dtype than {self.dtype}."
            )
