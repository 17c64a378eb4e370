"""The partitions of a program that the plans of the search space need.

A partition is a rank's program for one piece of the batch. It depends on how the replica is sharded
(degrees of tensor, context and expert parallelism, sequence parallelism) and on the number of
pieces. Data parallelism, micro-batches and sub-batches all split the batch, so that plans with
equally many pieces share a partition. The search reads their costs; `profile` measures their ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice

from shardweave.ir.dialects.types import num_bytes, tensor_type_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.auto.space.constraints import Constraints
from shardweave.planners.auto.space.point import ReplicaCut
from shardweave.planners.cost.degrees import asked_degrees, divisors
from shardweave.planners.megatron.planner import CONTEXT, EXPERT, plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.zero import BATCH_AXES

MESH_AXES = (*BATCH_AXES, "tensor", CONTEXT, EXPERT, "pipeline", "stage")
"""Axis names that a user's mesh may have."""

MANY_DEVICES = 64
"""Number of devices from which tensor parallelism stays within nodes: its messages, two per block
and pass, are too many for a network, and each degree needs another partition."""

MOST_EXPERTS = 3
"""Most sizes of the expert axis to try for each tensor degree, smallest first: each needs as many
partitions as a plan without the axis does."""

MOST_CONTEXTS = 2
"""Most sizes of the context axis to try for each tensor degree: each needs two or four partitions,
and larger ones send more and save less."""


@dataclass(frozen=True)
class ReplicaCuts:
    """Ways to shard a replica, apart from stages.

    devices: number of devices. batch: number of samples. tensor: tensor degrees that shard any
    parameter. cuts_sequence: the degrees that allow sequence parallelism. contexts: candidate sizes
    of the context axis; cuts_context: whether a size shards anything (calls the planner).
    has_context: whether the user fixes that size. experts: sizes of the expert axis.
    """

    devices: int
    batch: int
    tensor: tuple[int, ...]
    cuts_sequence: frozenset[int]
    contexts: tuple[int, ...] = ()
    cuts_context: Callable[[int], bool] = bool
    has_context: bool = False
    experts: tuple[int, ...] = ()

    def plain(self, tensor: int) -> Iterator[ReplicaCut]:
        """Yield the cuts with this tensor degree and without a context axis."""
        yield from self._both(ReplicaCut(tensor))
        rest = self.devices // tensor
        for expert in islice((n for n in self.experts if rest % n == 0), MOST_EXPERTS):
            yield from self._both(ReplicaCut(tensor, expert=expert))

    def of_sequences(self, tensor: int) -> Iterator[ReplicaCut]:
        """Yield the cuts with a tensor degree and a context axis: the smallest sizes that the batch
        allows, or the size that the user fixes."""
        rest = self.devices // tensor
        sizes = [n for n in self.contexts if rest % n == 0]
        if not self.has_context:
            sizes = [n for n in sizes if self.batch % (rest // n) == 0]
        for context in islice(filter(self.cuts_context, sizes), MOST_CONTEXTS):
            yield from self._both(ReplicaCut(tensor, context=context))

    def partitions(self) -> Iterator[tuple[ReplicaCut, int]]:
        """Yield all partitions of the program: (cut, number of pieces of the batch)."""
        for tensor in self.tensor:
            for cut in (*self.plain(tensor), *self.of_sequences(tensor)):
                for pieces in divisors(self.batch):
                    yield cut, pieces

    def _both(self, cut: ReplicaCut) -> Iterator[ReplicaCut]:
        yield cut
        if cut.tensor in self.cuts_sequence:
            yield replace(cut, sequence_parallel=True)


def cut_plan(program: Program, pieces: int, cut: ReplicaCut, replica: int = 1) -> Plan:
    """Plan a partition's shardings by Megatron's rule. pieces: size of the data axis. replica: size
    of the axis `replica`."""
    mesh = cut.mesh(pieces, replica)
    return plan_megatron(program, mesh, sequence_parallel=cut.sequence_parallel)


def expert_share(program: Program, plan: Plan, cut: ReplicaCut) -> float:
    """Share of a device's parameter bytes in parameters that the expert axis shards. plan: the
    cut's `cut_plan`."""
    mesh, texts = cut.mesh(1), {**plan.parameters, **plan.used}
    sizes = {True: 0, False: 0}
    for slot in program.arguments if cut.expert > 1 else ():
        if slot.kind == "param":
            axes = [name for name in mesh.names if f'"{name}"' in texts.get(slot.name, "")]
            size = num_bytes(tensor_type_of(slot.value)) // mesh.sizes(axes)
            sizes[EXPERT in axes] += size
    return sizes[True] / max(1, sum(sizes.values()))


def replica_cuts(
    plan_of: Callable[[ReplicaCut], Plan],
    batch: int,
    devices: int,
    tensor_degrees: list[int],
    mesh: Mesh | None = None,
    constraints: Constraints | None = None,
) -> ReplicaCuts:
    """Find the cuts that shard a program. plan_of: `cut_plan` for the whole batch. tensor_degrees:
    degrees to try."""
    constraints = constraints or Constraints()
    degrees: list[int] = []
    sequences: set[int] = set()
    for tensor in tensor_degrees:
        if tensor > 1:
            plan = plan_of(ReplicaCut(tensor, sequence_parallel=True))
            if not plan.parameters:
                continue
            sequences |= {tensor} if plan.activations else set()
        degrees.append(tensor)

    @cache
    def cuts_context(size: int) -> bool:
        plan = plan_of(ReplicaCut(context=size))
        return f'"{CONTEXT}"' in "".join((*plan.inputs.values(), *plan.parameters.values()))

    def cuts_experts(size: int) -> bool:
        if batch % size:
            return False
        plan = plan_of(ReplicaCut(expert=size))
        return f'"{EXPERT}"' in "".join(plan.parameters.values())

    return ReplicaCuts(
        devices=devices,
        batch=batch,
        tensor=tuple(degrees),
        cuts_sequence=frozenset(sequences),
        contexts=tuple(_sizes(CONTEXT, devices, mesh, constraints)),
        cuts_context=cuts_context,
        has_context=mesh is not None or CONTEXT in constraints.fixed,
        experts=tuple(filter(cuts_experts, _sizes(EXPERT, devices, mesh, constraints))),
    )


def _sizes(axis: str, devices: int, mesh: Mesh | None, constraints: Constraints) -> Iterator[int]:
    """Yield the sizes that the context or expert axis may have, from the smallest."""
    for size in divisors(devices):
        asked = size if mesh is None else asked_degrees(mesh, MESH_AXES, "auto").get(axis)
        if size > 1 and size == asked and constraints.allows_value(axis, size):
            yield size


def tensor_degrees(devices: int, node: int) -> list[int]:
    """Tensor degrees to try. node: greatest common divisor of the nodes' numbers of devices."""
    degrees = divisors(devices)
    return [n for n in degrees if n <= node] if devices >= MANY_DEVICES else degrees
