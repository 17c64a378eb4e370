"""insert-collectives: from the global program to the one that every rank runs."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.passes import ModulePass

from shardweave.ir.program import Program
from shardweave.ir.sharding.partition import partition


@dataclass(frozen=True)
class InsertCollectivesPass(ModulePass):
    """Give every value the type of its shards, and lower every `dist.reshard`.

    A reshard becomes the collectives and slices that bring its operand to its sharding, with the
    reshard's layer and phase; ops that need more than local types on shards (offsets into a shard,
    masked lookups) get their local form. Nothing is chosen.

    Requires: a propagated global program (`propagate-shardings`), perhaps edited by hand. Ensures:
    a local program (`dist.local`), equal to the global one on the whole mesh; ops keep `sharding`.
    Linear in the ops.
    """

    name = "insert-collectives"

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        partition(Program(op))
