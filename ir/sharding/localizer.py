"""A builder for the local form of one op, which a rule's `localize` functions use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from xdsl.ir import Attribute, Operation, SSAValue

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.aten import AtenOp, create
from shardweave.ir.dialects.builder import Builder, remade
from shardweave.ir.dialects.dist_ring import Halo
from shardweave.ir.dialects.syntax import Operands
from shardweave.ir.dialects.types import (
    AnyTensor,
    dtype_of_value,
    shape_of,
    shape_of_type,
    tensor_type,
)
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import DimSharding, padded_size


@dataclass(frozen=True)
class Localizer:
    """A global op, its local operands, and the placements of each factor of its rule.

    sizes: global sizes of the factors. types: local types of the results. insert: a function that
    adds an op to the local program.
    """

    op: AtenOp
    operands: Sequence[SSAValue]
    placements: Sequence[DimSharding]
    sizes: Sequence[int]
    types: Sequence[AnyTensor]
    mesh: Mesh
    insert: Callable[[Operation], None]

    def result_shape(self, index: int) -> tuple[int, ...]:
        """Local shape of a result."""
        return shape_of_type(self.types[index])

    def emit(
        self,
        name: str,
        operands: Operands,
        *types: tuple[Sequence[int], torch.dtype],
        **values: Any,
    ) -> list[SSAValue]:
        """Add an aten op to the local program. types: shape and dtype of each result. values:
        non-tensor arguments."""
        results: list[Attribute] = [tensor_type(shape, dtype) for shape, dtype in types]
        return self._add(create(name, operands, results, values))

    def shard_index(self, placements: DimSharding) -> SSAValue:
        """Emit this rank's shard index (scalar i64) over axes that shard a factor contiguously."""
        axes = [p.axis for p in placements]
        scalar = tensor_type((), torch.int64)
        return self._add(dist.create_dist(dist.ShardIndexOp, [], [scalar], axes=axes))[0]

    def shard(self, value: SSAValue, placements: DimSharding) -> SSAValue:
        """Emit this rank's shard, by `placements`, of a replicated 1-d value."""
        (size,), dtype = shape_of(value), dtype_of_value(value)
        missing = padded_size(placements, size) - size
        if missing:
            type_ = (size + missing,), dtype
            (value,) = self.emit("aten.constant_pad_nd", [value], type_, pad=[0, missing])
        for placement in placements:  # major first: the blocks of a minor one are then its stride
            (size,), dtype = shape_of(value), dtype_of_value(value)
            value = self._add(
                dist.create_dist(
                    dist.SliceOp,
                    [value],
                    [tensor_type((size // placement.size,), dtype)],
                    axes=[placement.axis],
                    dim=0,
                    block=placement.stride,
                )
            )[0]
        return value

    def halo(
        self,
        value: SSAValue,
        placements: DimSharding,
        halo: Halo,
        edge: str = "",
        *,
        adds: bool = False,
    ) -> SSAValue:
        """Emit `dist.halo`, or (adds) `dist.halo_add`, over axes that shard a dim contiguously."""
        kind, (dim, before, after) = dist.HaloAddOp if adds else dist.HaloOp, halo
        shape = list(shape_of(value))
        shape[dim] += -before - after if adds else before + after
        values: dict[str, Any] = {"axes": [p.axis for p in placements], "dim": dim}
        values |= {"before": before, "after": after} | ({"edge": edge} if edge else {})
        type_ = tensor_type(shape, dtype_of_value(value))
        return self._add(dist.create_dist(kind, [value], [type_], **values))[0]

    def all_reduce(self, values: Sequence[SSAValue], axes: Sequence[str]) -> list[SSAValue]:
        """Emit one all-reduce of several values over `axes`."""
        types = [value.type for value in values]
        return self._add(dist.create_dist(dist.AllReduceOp, values, types, axes=list(axes)))

    def clone(
        self,
        operands: Sequence[SSAValue] | None = None,
        types: Sequence[Attribute] | None = None,
        **values: Any,
    ) -> list[SSAValue]:
        """Add a copy of the op, by default with its local operands and result types; `values`
        replace arguments of its schema."""
        given = self.operands if operands is None else operands
        return self._add(remade(self.op, given, types or self.types, **values))

    def _add(self, op: Operation) -> list[SSAValue]:
        return list(Builder(self.insert, self.op).insert(op).results)
