"""Work of a program's devices, block by block: read off once, used by all planners.

A *block* is a repeated module (`h.3`), or what stands before, between or after those. A global
program gives the work of the whole batch on one device; a local one that of a
rank, so that any degree of parallelism is read off the program that would really run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.annotations import layer_of, phase_of
from shardweave.ir.dialects.dist import AllGatherOp, CollectiveOp, HostCopyOp, WaitOp
from shardweave.ir.dialects.types import dtype_of_value, num_bytes, shape_of, tensor_type_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.blocks import Blocks, blocks_of, split_at_backward
from shardweave.ir.program.program import Program
from shardweave.ir.program.storage import kept_values, storage_of
from shardweave.planners.cost.cluster import Cluster, NodeType
from shardweave.planners.cost.model import CostModel, kind_of
from shardweave.planners.plan.plan_parts import PlanError

AxesAndPhase = tuple[tuple[str, ...], str]


@dataclass(frozen=True)
class BlockWork:
    """One block of a step, in bytes and seconds of what the program says: a rank's share
    of a local program, all of a global one.

    name: of the repeated block, or of the first layer in it. layers: all in it. forward_s,
    backward_s: of compute, by device type (recomputation is part of the backward pass).
    parameter_bytes: of parameters that are first used here. kept_bytes: results that wait for the
    backward pass. crossing_bytes: what this and earlier blocks hand to later ones.
    workspace_bytes: of the largest op, what it reads and writes beside parameters and inputs.
    communication_s: of its collectives, one after another, with starting them, by mesh axes and
    phase. issued: ops and messages that the host issues for the forward pass, and for the rest.
    """

    name: str
    is_repeated: bool
    layers: tuple[str, ...]
    forward_s: Mapping[str, float]
    backward_s: Mapping[str, float]
    parameter_bytes: int
    kept_bytes: int
    crossing_bytes: int
    workspace_bytes: int
    communication_s: Mapping[AxesAndPhase, float]
    issued: tuple[int, int] = (0, 0)

    @property
    def plan_names(self) -> tuple[str, ...]:
        """Names of the block in a plan: its own, or those of its layers."""
        return (self.name,) if self.is_repeated else self.layers


@dataclass(frozen=True)
class Shared:
    """A parameter that block `second` uses too, after block `first`."""

    first: int
    second: int
    bytes: int


@dataclass(frozen=True)
class Workload:
    """The blocks of a step in forward order, and shared parameters. itemsize: in bytes."""

    blocks: tuple[BlockWork, ...]
    shared: tuple[Shared, ...] = ()
    itemsize: int = 4

    def compute_s(self, device: str) -> float:
        """Seconds of all compute on a device type."""
        return sum(block.forward_s[device] + block.backward_s[device] for block in self.blocks)


def workload_of(
    program: Program, cluster: Cluster, mesh: Mesh | None = None, *, regathers: bool = False
) -> Workload:
    """Read the blocks off a program. Linear in its ops.

    Compute is costed on each device type of the cluster, communication on the ranks of `mesh`, by
    default the program's; collectives over axes that it lacks are left out. regathers: of what is
    gathered a device keeps its shard, and gathers again for the backward pass, beside which that
    takes no time (Korthikanti et al. 2022, Sec. 4.2.2). Raises ValueError if a device has no FLOP/s
    for a dtype of the program, or the cluster too few devices.
    """
    blocks = blocks_of(program)
    layers, places = _blocks(program, blocks)
    costs = {name: CostModel(alone(cluster, name), cut_by=program.mesh) for name in cluster.devices}
    links = CostModel(cluster, mesh or program.mesh or Mesh())
    tallies = [_Tally() for _ in layers]
    for op, index in places.items():
        tallies[index].add(op, costs, links)
    for value in _kept(program, regathers):
        owner = value.owner
        index = places[owner] if isinstance(owner, Operation) else 0
        tallies[index].kept += num_bytes(tensor_type_of(value))
    shared = _count_parameters(program, places, tallies)
    works = [
        BlockWork(
            name=name,
            is_repeated=name in blocks.names,
            layers=tuple(layers[name]),
            forward_s={device: tally.seconds[device, True] for device in costs},
            backward_s={device: tally.seconds[device, False] for device in costs},
            issued=(tally.issued[True], tally.issued[False]),
            parameter_bytes=tally.parameters,
            kept_bytes=tally.kept,
            crossing_bytes=crossing,
            workspace_bytes=tally.workspace,
            communication_s=dict(tally.waited),
        )
        for name, tally, crossing in zip(
            layers, tallies, _crossing(len(layers), places), strict=True
        )
    ]
    return Workload(tuple(works), shared, parameter_dtype(program).itemsize)


def _kept(program: Program, regathers: bool) -> list[SSAValue]:
    kept = kept_values(program)
    if not regathers:
        return kept
    shards = (
        storage_of(value.owner.operands[0]) if isinstance(value.owner, AllGatherOp) else value
        for value in kept
    )
    return list(dict.fromkeys(shards))


def parameter_dtype(program: Program) -> torch.dtype:
    """The dtype of the largest parameter; float32 if there is none."""
    values = [slot.value for slot in program.arguments if slot.kind == "param"]
    largest = max(values, key=lambda value: num_bytes(tensor_type_of(value)), default=None)
    return torch.float32 if largest is None else dtype_of_value(largest)


def batch_of(program: Program) -> int:
    """The samples of a step: what all inputs' first dims have in common; PlanError without any."""
    sizes = [
        shape[0]
        for slot in program.arguments
        if slot.kind == "input" and (shape := shape_of(slot.value))
    ]
    if not sizes:
        raise PlanError("the program has no input with a batch to divide; plan it with 'megatron'.")
    return math.gcd(*sizes)


