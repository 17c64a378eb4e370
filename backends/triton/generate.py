"""From a fused region to its kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from xdsl.ir import SSAValue

from shardweave.backends.triton.loops import pointwise_kernel, reduction_kernel
from shardweave.backends.triton.matmul import matmul_kernel
from shardweave.backends.triton.region import Region, region_of
from shardweave.backends.triton.source import Kernel
from shardweave.backends.triton.writer import UnfitError, dense_strides
from shardweave.ir.aten import AtenOp
from shardweave.ir.kernel import FusedOp
from shardweave.ir.regions import VIEWS
from shardweave.ir.types import shape_of

__all__ = ["UnfitError", "expected_strides", "generate"]


def generate(
    op: FusedOp, strides: Sequence[Sequence[int]] | None = None, *, precision: str = "ieee"
) -> Kernel:
    """The kernel of a region whose inputs have these strides (those expected, if None).

    precision: of float32 matrix products, "ieee" or "tf32". Raises UnfitError, a ValueError, if
    no template computes the region. Linear in the ops.
    """
    region = region_of(op)
    given = [expected_strides(value) for value in op.operands] if strides is None else strides
    return kernel_of(region, given, precision)


def kernel_of(region: Region, strides: Sequence[Sequence[int]], precision: str = "ieee") -> Kernel:
    """The kernel of an analysed region; see `generate`."""
    if region.space.family == "pointwise":
        return pointwise_kernel(region, strides)
    if region.space.family == "matmul":
        return matmul_kernel(region, strides, precision)
    return reduction_kernel(region, strides)


def expected_strides(value: SSAValue) -> tuple[int, ...]:
    """The strides that a value of a program has when it runs, as far as its views tell."""
    shape, owner = shape_of(value), value.owner
    if not isinstance(owner, AtenOp):
        return dense_strides(shape)
    if "_attention_" in owner.name and value is owner.results[0] and len(shape) == 4:
        batch, length, heads, width = (shape[d] for d in (0, 2, 1, 3))
        del batch
        return (length * heads * width, width, heads * width, 1)
    if owner.name not in VIEWS:
        return dense_strides(shape)
    source = owner.operands[0]
    before = expected_strides(source)
    if owner.name == "aten.permute":
        return tuple(before[dim] for dim in owner.value("dims"))
    if owner.name == "aten.expand":
        return _expanded(shape_of(source), before, shape)
    return _viewed(shape_of(source), before, shape)


def _expanded(
    source: tuple[int, ...], strides: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...]:
    padding = len(shape) - len(source)
    return tuple(
        strides[d - padding] if d >= padding and source[d - padding] == size else 0
        for d, size in enumerate(shape)
    )


def _viewed(
    source: tuple[int, ...], strides: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Strides of a reshape: those of a view if there is one, else of the copy."""
    meta = torch.empty_strided(source, strides, device="meta")
    return tuple(meta.reshape(shape).stride())
