"""The strides of values in memory, as far as they follow from the views that made a value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from xdsl.ir import BlockArgument, SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.ops.records.attention import FLASH
from shardweave.ir.ops.registry import is_attention, spec_of

Sizes = tuple[int, ...]


def dense_strides(shape: Sequence[int]) -> Sizes:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def ordered_strides(shape: Sequence[int], like: Sequence[int]) -> Sizes:
    """Dense strides for `shape`, with its dims in the memory order of the strides `like`."""
    strides = [0] * len(shape)
    step = 1
    for dim in sorted(reversed(range(len(shape))), key=lambda dim: like[dim]):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def refines(fine: Sequence[int], coarse: Sequence[int]) -> bool:
    """True if each dim of `coarse` is a product of neighbouring dims of `fine`, which it splits
    into."""
    return {math.prod(fine), *dense_strides(fine)}.issuperset(dense_strides(coarse))


def common_runs(before: Sequence[int], after: Sequence[int]) -> list[Sizes] | None:
    """Split each dim of `before` into the sizes of the coarsest shape that splits both shapes.
    Sizes of 1 are left out. None if the shapes do not nest, as 4 x 6 and 6 x 4 do not."""
    steps = sorted({math.prod(before), *dense_strides(before), *dense_strides(after)})
    if steps[0] == 0 or any(major % minor for minor, major in pairwise(steps)):
        return None
    runs: list[Sizes] = []
    for size, stride in zip(before, dense_strides(before), strict=True):
        own = [step for step in reversed(steps) if stride <= step <= stride * size]
        runs.append(tuple(major // minor for major, minor in pairwise(own)))
    return runs


def expected_strides(value: SSAValue) -> Sizes:
    """The strides, in elements, that a value of a program has at run time."""
    shape, owner = shape_of(value), value.owner
    if isinstance(value, BlockArgument):
        region = value.block.parent_op()
        inside = isinstance(region, FusedOp)
        return expected_strides(region.operands[value.index]) if inside else dense_strides(shape)
    if not isinstance(owner, AtenOp):
        return dense_strides(shape)
    if is_attention(owner) and len(shape) == 4:
        if owner.name == FLASH and _is_view(owner.operands[0]):
            # torch's kernel lays its result out like its queries (`empty_like`).
            return ordered_strides(shape, expected_strides(owner.operands[0]))
        # Of gradients, of attention in pieces, and where queries are computed from views, as turned
        # by their positions, heads are the last but one in memory.
        _, heads, length, width = shape
        return (length * heads * width, width, heads * width, 1)
    view = spec_of(owner).view
    if view in (None, "cast"):
        return dense_strides(shape)
    source = owner.operands[0]
    before, strides = shape_of(source), expected_strides(source)
    if view == "permute":
        order: list[int] = owner.value("dims")
        return tuple(strides[dim] for dim in order)
    if view == "expand":
        return _expanded(before, strides, shape)
    if view == "part":
        return _part(owner, strides)
    if view == "pairs":
        is_real = len(shape) > len(before)
        return (*(2 * stride for stride in strides), 1) if is_real else dense_strides(shape)
    return reshaped(before, strides, shape) or dense_strides(shape)


def _is_view(value: SSAValue) -> bool:
    """True if a value is a view, or made by no ATen op, so that its strides are known."""
    owner = value.owner
    return not isinstance(owner, AtenOp) or spec_of(owner).view not in (None, "cast")


def _expanded(source: Sizes, strides: Sizes, shape: Sizes) -> Sizes:
    padding = len(shape) - len(source)
    return tuple(
        strides[d - padding] if d >= padding and source[d - padding] == size else 0
        for d, size in enumerate(shape)
    )


def _part(op: AtenOp, strides: Sizes) -> Sizes:
    """Strides of a slice along `dim` or, if the result lacks the dim, of a select."""
    dim: int = op.value("dim") % len(strides)
    if len(shape_of(op.results[0])) < len(strides):
        return (*strides[:dim], *strides[dim + 1 :])
    step: int = op.value("step")
    return (*strides[:dim], strides[dim] * step, *strides[dim + 1 :])


@cache
def reshaped(source: Sizes, strides: Sizes, shape: Sizes) -> Sizes | None:
    """Strides of a view of a tensor in another `shape`; None if a reshape has to copy."""
    new_strides: list[int] = []
    left = list(reversed(shape))
    for size, stride in _runs(source, strides):
        count = 1
        while left and (count < size or left[0] == 1):
            new_strides.append(count * stride)
            count *= left.pop(0)
        if count != size:
            return None
    new_strides += [1] * len(left)
    return tuple(reversed(new_strides)) if all(size == 1 for size in left) else None


def _runs(source: Sizes, strides: Sizes) -> list[tuple[int, int]]:
    """Merge neighbouring dims that are contiguous to each other: (size, stride), the last first."""
    runs: list[tuple[int, int]] = []
    for size, stride in reversed(list(zip(source, strides, strict=True))):
        if size == 1:
            continue
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = (size * runs[-1][0], runs[-1][1])
        else:
            runs.append((size, stride))
    return runs