def alone(cluster: Cluster, device: str) -> Cluster:
    """A cluster of one device of a type."""
    return Cluster(cluster.name, cluster.devices, (NodeType(device, 1),))


@dataclass(eq=False)
class _Tally:
    """Counts of one block."""

    seconds: defaultdict[tuple[str, bool], float] = field(
        default_factory=lambda: defaultdict(float)
    )
    waited: defaultdict[AxesAndPhase, float] = field(default_factory=lambda: defaultdict(float))
    issued: defaultdict[bool, int] = field(default_factory=lambda: defaultdict(int))
    parameters: int = 0
    kept: int = 0
    workspace: int = 0

    def add(self, op: Operation, costs: Mapping[str, CostModel], links: CostModel) -> None:
        if isinstance(op, (CollectiveOp, HostCopyOp)):
            if set(op.axes) <= set(links.mesh.names):
                seconds = links.start_time_s(op) + links.collective_time_s(op)
                self.waited[links.stream_of(op), phase_of(op)] += seconds
                self.issued[phase_of(op) == "forward"] += links.mesh.sizes(op.axes) > 1
            return
        if isinstance(op, WaitOp):
            return
        is_forward = phase_of(op) == "forward"
        self.issued[is_forward] += kind_of(op) == "compute"
        for name, cost in costs.items():
            self.seconds[name, is_forward] += cost.op_time_s(op)
        read = [value for value in op.operands if isinstance(value.owner, Operation)]
        touched = sum(num_bytes(tensor_type_of(v)) for v in (*read, *op.results))
        self.workspace = max(self.workspace, touched)


def _blocks(program: Program, blocks: Blocks) -> tuple[dict[str, list[str]], dict[Operation, int]]:
    """The blocks' layers, as the forward pass meets them, and the block of each op."""
    forward, _ = split_at_backward(program)
    layers: dict[str, list[str]] = {}  # by block
    place: dict[str, str] = {}
    current: str | None = None
    for op in forward:
        layer = layer_of(op)
        if not layer or layer in place:
            continue
        block = blocks.of_layer(layer)
        if block is None:
            # Neighbours outside repeated blocks form one block, named by the first of them.
            is_open = current is not None and blocks.of_layer(current) is None
            block = current if is_open and current is not None else layer
        place[layer] = block
        layers.setdefault(block, []).append(layer)
        current = block
    if not layers:
        layers[""] = [""]
    numbers = {name: index for index, name in enumerate(layers)}
    of_op: dict[Operation, int] = {}
    last = 0
    for op in program.ops:
        block = place.get(layer_of(op))
        last = last if block is None else numbers[block]
        of_op[op] = last
    return layers, of_op


def _count_parameters(
    program: Program, of_op: Mapping[Operation, int], tallies: list[_Tally]
) -> tuple[Shared, ...]:
    """Count each parameter in the block that uses it first, and note which others do."""
    shared: list[Shared] = []
    for slot in program.arguments:
        if slot.kind != "param":
            continue
        size = num_bytes(tensor_type_of(slot.value))
        users = (use.operation for use in slot.value.uses)
        places = sorted({of_op[user] for user in users if user in of_op})
        tallies[min(places, default=0)].parameters += size
        shared += [Shared(first, second, size) for first, second in pairwise(places)]
    return tuple(shared)


def _crossing(num_blocks: int, of_op: Mapping[Operation, int]) -> list[int]:
    """Bytes of forward results that are made up to each block and read in a later one."""
    last_use: dict[SSAValue, int] = {}
    for op, index in of_op.items():
        if phase_of(op) == "forward":
            for operand in op.operands:
                value = storage_of(operand)
                last_use[value] = max(index, last_use.get(value, 0))
    changes = [0] * (num_blocks + 1)
    for value, last in last_use.items():
        owner = value.owner
        if isinstance(owner, Operation) and of_op[owner] < last:
            size = num_bytes(tensor_type_of(value))
            changes[of_op[owner]] += size
            changes[last] -= size
    alive_at: list[int] = []
    alive = 0
    for change in changes[:-1]:
        alive += change
        alive_at.append(alive)
    return alive_at
