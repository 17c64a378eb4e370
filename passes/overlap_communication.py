"""overlap-communication: the order of ops that hides communication behind compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.ir import Operation
from xdsl.passes import ModulePass

from shardweave.ir.dist import STARTED, STARTS
from shardweave.ir.literals import to_python
from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program
from shardweave.ir.verify import describe
from shardweave.passes.interleave import interleave, pass_regions, whole_regions
from shardweave.passes.list_schedule import (
    Graph,
    Priority,
    Window,
    build_graph,
    list_schedule,
)
from shardweave.planners.cluster import Cluster
from shardweave.planners.cost import CostModel
from shardweave.planners.memory import peak_memory
from shardweave.planners.presets import find_cluster, preset_names
from shardweave.planners.simulate import simulate

SCHEDULES = ("blocking", "sub-batch", "cross-pass", "list")


@dataclass(frozen=True)
class OverlapCommunicationPass(ModulePass):
    """Reorder a step so that started collectives run beside compute.

    `blocking`: each wait right behind its start (Megatron). `sub-batch`: sub-batches take
    turns inside each pass (Merak). `cross-pass`: recomputation and backward form one pass
    (Oases, Algorithms 1 and 2). `list`: list scheduling of the whole step on the cost model of
    `cluster` (a preset's name or a file); of several priorities and the other three schedules
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
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"schedule '{self.schedule}' is unknown; use one of {', '.join(SCHEDULES)}."
            )
        program = Program(op)
        ops = list(program.ops)
        if not any(isinstance(one, STARTED) for one in ops):
            blocking = next((one for one in ops if type(one) in STARTS), None)
            if blocking is not None:
                raise ValueError(
                    f"{describe(blocking)} blocks, and no collective is started; run "
                    "start-collectives first."
                )
        elif self.schedule == "list":
            self._best(program, ops)
        else:
            reorder(program, _fixed_order(self.schedule, ops))
        self._check_memory(program)

    def _check_memory(self, program: Program) -> None:
        if self.memory_cap is None:
            return
        needed = peak_memory(program).peak_bytes
        if needed > self.memory_cap:
            raise ValueError(
                f"schedule {self.schedule} needs {needed} bytes, {needed - self.memory_cap} more "
                f"than memory_cap={self.memory_cap}; recompute more (rematerialize), split the "
                "batch into more sub-batches, or raise the cap."
            )

    def _find_cluster(self) -> Cluster:
        try:
            return find_cluster(self.cluster)
        except OSError as error:
            raise ValueError(
                f"cluster '{self.cluster}' cannot be read: {error.strerror}; give a YAML file or a "
                f"preset ({', '.join(preset_names())})."
            ) from error

    def _best(self, program: Program, ops: list[Operation]) -> None:
        """Try every order and keep the fastest that fits the memory cap."""
        cluster = self._find_cluster()
        graph = build_graph(ops, CostModel(cluster, program.mesh or Mesh()))
        cap = self.memory_cap or 0
        fixed = [partial(_fixed_order, name, ops) for name in SCHEDULES[:-1]]
        tries: list[Callable[[], list[Operation]]] = [*fixed]
        tries += [partial(list_schedule, graph, priority) for priority in _priorities(graph)]
        tries += [
            partial(list_schedule, graph, *near)
            for near in _near(_fixed_order("cross-pass", ops), graph)
        ]
        best: tuple[int, float, list[Operation]] | None = None
        for attempt in tries:
            order = attempt()
            reorder(program, order)
            result = simulate(program, cluster)
            if self.memory_cap is None and attempt in fixed:
                cap = max(cap, result.peak_bytes)
            over = max(0, result.peak_bytes - cap)
            if best is None or (over, result.time_s) < best[:2]:
                best = (over, result.time_s, order)
        assert best is not None
        reorder(program, best[2])


def _fixed_order(schedule: str, ops: Sequence[Operation]) -> list[Operation]:
    if schedule == "blocking":
        return _blocking(ops)
    regions = pass_regions(ops) if schedule == "sub-batch" else whole_regions(ops)
    return interleave(regions)


def _blocking(ops: Sequence[Operation]) -> list[Operation]:
    """Every wait right behind its start."""
    order: list[Operation] = []
    placed: set[Operation] = set()
    for op in ops:
        if op in placed:
            continue
        order.append(op)
        placed.add(op)
        if isinstance(op, STARTED):
            wait = next(use.operation for r in op.results for use in r.uses)
            order.append(wait)
            placed.add(wait)
    return order


def _priorities(graph: Graph) -> list[Priority]:
    """Longest path to the end, alone and behind the order of sub-batches.

    Running one sub-batch ahead of the others lets its backward pass meet their forward pass.
    """
    copies: list[tuple[float, ...]] = []
    for op in graph.ops:
        copy = op.properties.get("copy")
        numbers = cast("list[int]", to_python(copy)) if copy is not None else []
        copies.append(tuple(-float(n) for n in numbers))
    total = max(graph.tail_s, default=0.0)

    def ahead(share: float) -> Priority:
        """Each sub-batch has a lead of `share` of the longest path over the next."""
        return lambda i: (graph.tail_s[i] + share * total * sum(copies[i]), -float(i))

    return [ahead(share) for share in (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 1.0)]


def _near(order: Sequence[Operation], graph: Graph) -> Iterator[tuple[Priority, Window]]:
    """Another order, from which an op may be run early where the device would stand still.

    Little ahead of it, the step needs hardly more memory than in that order.
    """
    numbers = {op: i for i, op in enumerate(graph.ops)}
    position = [0] * len(graph.ops)
    for index, op in enumerate(op for op in order if op in numbers):
        position[numbers[op]] = index
    for size in (8, 32, 128):
        yield lambda i: (-float(position[i]),), Window(position, size)


def reorder(program: Program, order: Sequence[Operation]) -> None:
    """Put the ops of a program in another order (a permutation of them)."""
    block = program.function.body.block
    last = program.return_op
    for op in order:
        op.detach()
        block.insert_op_before(op, last)
