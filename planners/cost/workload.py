"""The work of each block of a program, computed once for all planners.

A *block* is a repeated module (`h.3`), or the ops before, between or after repeated modules. A
global program gives the work of the whole batch on one device; a local one that of a rank, so that
the work under any degree of parallelism is that of the program that would really run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

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
    """Bytes and seconds of one block of a step: one rank's share in a local program, the whole
    batch in a global one.

    name: of the repeated block, or of its first layer. layers: names of all its layers. forward_s,
    backward_s: compute by device type (recomputation counts as backward). parameter_bytes:
    parameters first used in this block. kept_bytes: activations kept for the backward pass.
    crossing_bytes: activations that this and earlier blocks pass to later blocks. workspace_bytes:
    bytes that its largest op reads and writes besides parameters and inputs. communication_s: its
    collectives and their starts, one after another, by mesh axes and phase. issued: number of ops
    and messages that the host issues in the forward pass, and in the rest of the step.
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
        """Names by which a plan refers to the block: its own, or its layers' names."""
        return (self.name,) if self.is_repeated else self.layers


@dataclass(frozen=True)
class Shared:
    """A parameter that two blocks use. first, second: their indices, in forward order."""

    first: int
    second: int
    bytes: int


@dataclass(frozen=True)
class Workload:
    """The blocks of a step in forward order. itemsize: bytes of an element of the parameters."""

    blocks: tuple[BlockWork, ...]
    shared: tuple[Shared, ...] = ()
    itemsize: int = 4

    def compute_s(self, device: str) -> float:
        """Seconds of all compute on a device type."""
        return sum(block.forward_s[device] + block.backward_s[device] for block in self.blocks)


def workload_of(
    program: Program, cluster: Cluster, mesh: Mesh | None = None, *, regathers: bool = False
) -> Workload:
    """Compute the work of each block of a program. Takes time linear in the ops.

    Compute is priced on each device type of the cluster, communication on the ranks of `mesh` (by
    default the program's); collectives over axes that `mesh` lacks are left out. regathers: devices
    keep only their shard of a gathered activation and gather it again in the backward pass, fully
    overlapped (Korthikanti et al. 2022, Sec. 4.2.2). Raises ValueError if a device has no FLOP/s
    for a dtype of the program, or the cluster too few devices.
    """
    blocks = blocks_of(program)
    layers, places = _blocks(program, blocks)
    costs = {name: CostModel(alone(cluster, name), cut_by=program.mesh) for name in cluster.devices}
    own = program.mesh or Mesh()
    links = CostModel(cluster, own if mesh is None else mesh.on_parts_of(own))
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
    """Batch size of a step: gcd of the inputs' first dims. PlanError if no input has a dim."""
    sizes = [
        shape[0]
        for slot in program.arguments
        if slot.kind == "input" and (shape := shape_of(slot.value))
    ]
    if not sizes:
        raise PlanError(
            "no input of the program has a batch dim that could be divided; plan with 'megatron'."
        )
    return math.gcd(*sizes)


def alone(cluster: Cluster, device: str) -> Cluster:
    """Return a cluster with a single device, of type `device`."""
    return Cluster(cluster.name, cluster.devices, (NodeType(device, 1),))


@dataclass(eq=False)
class _Tally:
    """Counters of one block, filled while walking the program."""

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
    """Return the layers of each block, in forward order, and the index of each op's block."""
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
    """Add each parameter to the tally of the first block that uses it; return shared ones."""
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
    """For each block, bytes of forward results of it and earlier blocks that later blocks read."""
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
    return list(accumulate(changes[:-1]))
