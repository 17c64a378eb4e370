from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program.dead_code import remove_dead_ops
from shardweave.ir.program.program import Program
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class DcePass(PassOnProgram):
    """Erase every op without uses, and ops whose results only such ops use.

    All ranks run one program, so a dead collective is erased on all of them.

    Requires: a verified program. Ensures: numerics unchanged; no op without uses. Linear.
    """

    name = "dce"

    def run(self, program: Program) -> None:
        remove_dead_ops(program)
