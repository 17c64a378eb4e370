"""Collectives over a time axis as local ops on the copies of one device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from xdsl.ir import Block, Operation, SSAValue

from shardweave.ir import dist
from shardweave.ir.aten import create
from shardweave.ir.syntax import annotate
from shardweave.ir.types import shape_of, tensor_type, tensor_type_of, with_shape


class TimeOps:
    """Adds ops to a block; `source` is the op whose annotations they take."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.source: Operation | None = None

    def _add(self, op: Operation, name: str) -> SSAValue:
        if self.source is not None:
            annotate(op, self.source)
        op.results[0].name_hint = name
        self.block.add_op(op)
        return op.results[0]

    def _view(self, value: SSAValue, shape: Sequence[int]) -> SSAValue:
        type_ = with_shape(tensor_type_of(value), shape)
        if type_ == value.type:
            return value
        return self._add(create("aten.view", [value], [type_]), "view")

    def reduce(self, parts: Sequence[SSAValue], reduction: str) -> SSAValue:
        """Sum or maximum of the copies, left to right."""
        name = "aten.maximum" if reduction == "max" else "aten.add.Tensor"
        return reduce(lambda a, b: self._add(create(name, [a, b], [a.type]), "total"), parts)

    def deal(self, value: SSAValue, dim: int, size: int, block: int, index: int) -> SSAValue:
        """As `shards.deal`: the blocks of one index."""
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

    def undeal(self, parts: Sequence[SSAValue], dim: int, block: int) -> SSAValue:
        """As `shards.undeal`: the copies' blocks in turn."""
        shape = list(shape_of(parts[0]))
        rounds = shape[dim] // block
        cut = [self._view(p, [*shape[:dim], rounds, block, *shape[dim + 1 :]]) for p in parts]
        whole = [*shape[:dim], rounds, block * len(parts), *shape[dim + 1 :]]
        result = with_shape(tensor_type_of(parts[0]), whole)
        joined = self._add(create("aten.cat", [cut], [result], {"dim": dim + 1}), "whole")
        return self._view(joined, [*shape[:dim], shape[dim] * len(parts), *shape[dim + 1 :]])

    def shard_index(self, axes: Sequence[tuple[str, int, int | None]]) -> SSAValue:
        """Position on (name, size, known coordinate or None) axes, the first slowest."""
        scalar = tensor_type((), torch.int64)
        constant = 0
        total: SSAValue | None = None
        minor = 1
        for name, size, known in reversed(axes):
            if known is not None:
                constant += known * minor
            else:
                part = self._add(dist.create(dist.ShardIndexOp, [], [scalar], axes=[name]), "index")
                if minor > 1:
                    scaled = create("aten.mul.Scalar", [part], [scalar], {"other": minor})
                    part = self._add(scaled, "index")
                if total is not None:
                    part = self._add(create("aten.add.Tensor", [total, part], [scalar]), "index")
                total = part
            minor *= size
        if total is None:
            return self._add(create("aten.full", [], [scalar], {"fill_value": constant}), "index")
        return self._add(create("aten.add.Scalar", [total], [scalar], {"other": constant}), "index")
