"""Collectives over time axes: their steps, and the local ops that replace them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby

import torch
from xdsl.ir import Block, Operation, SSAValue

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import (
    describe,
    set_copy,
    set_sharding_attrs,
    sharding_attrs_of_value,
)
from shardweave.ir.dialects.aten import create
from shardweave.ir.dialects.builder import Builder
from shardweave.ir.dialects.types import shape_of, tensor_type, tensor_type_of, with_shape
from shardweave.ir.mesh.effect import Effect
from shardweave.ir.mesh.mesh import Mesh


@dataclass(frozen=True)
class CollectiveStep:
    """A step of a collective: over one of its time axes, or over some of its space axes.

    cut, gathered: the step's block length divided by the collective's, along the dim that it shards
    and the dim that it gathers.
    """

    axes: tuple[str, ...]
    cut: int
    gathered: int


def effect_of(op: dist.DistOp) -> Effect:
    """The effect of a collective over time axes. Raises ValueError if its class defines none."""
    if op.effect is None:
        raise ValueError(
            f"{describe(op)} communicates over an axis of sub-batches, but its class does not "
            "define `effect`; define it, or use a plan without sub-batches."
        )
    return op.effect


def steps_of(op: dist.DistOp, mesh: Mesh) -> tuple[list[CollectiveStep], list[CollectiveStep]]:
    """Split a collective into steps over its time axes, and then steps over its space axes.

    The axes of a collective are the digits of a position. Each step moves its digits out of the dim
    that is sharded, and into the dim that is gathered; its blocks grow by the digits minor to it.
    """
    times = mesh.time_names
    space = [axis for axis in op.axes if axis not in times]
    parts: list[tuple[str, ...]] = [(axis,) for axis in op.axes if axis in times]
    num_time = len(parts)
    if effect_of(op).gathers is not None:
        # A time axis that is gathered already may stand between two space axes: minor ones first.
        runs = [tuple(run) for is_time, run in groupby(op.axes, times.__contains__) if not is_time]
        parts += runs[::-1]
    elif space:
        parts.append(tuple(space))
    taken: set[str] = set()
    steps: list[CollectiveStep] = []
    for part in parts:
        minor = op.axes[op.axes.index(part[-1]) + 1 :]
        cut = mesh.sizes([axis for axis in minor if axis not in taken])
        gathered = mesh.sizes([axis for axis in minor if axis in taken])
        steps.append(CollectiveStep(part, cut, gathered))
        taken.update(part)
    return steps[:num_time], steps[num_time:]


_SCALAR = tensor_type((), torch.int64)


def place_of_rank(
    add: Callable[[Operation], SSAValue],
    weights: Iterable[tuple[str, int]],
    total: SSAValue | None = None,
) -> SSAValue | None:
    """Emit `total` plus the weighted sum of this rank's coordinates on axes. weights: (axis,
    weight) pairs. add: inserts each new op. Returns None if there are neither axes nor `total`."""
    for axis, weight in weights:
        index = add(dist.create_dist(dist.ShardIndexOp, [], [_SCALAR], axes=[axis]))
        part = weighted(add, index, weight)
        total = part if total is None else add(create("aten.add.Tensor", [total, part], [_SCALAR]))
    return total


def weighted(add: Callable[[Operation], SSAValue], value: SSAValue, weight: int) -> SSAValue:
    """Multiply an index, a value computed at run time, by `weight`; `add` inserts the op."""
    if weight == 1:
        return value
    return add(create("aten.mul.Scalar", [value], [_SCALAR], {"other": weight}))


class TimeOps:
    """Adds ops for one sub-batch, `copy`, to a block, with the annotations of op `source`."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.source: Operation | None = None
        self.copy: tuple[int, ...] = ()

    def _add(self, op: Operation, name: str) -> SSAValue:
        Builder.at_end(self.block, self.source).insert(op, name)
        if self.copy:
            set_copy(op, self.copy)
        return op.results[0]

    def _view(self, value: SSAValue, shape: Sequence[int]) -> SSAValue:
        type_ = with_shape(tensor_type_of(value), shape)
        if type_ == value.type:
            return value
        return self._add(create("aten.view", [value], [type_]), "view")

    def reduce(self, parts: Sequence[SSAValue], reduction: str) -> SSAValue:
        """Sum the sub-batches' copies of a value, or take their maximum, in order; the copies may
        be partial over space axes."""
        name = "aten.maximum" if reduction == "max" else "aten.add.Tensor"
        sharding = sharding_attrs_of_value(parts[0])

        def combine(a: SSAValue, b: SSAValue) -> SSAValue:
            op = create(name, [a, b], [a.type])
            set_sharding_attrs(op, sharding)
            return self._add(op, "total")

        return reduce(combine, parts)

    def take_blocks(self, value: SSAValue, dim: int, size: int, block: int, index: int) -> SSAValue:
        """Take every `size`-th block of `block` elements along `dim`, from block `index` on."""
        shape = list(shape_of(value))
        rounds = shape[dim] // (size * block)
        if rounds == 1:
            shape[dim] = block
            result = with_shape(tensor_type_of(value), shape)
            values = {"dim": dim, "start": index * block, "step": 1}
            return self._add(create("aten.slice.Tensor", [value], [result], values), "sub_batch")
        cut = self._view(value, [*shape[:dim], rounds, size, block, *shape[dim + 1 :]])
        mine = [*shape[:dim], rounds, block, *shape[dim + 1 :]]
        result = with_shape(tensor_type_of(value), mine)
        values = {"dim": dim + 1, "index": index}
        picked = self._add(create("aten.select.int", [cut], [result], values), "sub_batch")
        return self._view(picked, [*shape[:dim], rounds * block, *shape[dim + 1 :]])

    def merge_blocks(self, parts: Sequence[SSAValue], dim: int, block: int) -> SSAValue:
        """Join copies of a value along `dim`, taking blocks of `block` elements in turn."""
        shape = list(shape_of(parts[0]))
        rounds = shape[dim] // block
        cut = [self._view(p, [*shape[:dim], rounds, block, *shape[dim + 1 :]]) for p in parts]
        whole = [*shape[:dim], rounds, block * len(parts), *shape[dim + 1 :]]
        result = with_shape(tensor_type_of(parts[0]), whole)
        joined = self._add(create("aten.cat", [cut], [result], {"dim": dim + 1}), "whole")
        return self._view(joined, [*shape[:dim], shape[dim] * len(parts), *shape[dim + 1 :]])

    def position(self, weights: Sequence[tuple[str, int]]) -> SSAValue | None:
        """Emit the sum of this rank's coordinates on axes, times weights; None without axes."""
        return place_of_rank(lambda op: self._add(op, "index"), weights)

    def plus(self, position: SSAValue | None, constant: int) -> SSAValue:
        """Emit the sum of an index computed at run time (None for 0) and a constant."""
        if position is None:
            return self._add(create("aten.full", [], [_SCALAR], {"fill_value": constant}), "index")
        added = create("aten.add.Scalar", [position], [_SCALAR], {"other": constant})
        return self._add(added, "index")
