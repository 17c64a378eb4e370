"""The partitions that plans of the joint space cut a program into.

A partition is what a rank runs of one piece of the batch: a cut of the replica (tensor degree,
with or without sequence parallelism, over how many devices sequences are cut) and the number of
pieces. Data parallelism, micro-batches and sub-batches all cut the batch, so that plans with as
many pieces share a partition. The search reads costs of them, and `profile` measures their ops.
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
"""The axes of a mesh that a user may ask for."""

MANY_DEVICES = 64
"""From here on tensor parallelism stays within nodes: its messages, two for each block and pass,
are too many for a network, and each degree is another partition to read."""

MOST_EXPERTS = 3
"""Sizes of an axis of experts that are looked at for a tensor degree, the smallest: each is as
many partitions to read as none."""

MOST_CONTEXTS = 2
"""Sizes of an axis of sequences that are looked at for a tensor degree: each is two partitions
to read, or four, and a larger one sends more for less."""


@dataclass(frozen=True)
class ReplicaCuts:
    """Ways to cut replicas, except into stages.

    devices: how many there are. batch: samples. tensor: degrees that divide anything;
    cuts_sequence: those of them that can cut a sequence. contexts: over how many devices sequences
    may be cut; cuts_context: whether one of them cuts anything, which takes a plan to know.
    has_context: whether the user says over how many. experts: over how many experts may be cut.
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
        """Those of a tensor degree that cut no sequence over devices of their own."""
        yield from self._both(ReplicaCut(tensor))
        rest = self.devices // tensor
        for expert in islice((n for n in self.experts if rest % n == 0), MOST_EXPERTS):
            yield from self._both(ReplicaCut(tensor, expert=expert))

    def of_sequences(self, tensor: int) -> Iterator[ReplicaCut]:
        """Those of a tensor degree that cut sequences: by as few devices as the batch allows, and
        by twice as many, or by as many as the user says."""
        rest = self.devices // tensor
        sizes = [n for n in self.contexts if rest % n == 0]
        if not self.has_context:
            sizes = [n for n in sizes if self.batch % (rest // n) == 0]
        for context in islice(filter(self.cuts_context, sizes), MOST_CONTEXTS):
            yield from self._both(ReplicaCut(tensor, context=context))

    def partitions(self) -> Iterator[tuple[ReplicaCut, int]]:
        """All cuts, each with all numbers of pieces of the batch."""
        for tensor in self.tensor:
            for cut in (*self.plain(tensor), *self.of_sequences(tensor)):
                for pieces in divisors(self.batch):
                    yield cut, pieces

    def _both(self, cut: ReplicaCut) -> Iterator[ReplicaCut]:
        yield cut
        if cut.tensor in self.cuts_sequence:
            yield replace(cut, sequence_parallel=True)


def cut_plan(program: Program, pieces: int, cut: ReplicaCut, replica: int = 1) -> Plan:
    """The shardings of a partition, by Megatron's rule; replica: among that many times as many
    pieces."""
    mesh = cut.mesh(pieces, replica)
    return plan_megatron(program, mesh, sequence_parallel=cut.sequence_parallel)


def expert_share(program: Program, plan: Plan, cut: ReplicaCut) -> float:
    """Of a device's bytes of parameters, the share that an axis of experts cuts in the cut's
    `cut_plan`."""
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
    """The cuts of a program. plan_of: its `cut_plan` of the whole batch. tensor_degrees: those to
    look at."""
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
    """Sizes that an axis of sequences or of experts may have, from the smallest."""
    for size in divisors(devices):
        asked = size if mesh is None else asked_degrees(mesh, MESH_AXES, "auto").get(axis)
        if size > 1 and size == asked and constraints.allows_value(axis, size):
            yield size


def tensor_degrees(devices: int, node: int) -> list[int]:
    """Degrees of tensor parallelism to look at. node: devices of which every node has a
    multiple."""
    degrees = divisors(devices)
    return [n for n in degrees if n <= node] if devices >= MANY_DEVICES else degrees
