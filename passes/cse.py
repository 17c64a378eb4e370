from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.rewrite.cse import merge_equal_ops
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class CsePass(PassOnProgram):
    """Replace an op by an earlier one of the same name, operands, arguments and types.

    A recomputed op is never merged with its original: recomputing is its point. Nor are two
    random ops: each draws numbers of its own.

    Requires: a verified program. Ensures: numerics unchanged, bit for bit. Linear.
    """

    name = "cse"

    def run(self, program: Program) -> None:
        merge_equal_ops(program)
