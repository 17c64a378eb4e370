from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program.dead_code import remove_dead_ops
from shardweave.ir.program.program import Program
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class DcePass(PassOnProgram):
    """Erase every op without uses, and what only fed such ops.

    All ranks run one text, so a dead collective disappears on all of them alike.

    Requires: a verified program. Ensures: numerics unchanged; no op without uses. Linear.
    """

    name = "dce"

    def run(self, program: Program) -> None:
        remove_dead_ops(program)
