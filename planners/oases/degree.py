"""What ops and messages take if all blocks of a program have the same degree.

A degree p of a tensor axis that is factored into digits cuts linear maps over the last digits,
which multiply to p, and the batch over the data axis, the sub-batches and the digits that are
left. A program is walked once a degree, op by op, as propagation would walk it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from xdsl.ir import Block, Operation, SSAValue

from shardweave.ir import dist
from shardweave.ir.aten import AtenOp
from shardweave.ir.facts import facts_of
from shardweave.ir.literals import Literal
from shardweave.ir.mesh import Axis, Mesh
from shardweave.ir.placement import DimSharding, Placement, Sharding, ordered
from shardweave.ir.program import Program
from shardweave.ir.sharding.assignment import (
    Assigner,
    Assignment,
    Operand,
    cheapest_version,
)
from shardweave.ir.sharding.reshard import ReshardStep, reshard
from shardweave.ir.sharding.rules import rule_of
from shardweave.ir.types import AnyTensor, dtype_of_value, shape_of, tensor_type_of, with_shape
from shardweave.planners.cost.model import CostModel, kind_of
from shardweave.planners.structure import Cut

TIME_AXIS = "batch"
_MAX_VERSIONS = 4
_KINDS: dict[str, type[dist.DistOp]] = {
    "all_reduce": dist.AllReduceOp,
    "reduce_scatter": dist.ReduceScatterOp,
    "all_gather": dist.AllGatherOp,
    "all_to_all": dist.AllToAllOp,
}


def prime_factors(size: int) -> tuple[int, ...]:
    """The prime factors of a size, the largest first, so that the smallest is innermost."""
    found: list[int] = []
    factor = 2
    while size > 1:
        while size % factor == 0:
            found.append(factor)
            size //= factor
        factor += 1
    return tuple(reversed(found))


@dataclass(frozen=True)
class Axes:
    """The axes that a plan uses. mesh: the user's with the axis `tensor` factored into `digits`."""

    mesh: Mesh
    tensor: str
    data: str
    digits: tuple[str, ...]
    batch_split: int

    @staticmethod
    def of(mesh: Mesh, tensor: str, data: str, batch_split: int) -> Axes:
        """The axes of a user's mesh. Raises ValueError if it has no tensor axis."""
        if tensor not in mesh.names:
            raise ValueError(
                f"the mesh {mesh} has no axis '{tensor}' whose degrees could be chosen; add it, "
                "as tensor=4, or name another with the option tensor."
            )
        factors = prime_factors(mesh.size(tensor))
        if len(factors) < 2:
            return Axes(mesh, tensor, data, (tensor,) if factors else (), batch_split)
        digits = tuple(f"{tensor}.{index}" for index in range(len(factors)))
        return Axes(mesh.factored(tensor, factors), tensor, data, digits, batch_split)

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Products of the last digits, from 1."""
        return tuple(
            self.mesh.sizes(self.digits[count:]) for count in range(len(self.digits), -1, -1)
        )

    def cutting(self, degree: int) -> tuple[str, ...]:
        """The digits that cut the linear maps at a degree; neighbouring ranks differ in them."""
        count = self.degrees.index(degree)
        return self.digits[len(self.digits) - count :]

    def spare(self, degree: int) -> tuple[str, ...]:
        """The digits that cut the batch at a degree."""
        return self.digits[: len(self.digits) - self.degrees.index(degree)]

    @cached_property
    def with_time(self) -> Mesh:
        return Mesh((*self.mesh.axes, Axis(TIME_AXIS, self.batch_split, "time")))

    def batch_cut(self, size: int, spare: Sequence[str]) -> DimSharding | None:
        """A batch over data, then sub-batches, then `spare`; None if it does not divide."""
        names = [name for name in (self.data, TIME_AXIS) if name in self.with_time.names]
        found: list[Placement] = []
        stride = size
        for name in (*names, *spare):
            count = self.with_time.size(name)
            if stride % count:
                return None
            stride //= count
            if count > 1:
                found.append(Placement(name, count, stride))
        return tuple(found)

    def digits_cut(self, cut: Cut) -> Cut:
        """A cut over one axis of the size of a degree, over the digits of that degree."""
        return tuple(
            ordered(one for placement in dim for one in self._digits_of(placement)) for dim in cut
        )

    def _digits_of(self, placement: Placement) -> list[Placement]:
        found: list[Placement] = []
        stride = placement.span
        for name in self.cutting(placement.size):
            stride //= self.mesh.size(name)
            found.append(Placement(name, self.mesh.size(name), stride))
        return found


@dataclass
class DegreeTimes:
    """What ops take at one degree, for one sub-batch.

    compute_s, communication_s: by op; the latter of messages that bring its operands and results
    where they are wanted. sync_s: of reducing a parameter's gradient, once a step. shardings: of
    all values, with the time axis.
    """

    compute_s: dict[Operation, float] = field(default_factory=dict[Operation, float])
    communication_s: defaultdict[Operation, float] = field(
        default_factory=lambda: defaultdict[Operation, float](float)
    )
    sync_s: dict[str, float] = field(default_factory=dict[str, float])
    shardings: dict[SSAValue, Sharding] = field(default_factory=dict[SSAValue, Sharding])

    def local_bytes(self, value: SSAValue) -> int:
        """Bytes of one device's part of a value, in one sub-batch."""
        shape = self.shardings[value].local_shape(shape_of(value))
        return math.prod(shape) * dtype_of_value(value).itemsize


