"""overlap-communication: the order of ops that hides communication behind compute."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.passes import ModulePass

from shardweave.ir.program import Program
from shardweave.planners.schedule.orders import reschedule


@dataclass(frozen=True)
class OverlapCommunicationPass(ModulePass):
    """Reorder a step so that started collectives run beside compute.

    `blocking`: each wait right behind its start (Megatron). `sub-batch`: sub-batches take
    turns inside each pass (Merak). `cross-pass`: recomputation and backward form one pass
    (Oases, Algorithms 1 and 2). `list`: list scheduling of the whole step on the cost model of
    `cluster` (a preset's name or a file); of several such orders and the other three schedules
    the one that simulates fastest is taken, so it is never slower than they are in the
    simulator. A step that needs more than `memory_cap` bytes on one device is refused; `list`
    takes the fastest order that does not, and without a cap the fastest that needs no more
    memory than one of the other three (else it would recompute early, and gain nothing by it).

    Requires: a local program after `start-collectives`; `sub-batch` and `cross-pass` have an
    effect on programs with sub-batches (`split-batch`, unrolled). Ensures: numerics unchanged;
    only the order of ops changes. O(n log n).
    """

    name = "overlap-communication"
    schedule: str = "list"
    cluster: str = "testbed"
    memory_cap: int | None = None

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        reschedule(Program(op), self.schedule, self.cluster, self.memory_cap)
