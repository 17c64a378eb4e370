"""The degrees that blocks of a program can have, and the plans that give them.

The tensor axis is factored into axes of prime size, its digits. A degree p shards linear maps over
the last digits, whose product is p, and the batch over the data axis, the sub-batches and the
remaining digits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from xdsl.ir import Attribute, SSAValue

from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Axis, Mesh
from shardweave.ir.mesh.placement import DimSharding, Placement, Sharding, ordered
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import MICRO
from shardweave.planners.oases.blocks import ProgramBlock
from shardweave.planners.oases.chain import runs
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_names import named_ops, sharding_text
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.planners.plan.replicated import batch_shardings
from shardweave.planners.structure.linear_maps import Cut

TIME_AXIS = "batch"
TIMES = (MICRO, TIME_AXIS)
"""The axes of micro-batches and of their sub-batches."""


def prime_factors(size: int) -> tuple[int, ...]:
    """Prime factors of `size`, the largest first, so that the smallest varies fastest in the
    mesh."""
    factors: list[int] = []
    factor = 2
    while size > 1:
        while size % factor == 0:
            factors.append(factor)
            size //= factor
        factor += 1
    return tuple(reversed(factors))


@dataclass(frozen=True)
class Axes:
    """Axes that a plan uses. asked: the user's mesh. mesh: the same with axis `tensor` factored
    into axes of prime size, `digits`. pipeline: its stages and micro-batches, each of
    `batch_split` sub-batches."""

    asked: Mesh
    mesh: Mesh
    tensor: str
    data: str
    digits: tuple[str, ...]
    batch_split: int
    pipeline: Pipeline | None = None

    @staticmethod
    def of(
        mesh: Mesh, tensor: str, data: str, batch_split: int, pipeline: Pipeline | None = None
    ) -> Axes:
        """Make the `Axes` of a user's mesh. ValueError if the mesh has no axis `tensor`."""
        if tensor not in mesh.names:
            raise ValueError(
                f"the mesh {mesh} has no axis '{tensor}' for tensor parallelism; add the axis, "
                "as tensor=4, or name another axis with the option tensor."
            )
        factors = prime_factors(mesh.size(tensor))
        if len(factors) < 2:
            digits = (tensor,) if factors else ()
            return Axes(mesh, mesh, tensor, data, digits, batch_split, pipeline)
        digits = tuple(f"{tensor}.{index}" for index in range(len(factors)))
        factored = mesh.factored(tensor, factors)
        return Axes(mesh, factored, tensor, data, digits, batch_split, pipeline)

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Possible degrees, from 1 up: the products of the sizes of the last 0, 1, .. digits."""
        return tuple(
            self.mesh.sizes(self.digits[count:]) for count in range(len(self.digits), -1, -1)
        )

    def cutting(self, degree: int) -> tuple[str, ...]:
        """The digits that shard linear maps at a degree; neighbouring ranks differ in them."""
        count = self.degrees.index(degree)
        return self.digits[len(self.digits) - count :]

    def spare(self, degree: int) -> tuple[str, ...]:
        """The digits that shard the batch at a degree."""
        return self.digits[: len(self.digits) - self.degrees.index(degree)]

    @property
    def micro_batches(self) -> int:
        return self.pipeline.micro_batches if self.pipeline else 1

    @cached_property
    def with_time(self) -> Mesh:
        counts = self.micro_batches, self.batch_split
        times = (Axis(name, size, "time") for name, size in zip(TIMES, counts, strict=True))
        return Mesh((*self.mesh.axes, *times))

    def batch_cut(self, size: int, degree: int) -> DimSharding | None:
        """Shard a batch over data, micro-batches, sub-batches, then the other digits; None if
        uneven."""
        names = [name for name in (self.data, *TIMES) if name in self.with_time.names]
        placements: list[Placement] = []
        stride = size
        for name in (*names, *self.spare(degree)):
            count = self.with_time.size(name)
            if stride % count:
                return None
            stride //= count
            if count > 1:
                placements.append(Placement(name, count, stride))
        return tuple(placements)

    def digits_cut(self, cut: Cut) -> Cut:
        """Convert a sharding over one axis of a degree's size to one over the degree's digits."""
        return tuple(
            ordered(p for placement in dim for p in self._digits_of(placement)) for dim in cut
        )

    def _digits_of(self, placement: Placement) -> list[Placement]:
        digits: list[Placement] = []
        stride = placement.span
        for name in self.cutting(placement.size):
            stride //= self.mesh.size(name)
            digits.append(Placement(name, self.mesh.size(name), stride))
        return digits


@dataclass(frozen=True)
class DegreeSpace:
    """The blocks of a program and the degrees that each can have.

    cuts: shardings of the parameters, by block and degree, over one axis of the degree's size.
    handed: by degree, shardings of the blocks' outputs over the mesh `axes.with_time`.
    """

    axes: Axes
    blocks: tuple[ProgramBlock, ...]
    cuts: tuple[dict[int, dict[SSAValue, Cut]], ...]
    handed: Mapping[int, Mapping[SSAValue, Sharding]]


def batch_annotations(
    program: Program, axes: Axes, degree: int
) -> dict[int, Attribute | None] | None:
    """The `dist.sharding` of each input at a degree, by index; None if the batch is uneven."""
    batch = batch_size(program)
    placed = axes.batch_cut(batch, degree)
    if placed is None:
        return None
    inputs: dict[int, Attribute | None] = {}
    for index, slot in enumerate(program.arguments):
        shape = shape_of(slot.value)
        if slot.kind == "input" and shape and shape[0] == batch:
            dims = (placed, *((),) * (len(shape) - 1))
            inputs[index] = ShardingAttr.of(Sharding(dims), shape)
    return inputs


def plan_of_degrees(program: Program, space: DegreeSpace, degrees: Sequence[int]) -> Plan:
    """Make the plan that gives each block its degree.

    The plan's mesh has the tensor axis in digits, unless all blocks are sharded over all of it. A
    block that cannot have its degree is replicated.
    """
    axes = space.axes
    is_whole = set(degrees) == {max(axes.degrees)}
    used = axes.asked if is_whole else axes.mesh
    inputs, notes = batch_shardings(program, axes.asked, axes.data)
    return Plan(
        mesh={axis.name: axis.size for axis in used.axes},
        parameters=_parameters(program, space, degrees, axes.tensor if is_whole else ""),
        inputs=inputs,
        activations={} if is_whole else _activations(program, space, degrees),
        planner="oases",
        notes=(*notes, f"degrees of {len(space.blocks)} blocks: {runs(degrees)}"),
        batch_split=axes.batch_split,
        pipeline=axes.pipeline,
    )


def _parameters(
    program: Program, space: DegreeSpace, degrees: Sequence[int], whole: str
) -> dict[str, str]:
    """Shardings of the parameters at the chosen degrees, over the digits of the tensor axis; over
    axis `whole` unless it is empty."""
    names = {slot.value: slot.name for slot in program.arguments}
    parameters: dict[str, str] = {}
    for degree, cuts in zip(degrees, space.cuts, strict=True):
        for value, cut in cuts.get(degree, {}).items():
            own = tuple(tuple(replace(p, axis=whole) for p in dim) for dim in cut)
            sharding = Sharding(own if whole else space.axes.digits_cut(cut))
            parameters.setdefault(names[value], _text(sharding, value))
    return parameters


def _activations(program: Program, space: DegreeSpace, degrees: Sequence[int]) -> dict[str, str]:
    """Shardings of the blocks' outputs and their gradients, as the next block shards the batch."""
    names: dict[SSAValue, str] = {op.results[0]: name for name, op in named_ops(program).items()}
    activations: dict[str, str] = {}
    for degree, block in zip(degrees, space.blocks, strict=True):
        handed = space.handed[degree]
        values: list[SSAValue | None] = [*block.enters, block.gradient]
        for value in values:
            # A gradient that an op with other results gives (of a norm) has no name.
            if value is not None and value in names:
                activations[names[value]] = _text(handed[value], value)
    return activations


def _text(sharding: Sharding, value: SSAValue) -> str:
    """A sharding as text for a plan, without the time axes that `split-batch` adds."""
    dims = (tuple(p for p in dim if p.axis not in TIMES) for dim in sharding.dims)
    return sharding_text(tuple(dims), shape_of(value))


def batch_size(program: Program) -> int:
    """The size of dim 0 in most inputs. Raises ValueError if no input has a dim."""
    sizes = Counter(
        shape_of(slot.value)[0]
        for slot in program.arguments
        if slot.kind == "input" and shape_of(slot.value)
    )
    if not sizes:
        raise ValueError("no input of the program has a batch (dim 0); give the model one.")
    return sizes.most_common(1)[0][0]