class DegreeModel:
    """Walks a program once for each degree asked for."""

    def __init__(self, program: Program, axes: Axes, costs: CostModel) -> None:
        self.program = program
        self.axes = axes
        self.mesh = axes.with_time
        self.costs = costs
        self.chooser = Assigner(self.mesh)
        self.ops = [op for op in program.ops if isinstance(op, AtenOp)]
        self._op_times: dict[object, float] = {}
        self._message_times: dict[object, float] = {}

    def times(
        self, degree: int, cuts: Mapping[SSAValue, Cut], ends: frozenset[AtenOp]
    ) -> DegreeTimes | None:
        """The times at a degree whose parameters are cut as given; None if the batch does not.

        ends: the maps that contract what others cut.
        """
        walk = _Walk(self, ends)
        if not walk.start(cuts, degree):
            return None
        for op in self.ops:
            walk.op(op)
        walk.finish()
        return walk.found

    def op_s(self, op: AtenOp, operands: Sequence[Sharding], results: Sequence[Sharding]) -> float:
        """Seconds of the op on one device's part of its operands."""
        if kind_of(op) == "view":
            return 0.0
        taken = [local_type(v, s) for v, s in zip(op.operands, operands, strict=True)]
        given = [local_type(v, s) for v, s in zip(op.results, results, strict=True)]
        key = (op.name, tuple(taken), tuple(given))
        found = self._op_times.get(key)
        if found is None:
            stand_in = op.create(
                operands=Block(arg_types=taken).args, result_types=given, properties=op.properties
            )
            if kind_of(stand_in) == "view":  # a reshape that copies, as its own operand tells
                found = 2 * math.prod(operands[0].local_shape(shape_of(op.operands[0])))
                found *= dtype_of_value(op.results[0]).itemsize
                found /= min(d.memory_bandwidth_bytes_s for d in self.costs.devices)
            else:
                found = self.costs.op_time_s(stand_in)
            self._op_times[key] = found
        return found

    def message_s(self, value: SSAValue, before: Sharding, step: ReshardStep) -> float:
        """Seconds of one step of a resharding; sub-batches send each other nothing."""
        axes = [name for name in step.axes if name != TIME_AXIS]
        if step.kind == "slice" or not axes:
            return 0.0
        taken, given = local_type(value, before), local_type(value, step.after)
        key = (step.kind, tuple(axes), taken, given)
        found = self._message_times.get(key)
        if found is None:
            arguments: dict[str, Literal] = {"axes": axes}
            if step.kind != "all_reduce":
                arguments |= {"dim": step.dim, "block": step.block}
            if step.kind == "all_to_all":
                arguments |= {"from_dim": step.from_dim, "from_block": step.from_block}
            operand = Block(arg_types=[taken]).args[0]
            op = dist.create(_KINDS[step.kind], [operand], [given], **arguments)
            found = self.costs.collective_time_s(op)
            self._message_times[key] = found
        return found

    def moving_s(self, value: SSAValue, before: Sharding, after: Sharding) -> float:
        """Seconds of bringing a value from one sharding to another."""
        total = 0.0
        for step in reshard(shape_of(value), before, after, self.mesh):
            total += self.message_s(value, before, step)
            before = step.after
        return total


