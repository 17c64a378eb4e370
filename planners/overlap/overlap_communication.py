"""Pass `overlap-communication`: orders ops so that compute hides communication."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from xdsl.ir import Operation

from shardweave.ir.dialects.annotations import copy_of, describe
from shardweave.ir.dialects.dist import HOST_COPIES, STARTS, HostCopyOp, StartedOp
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.passes.memory.offload_activations import start_host_copies
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.memory import peak_memory
from shardweave.planners.cost.model import CostModel
from shardweave.planners.cost.presets import cluster_to_order
from shardweave.planners.overlap.axonn_orders import AXONN_ORDERS, axonn_order
from shardweave.planners.overlap.graph import Graph, build_graph, wait_of
from shardweave.planners.overlap.in_order import started_in_order
from shardweave.planners.overlap.interleave import interleave, pass_regions, whole_regions
from shardweave.planners.overlap.list_schedule import (
    MemoryBudget,
    list_schedule,
    liveness,
    recompute_gates,
)
from shardweave.planners.simulate.simulate import simulate_by

SCHEDULES = ("blocking", "sub-batch", "cross-pass", "in-order", "list")


def _in_order(program: Program, ops: Sequence[Operation], memory_cap: int | None) -> None:
    """Apply schedule `in-order`; without gathering ahead if that would exceed the cap."""
    program.reorder(started_in_order(program, ops))
    if memory_cap is not None and peak_memory(program).peak_bytes > memory_cap:
        program.reorder(started_in_order(program, ops, is_ahead=False))


def _check_memory(program: Program, schedule: str, memory_cap: int) -> None:
    needed = peak_memory(program).peak_bytes
    if needed > memory_cap:
        raise ValueError(
            f"schedule {schedule} needs {needed} bytes on a device, {needed - memory_cap} more "
            f"than memory_cap={memory_cap}; recompute more (rematerialize), split the batch into "
            "more sub-batches, or raise memory_cap."
        )


def _best_order(
    program: Program, ops: Sequence[Operation], cluster: Cluster, memory_cap: int | None
) -> list[Operation]:
    """Simulate all orders, and return the fastest one that fits the memory cap."""
    fixed = [_fixed_order(name, ops) for name in SCHEDULES[:3]]
    program.reorder(fixed[-1])
    model = CostModel(cluster, program.mesh or Mesh())
    graph = build_graph(list(program.ops), model)
    fixed.append(started_in_order(program, ops))
    times_s: dict[tuple[Operation, ...], float] = {}
    peaks: dict[tuple[Operation, ...], int] = {}

    def simulate_each(orders: Iterable[Sequence[Operation]]) -> None:
        for order in map(tuple, orders):
            if order not in peaks:
                program.reorder(order)
                result = simulate_by(model, program)
                times_s[order], peaks[order] = result.time_s, result.peak_bytes

    simulate_each(fixed)
    enough = max(peaks.values())
    cap = enough if memory_cap is None else memory_cap
    simulate_each([started_in_order(program, ops, is_ahead=False)])
    simulate_each(axonn_order(program, ops, overlaps) for overlaps in AXONN_ORDERS.values())
    simulate_each(_list_orders(program, graph, cap))
    if min(peaks.values()) > cap:  # for the error, what is really needed
        simulate_each(_list_orders(program, graph, enough))
    return list(min(peaks, key=lambda order: (max(0, peaks[order] - cap), times_s[order])))


def _fixed_order(schedule: str, ops: Sequence[Operation]) -> list[Operation]:
    if schedule == "blocking":
        return _blocking(ops)
    regions = pass_regions(ops) if schedule == "sub-batch" else whole_regions(ops)
    return interleave(regions)


def _blocking(ops: Sequence[Operation]) -> list[Operation]:
    """Order ops with every wait right after its start."""
    order: list[Operation] = []
    placed: set[Operation] = set()
    for op in ops:
        if op in placed:
            continue
        order.append(op)
        placed.add(op)
        if isinstance(op, StartedOp):
            wait = wait_of(op)
            order.append(wait)
            placed.add(wait)
    return order


LEADS = (0.0, 0.1, 0.3)
AHEAD = (1, 2, 4)


def _list_orders(program: Program, graph: Graph, cap_bytes: int) -> Iterator[list[Operation]]:
    """Yield list schedules whose priority is the longest path to the end, under a memory cap.

    They differ in how far recomputation may run ahead, and in each sub-batch's lead over the next,
    as a share of the longest path: with a lead, the backward pass of one sub-batch overlaps the
    forward pass of another.
    """
    live = liveness(program, graph)
    copies = [sum(copy_of(op) or ()) for op in graph.ops]
    total = max(graph.tail_s, default=0.0)
    # An op that frees what it takes is admitted at the cap, and for a moment needs both.
    room = cap_bytes - max(live.created_bytes, default=0)
    all_gates: list[Mapping[int, Sequence[int]]] = []
    for gates in (recompute_gates(graph, ahead) for ahead in AHEAD):
        if gates not in all_gates:
            all_gates.append(gates)
    leads = LEADS if any(copies) else LEADS[:1]  # they lead one sub-batch before others
    for gates, lead, cap in product(all_gates, leads, (cap_bytes, room)):

        def priority(i: int, lead: float = lead) -> tuple[float, ...]:
            return (graph.tail_s[i] - lead * total * copies[i], -float(i))

        yield list_schedule(graph, priority, MemoryBudget(live, cap), gates)


BETWEEN_SUB_BATCHES = ("sub-batch", "cross-pass")


@dataclass(frozen=True)
class OverlapCommunicationPass(PassOnProgram):
    """Reorder a step so that started collectives run beside compute.

    `blocking`: each wait right after its start (Megatron). `sub-batch`: sub-batches take
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
        self._reorder(program)
        ops = list(program.ops)
        if not any(isinstance(op, StartedOp) for op in ops):
            note(
                "the program communicates nothing that could be hidden; shard it first (apply-plan "
                "or plan-<planner>, then preset:partition), and run start-collectives."
            )
        elif self.schedule in BETWEEN_SUB_BATCHES and all("copy" not in o.properties for o in ops):
            note(
                f"schedule {self.schedule} lets sub-batches take turns, and the program has none; "
                "run split-batch before propagate-shardings and unroll-time-axes after "
                "insert-collectives, or use schedule=list."
            )

    def _reorder(self, program: Program) -> None:
        known = (*SCHEDULES, *AXONN_ORDERS)
        if self.schedule not in known:
            words = ", ".join(known)
            raise ValueError(f"schedule '{self.schedule}' is unknown; use one of {words}.")
        ops = list(program.ops)
        if any(isinstance(op, tuple(HOST_COPIES.values())) for op in ops):
            raise ValueError(
                "copies to the host are started already; run overlap-communication once."
            )
        if not any(isinstance(op, StartedOp) for op in ops):
            blocking = next((op for op in ops if type(op) in STARTS), None)
            if blocking is not None:
                raise ValueError(
                    f"{describe(blocking)} is a blocking collective; run start-collectives before "
                    "overlap-communication."
                )
        elif self.schedule == "in-order":
            _in_order(program, ops, self.memory_cap)
        elif self.schedule in AXONN_ORDERS:
            program.reorder(axonn_order(program, ops, AXONN_ORDERS[self.schedule]))
        elif self.schedule == "list":
            program.reorder(
                _best_order(program, ops, cluster_to_order(self.cluster), self.memory_cap)
            )
        else:
            program.reorder(_fixed_order(self.schedule, ops))
        if self.schedule != "blocking" and any(isinstance(op, HostCopyOp) for op in ops):
            start_host_copies(program)
        if self.memory_cap is not None:
            _check_memory(program, self.schedule, self.memory_cap)
