"""Prices of blocks at a degree, from the program that would run if all blocks had it.

For each degree, the plan in which every block has it is lowered as for a run. Each op and message
is counted for the block of the captured op from which it comes; during lowering, an op's location
holds the number of its captured op.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from xdsl.dialects import builtin, func
from xdsl.ir import Attribute, Operation, SSAValue

from shardweave.ir.dialects.annotations import copy_of, phase_of
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.dist import CollectiveOp, DistOp
from shardweave.ir.dialects.types import (
    AnyTensor,
    dtype_of_value,
    num_bytes,
    shape_of,
    tensor_type_of,
)
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program, shardings_of
from shardweave.ir.program.storage import kept_values
from shardweave.ir.sharding.reshard import reshard
from shardweave.passes.partition.propagate_shardings import propagate
from shardweave.passes.prepare.split_addmm import split_addmms
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.model import CostModel
from shardweave.planners.lowering.lower import lowered
from shardweave.planners.lowering.plan_passes import PlanPasses
from shardweave.planners.oases.degree import (
    TIMES,
    Axes,
    DegreeSpace,
    batch_annotations,
    plan_of_degrees,
)
from shardweave.planners.structure.linear_maps import Cut


@dataclass(eq=False)
class BlockPrice:
    """Price of a block at one degree: seconds of sub-batches 0 and 1, and bytes of one device.

    fed_s: forward compute whose result only a message reads. sync_s: reduction of gradients.
    kept_bytes: activations that the backward pass reads. message_bytes: bytes received in the
    forward pass.
    """

    forward_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    backward_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    forward_message_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    backward_message_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    fed_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    sync_s: float = 0.0
    kept_bytes: int = 0
    message_bytes: int = 0


@dataclass(frozen=True)
class DegreePrices:
    """Prices of all blocks at one degree. parameters: types of one device's shards, by name.
    program: the program that was priced."""

    blocks: tuple[BlockPrice, ...]
    parameters: Mapping[str, AnyTensor]
    program: Program


def handed_at(
    program: Program, axes: Axes, degree: int, cuts: Mapping[SSAValue, Cut]
) -> dict[SSAValue, Sharding] | None:
    """Propagate shardings at a degree: parameters sharded by `cuts`, the batch over all other axes
    of the mesh. Returns each value's sharding; None if the batch does not divide."""
    inputs = batch_annotations(program, axes, degree)
    if inputs is None:
        return None
    target = _numbered(program)
    target.set_mesh(axes.with_time)
    values = {slot.value: index for index, slot in enumerate(program.arguments)}
    weights: dict[int, Attribute | None] = {
        values[value]: ShardingAttr.of(Sharding(axes.digits_cut(cut)), shape_of(value))
        for value, cut in cuts.items()
    }
    target.set_argument_attributes("dist.sharding", inputs | weights)
    split_addmms(target)
    propagate(target)
    last = {_number_of(op): op for op in target.ops if not isinstance(op, DistOp)}
    held: dict[SSAValue, Sharding] = {}
    for number, op in enumerate(program.ops):
        made = last.get(number)
        if made is not None and len(made.results) == len(op.results):
            for value, sharding in zip(op.results, shardings_of(made, target), strict=True):
                assert sharding is not None
                held[value] = sharding.whole()
    return held


def price(program: Program, space: DegreeSpace, degree: int, cluster: Cluster) -> DegreePrices:
    """Price each block at `degree`, or replicated if it cannot have it. Linear in the ops."""
    plan = plan_of_degrees(program, space, [degree] * len(space.blocks))
    # Merged messages would belong to several blocks.
    kept = [each for each in PlanPasses.of(plan).partitioning if each.name != "merge-collectives"]
    local = lowered(_numbered(program), plan, kept)
    costs = CostModel(cluster, local.mesh or Mesh())
    places = {op: place for place, op in enumerate(program.ops)}
    owners = {
        places[op]: number
        for number, block in enumerate(space.blocks)
        for op in (*block.forward, *block.backward)
    }
    prices = [BlockPrice() for _ in space.blocks]
    for op in local.ops:
        _count(op, prices[owners.get(_number_of(op), 0)], costs)
    for value in kept_values(local):
        if isinstance(value.owner, Operation):
            number = owners.get(_number_of(value.owner), 0)
            prices[number].kept_bytes += num_bytes(tensor_type_of(value))
    parameters = {
        slot.name: tensor_type_of(slot.value) for slot in local.arguments if slot.kind == "param"
    }
    return DegreePrices(tuple(prices), parameters, local)


def _count(op: Operation, price: BlockPrice, costs: CostModel) -> None:
    copy = copy_of(op)
    index = 1 if copy is not None and any(copy) else 0
    is_forward = phase_of(op) == "forward"
    compute = price.forward_s if is_forward else price.backward_s
    compute[index] += costs.op_time_s(op)
    if not isinstance(op, CollectiveOp):
        return
    seconds = _message_s(op, costs)
    users = [use.operation for result in op.results for use in result.uses]
    if all(isinstance(user, func.ReturnOp) for user in users) and not is_forward:
        price.sync_s += seconds
        return
    (price.forward_message_s if is_forward else price.backward_message_s)[index] += seconds
    if is_forward:
        price.message_bytes += sum(num_bytes(tensor_type_of(result)) for result in op.results)
        for value in op.operands:
            if isinstance(value.owner, Operation) and value.has_one_use():
                price.fed_s[index] += costs.op_time_s(value.owner)


def _message_s(op: CollectiveOp, costs: CostModel) -> float:
    """Seconds of a collective over its space axes: sums over its time axes are local, and free."""
    names = tuple(name for name in op.axes if name not in TIMES)
    if len(names) == len(op.axes):
        return costs.collective_time_s(op)
    return costs.sync_time_s(op.kind(), names, num_bytes(tensor_type_of(op.operands[0])))


def moving_s(
    value: SSAValue, before: Sharding, after: Sharding, axes: Axes, costs: CostModel
) -> float:
    """Seconds of the messages that reshard one sub-batch of a value. Shardings may use time axes,
    which need no messages."""
    total = 0.0
    itemsize = dtype_of_value(value).itemsize
    for step in reshard(shape_of(value), before, after, axes.with_time):
        names = tuple(name for name in step.axes if name not in TIMES)
        if names and issubclass(step.op, CollectiveOp):
            ring = costs.ring_over(names, all_pairs=step.op.ALL_PAIRS)
            operand = prod(before.local_shape(shape_of(value))) * itemsize
            total += costs.ring_time_s(step.op.kind(), ring, operand, step.sent_elements * itemsize)
        before = step.after
    return total


def _numbered(program: Program) -> Program:
    copy = program.clone()
    for number, op in enumerate(copy.ops):
        op.location = builtin.FileLineColLoc(_MARK, builtin.IntAttr(number), builtin.IntAttr(0))
    return copy


_MARK = builtin.StringAttr("number of the captured op")


def _number_of(op: Operation) -> int:
    place = op.location
    return place.line.data if isinstance(place, builtin.FileLineColLoc) else -1
