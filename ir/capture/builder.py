"""Adding ATen ops to a block, with result types inferred where they are not given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from xdsl.dialects.builtin import UnknownLoc
from xdsl.ir import Attribute, Block, SSAValue

from shardweave.ir.dialects.aten import AtenOp, create, maker
from shardweave.ir.dialects.syntax import Operands
from shardweave.ir.dialects.types import (
    AnyTensor,
    shape_of,
    tensor_type,
    tensor_type_of,
    with_shape,
)
from shardweave.ir.library.philox import RANDOM, Distribution, position_steps
from shardweave.ir.ops.infer import infer_types
from shardweave.ir.ops.strides import common_runs, refines


class ImportBuilder:
    """Appends ops to a block. `annotations`, `location` and `name` apply to the ops added next.
    next_draw: a function that returns the random state and the index of a new draw."""

    def __init__(
        self, block: Block, next_draw: Callable[[], tuple[SSAValue, int]] | None = None
    ) -> None:
        self.block = block
        self.next_draw = next_draw
        self.annotations: Mapping[str, Attribute] = {}
        self.location: Any = UnknownLoc()
        self.name: str | None = None

    def add(
        self,
        name: str,
        operands: Operands,
        types: Sequence[AnyTensor],
        values: Mapping[str, Any] | None = None,
    ) -> AtenOp:
        op = create(name, operands, list(types), values or {}, self.annotations)
        return self._append(op)

    def call(self, name: str, *operands: Any, **values: Any) -> SSAValue:
        """Append an op whose result types torch infers; returns its first result."""
        return self.calls(name, *operands, **values)[0]

    def calls(self, name: str, *operands: Any, **values: Any) -> Sequence[SSAValue]:
        """Append an op, with result types from torch; return its results. ValueError if torch
        refuses."""
        untyped = create(name, operands, [], values, self.annotations)
        types = infer_types(untyped)
        untyped.drop_all_references()  # or its operands would seem to be used
        if isinstance(types, str):
            raise ValueError(f"{name} refuses its operands: {types}")
        op = create(name, operands, list(types), values, self.annotations)
        return self._append(op).results

    def draw(
        self, shape: Sequence[int], distribution: Distribution, dtype: torch.dtype
    ) -> SSAValue:
        """Append the program's next draw of random numbers: a global tensor of `shape`."""
        assert self.next_draw is not None, "nothing draws here"
        state, number = self.next_draw()
        steps = position_steps(shape, distribution, dtype)
        positions = [self.count(n, step) for n, step in zip(shape, steps, strict=True)]
        values = {"draw": number, "distribution": distribution}
        return self.add(RANDOM, [state, positions], [tensor_type(shape, dtype)], values).results[0]

    def count(self, length: int, step: int = 1) -> SSAValue:
        type_ = tensor_type((length,), torch.int64)
        values = {"start": 0, "step": step}
        return self.add("aten.arange.start_step", [], [type_], values).results[0]

    def _append(self, op: AtenOp) -> AtenOp:
        op.location = self.location
        base = op.name.split(".")[1].lstrip("_")
        # An op of a decomposition is named after itself, not after the decomposed op.
        own = self.name is not None and self.name.lstrip("_").startswith(base)
        for result in op.results:
            result.name_hint = self.name if own else base
        self.block.add_op(op)
        return op

    def full(
        self, shape: Sequence[int], value: bool | int | float | complex, dtype: torch.dtype
    ) -> SSAValue:
        """Append a tensor of `shape` filled with `value`, which may be complex."""
        type_ = tensor_type(shape, dtype)
        if isinstance(value, complex):
            parts = [self.full(shape, x, dtype.to_real()) for x in (value.real, value.imag)]
            return self.add("aten.complex", parts, [type_]).results[0]
        return self.add("aten.full", [], [type_], {"fill_value": value}).results[0]

    def view(self, value: SSAValue, shape: Sequence[int]) -> SSAValue:
        """Append a view of `value` with another shape; views of views are folded.

        Dims that were merged, permuted together and are split now stay separate: merging them,
        as in `b h -> (b h)`, would only hide that heads can be sharded.
        """
        source = value
        while (view := maker(source, "aten.view")) is not None:
            source = view.operands[0]
        type_ = tensor_type_of(source)
        wanted = with_shape(type_, shape)
        if wanted == type_:
            return source
        apart = self._kept_apart(source, shape)
        if apart is not None:
            return apart
        return self.add("aten.view", [source], [wanted]).results[0]

    def _kept_apart(self, source: SSAValue, shape: Sequence[int]) -> SSAValue | None:
        """Rewrite a view of a permuted view so that no dims are merged; None if impossible."""
        permutation = maker(source, "aten.permute")
        view = permutation and maker(permutation.operands[0], "aten.view")
        if permutation is None or view is None:
            return None
        inner, origin = view.results[0], view.operands[0]
        order: list[int] = permutation.value("dims")
        runs = common_runs(shape_of(source), shape)
        if runs is None or refines(shape_of(inner), shape_of(origin)):
            return None
        by_dim = dict(zip(order, runs, strict=True))
        fine = [size for dim in range(len(order)) for size in by_dim[dim]]
        if not refines(fine, shape_of(origin)):
            return None
        ends = list(accumulate(len(by_dim[dim]) for dim in range(len(order))))
        moved = [at for dim in order for at in range(ends[dim] - len(by_dim[dim]), ends[dim])]
        return self.view(self.permute(self.view(origin, fine), moved), shape)

    def permute(self, value: SSAValue, dims: Sequence[int]) -> SSAValue:
        """Append `value` with permuted dims; permutations of permutations are folded."""
        order = list(dims)
        inner = maker(value, "aten.permute")
        if inner is not None:
            order = [inner.value("dims")[d] for d in order]
            value = inner.operands[0]
        if order == sorted(order):
            return value
        shape = shape_of(value)
        wanted = with_shape(tensor_type_of(value), [shape[d] for d in order])
        return self.add("aten.permute", [value], [wanted], {"dims": order}).results[0]

    def expand(self, value: SSAValue, shape: Sequence[int]) -> SSAValue:
        type_ = tensor_type_of(value)
        wanted = with_shape(type_, shape)
        if wanted == type_:
            return value
        return self.add("aten.expand", [value], [wanted]).results[0]

    def cast(self, value: SSAValue, dtype: torch.dtype) -> SSAValue:
        wanted = tensor_type(shape_of(value), dtype)
        if wanted == tensor_type_of(value):
            return value
        return self.add("aten._to_copy", [value], [wanted]).results[0]

    def sum(self, value: SSAValue, dims: Sequence[int], keepdim: bool = False) -> SSAValue:
        return self.call("aten.sum.dim_IntList", value, dim=list(dims), keepdim=keepdim)
