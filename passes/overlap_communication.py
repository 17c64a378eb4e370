from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.dist import STARTED
from shardweave.ir.program import Program
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram
from shardweave.planners.schedule.orders import reschedule

BETWEEN_SUB_BATCHES = ("sub-batch", "cross-pass")


@dataclass(frozen=True)
class OverlapCommunicationPass(PassOnProgram):
    """Reorder a step so that started collectives run beside compute.

    `blocking`: each wait right behind its start (Megatron). `sub-batch`: sub-batches take
    turns inside each pass (Merak). `cross-pass`: recomputation and backward form one pass
    (Oases, Algorithms 1 and 2). `in-order`: compute as it is written, messages started where they
    are made and waited for where they are read, weights gathered a block ahead. `list`: list
    scheduling of the whole step on the cost model of `cluster` (a preset's name or a file); of
    several such orders and the other schedules the one that simulates fastest is taken, so it is
    never slower than they are in the simulator. A step that needs more than `memory_cap` bytes
    on one device is refused; `in-order` gathers nothing ahead rather, and `list` takes the
    fastest order that does not need more; without a cap the fastest that needs no more memory
    than one of the others (else it would recompute early, and gain nothing by it).

    Requires: a local program after `start-collectives`; `sub-batch` and `cross-pass` have an
    effect on programs with sub-batches (`split-batch`, unrolled). Ensures: numerics unchanged;
    only the order of ops changes. O(n log n).
    """

    name = "overlap-communication"
    schedule: str = "list"
    cluster: str = "testbed"
    memory_cap: int | None = None

    def run(self, program: Program) -> None:
        reschedule(program, self.schedule, self.cluster, self.memory_cap)
        ops = list(program.ops)
        if not any(isinstance(one, STARTED) for one in ops):
            note(
                "the program communicates nothing that could be hidden; shard it first (apply-plan "
                "or plan-<planner>, then preset:partition), and run start-collectives."
            )
        elif self.schedule in BETWEEN_SUB_BATCHES and all("copy" not in o.properties for o in ops):
            note(
                f"schedule {self.schedule} lets sub-batches take turns, and the program has none; "
                "run split-batch before propagate-shardings and unroll-time-axes behind "
                "insert-collectives, or use schedule=list."
            )
