from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.sharding.propagate import propagate
from shardweave.passes.idle_axes import note_idle_axes
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class PropagateShardingsPass(PassOnProgram):
    """Give every op its sharding, and put a `dist.reshard` wherever a value changes shards.

    Forward in program order: each op is cut by the axes that cut its operands; conflicts go by
    priority (wishes of the plan and the user, then the larger tensor). A pending sum
    travels through linear ops while it has a single use, and is reduced, or scattered where
    shards are wanted, at the first op that needs it. Then backward, to a fixed point: a value
    that all its uses want in shards, and that can be made in shards for free, is made so
    (masks, constants, biases); parameters without annotation adopt what their uses want. A
    parameter that is stored in finer shards than its uses read (`dist.used`) is resharded before
    its first use, and again, with phase recompute, before its first use in the backward pass.

    Requires: a global program with a mesh; wishes, if any, in `wanted` and `dist.used`. Ensures:
    every op has `sharding` and operands that fit it, every argument and result `dist.sharding`; no
    wish is left; numerics unchanged. A propagated program stays as it is. Linear in the ops.
    """

    name = "propagate-shardings"

    def run(self, program: Program) -> None:
        note_idle_axes(program)
        propagate(program)
