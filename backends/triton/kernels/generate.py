"""Generate the kernel of a fused region."""

from __future__ import annotations

from collections.abc import Sequence

from shardweave.backends.triton.kernels.lookups import LookupTemplate
from shardweave.backends.triton.kernels.loops import ReductionTemplate, pointwise_kernel
from shardweave.backends.triton.kernels.matmul import MatmulTemplate
from shardweave.backends.triton.source.region import Region, region_of
from shardweave.backends.triton.source.source import Kernel
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.ops.strides import expected_strides


def generate(op: FusedOp, strides: Sequence[Sequence[int]] | None = None) -> Kernel:
    """Generate a region's kernel for inputs of these strides. UnfitError if no template fits."""
    given = [expected_strides(value) for value in op.operands] if strides is None else strides
    return kernel_of(region_of(op), given)


def kernel_of(region: Region, strides: Sequence[Sequence[int]], precision: str = "ieee") -> Kernel:
    """Generate the kernel of a region. precision: of float32 products, "ieee" or "tf32"."""
    if region.space.family == "pointwise":
        return pointwise_kernel(region, strides)
    if region.space.family == "lookups":
        return LookupTemplate(region, strides).kernel()
    if region.space.family == "matmul":
        return MatmulTemplate(region, strides, precision).kernel()
    return ReductionTemplate(region, strides).kernel()