class _Walk:
    def __init__(self, model: DegreeModel, ends: frozenset[AtenOp]) -> None:
        self.model = model
        self.ends = ends
        self.found = DegreeTimes()
        self.versions: dict[SSAValue, list[Sharding]] = {}
        self.pinned: set[SSAValue] = set()

    def start(self, cuts: Mapping[SSAValue, Cut], degree: int) -> bool:
        """Place the arguments; whether the batch divides."""
        axes, slots = self.model.axes, self.model.program.arguments
        batch = batch_size(self.model.program)
        placed = axes.batch_cut(batch, axes.spare(degree))
        for slot in slots:
            shape = shape_of(slot.value)
            sharding = Sharding.replicated(len(shape))
            if slot.value in cuts:
                sharding = Sharding(axes.digits_cut(cuts[slot.value]))
                self.pinned.add(slot.value)
            elif slot.kind == "input" and shape and shape[0] == batch and placed is not None:
                sharding = Sharding((placed, *sharding.dims[1:]))
            self._define(slot.value, sharding)
        return placed is not None

    def op(self, op: AtenOp) -> None:
        if op in self.ends and op.name == "aten.addmm":
            operands, results = self._addmm(op)
        else:
            choice = self._choose(op)
            operands, results = choice.operands, choice.results
        for value, wanted in zip(op.operands, operands, strict=True):
            self.found.communication_s[op] += self._bring(value, wanted)
        self.found.compute_s[op] = self.model.op_s(op, operands, results)
        for value, sharding in zip(op.results, results, strict=True):
            settled = sharding
            if sharding.unreduced and not value.has_one_use() and value.first_use is not None:
                settled = sharding.whole()
                self.found.communication_s[op] += self.model.moving_s(value, sharding, settled)
            self._define(value, settled)
            if facts_of(op).keeps_weight and op.operands[0] in self.pinned:
                self.pinned.add(value)

    def finish(self) -> None:
        """Reduce the gradients to what their parameters are."""
        parameters = {s.name: s.value for s in self.model.program.arguments if s.kind == "param"}
        for slot in self.model.program.results:
            if slot.kind == "grad" and slot.name in parameters:
                wanted = self.versions[parameters[slot.name]][0]
                self.found.sync_s[slot.name] = self._bring(slot.value, wanted)

    def _define(self, value: SSAValue, sharding: Sharding) -> None:
        self.versions[value] = [sharding]
        self.found.shardings[value] = sharding

    def _operand(self, value: SSAValue) -> Operand:
        versions = tuple(self.versions[value])
        size = dtype_of_value(value).itemsize
        return Operand(shape_of(value), size, versions, value in self.pinned)

    def _choose(self, op: AtenOp) -> Assignment:
        operands = [self._operand(value) for value in op.operands]
        shapes = [shape_of(result) for result in op.results]
        return self.model.chooser.assign(rule_of(op), operands, shapes, [None] * len(shapes))

    def _bring(self, value: SSAValue, wanted: Sharding) -> float:
        """Seconds of making a version, which later uses then have."""
        known = self.versions[value]
        if wanted in known:
            return 0.0
        source = cheapest_version(self.model.mesh, self._operand(value), wanted)
        if len(known) < _MAX_VERSIONS:
            known.append(wanted)
        return self.model.moving_s(value, source, wanted)

    def _addmm(self, op: AtenOp) -> tuple[list[Sharding], list[Sharding]]:
        """A row-parallel addmm: a product whose sum is reduced before the bias is added."""
        rule = rule_of(op)
        cuts: list[DimSharding] = [()] * len(rule.factors)
        for index in (1, 2):
            sharding = self.versions[op.operands[index]][0]
            for names, dim in zip(rule.operands[index], sharding.dims, strict=True):
                for placement in dim:
                    seat = rule.seat(names, placement)
                    if seat is not None:
                        one = Placement(placement.axis, placement.size, seat[1])
                        cuts[seat[0]] = ordered({*cuts[seat[0]], one})
        operands = [Sharding(rule.dims_of(dims, cuts)) for dims in rule.operands]
        result = Sharding(rule.dims_of(rule.results[0], cuts))
        summed = sorted(operands[2].placed_axes - result.placed_axes)
        pending = Sharding(result.dims, tuple(summed))
        self.found.communication_s[op] += self.model.moving_s(op.results[0], pending, result)
        return operands, [result]


def batch_size(program: Program) -> int:
    """The first dim that most inputs have. Raises ValueError if no input has a dim."""
    sizes = Counter(
        shape_of(slot.value)[0]
        for slot in program.arguments
        if slot.kind == "input" and shape_of(slot.value)
    )
    if not sizes:
        raise ValueError("no input of the program has a dim 0 that could be the batch; give one.")
    return sizes.most_common(1)[0][0]


def local_type(value: SSAValue, sharding: Sharding) -> AnyTensor:
    """The type of one device's part of a value."""
    return with_shape(tensor_type_of(value), sharding.local_shape(shape_of(value)))
