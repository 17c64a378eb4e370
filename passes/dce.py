"""dce: remove ops whose results nobody uses."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.passes import ModulePass

from shardweave.ir.dead_code import remove_dead_ops
from shardweave.ir.program import Program


@dataclass(frozen=True)
class DcePass(ModulePass):
    """Erase every op without uses, and what only fed such ops.

    All ranks run one text, so a dead collective disappears on all of them alike.

    Requires: a verified program. Ensures: numerics unchanged; no op without uses. Linear.
    """

    name = "dce"

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        remove_dead_ops(Program(op))
