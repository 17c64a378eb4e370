from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.sharding.repeat_heads import repeat_key_heads
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class RepeatKeyHeadsPass(PassOnProgram):
    """Give each query of grouped attention a head of keys and values of its own, where needed.

    Queries are cut by heads among more devices than there are heads of keys, so keys and values are
    whole. Without this pass the queries would be made whole for the attention, too.

    Requires: a global program with a mesh, before `propagate-shardings`. Ensures: numerics
    unchanged. Linear in the ops.
    """

    name = "repeat-key-heads"

    def run(self, program: Program) -> None:
        repeat_key_heads(program)
