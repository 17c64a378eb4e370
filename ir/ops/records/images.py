"""Pools, paddings and upsampling of planes, and their patches."""

from __future__ import annotations

from typing import Any

from shardweave.ir.dialects.types import shape_of
from shardweave.ir.ops.spec import Derivation, OpSpec, family, result_shape


def _windows(
    names: str, spatial_dims: int, *, rule: str = "window", **facts: Any
) -> tuple[OpSpec, ...]:
    """Make records of ops that compute each line, plane or volume by itself."""
    return family(names, rule=rule, notation="..." + " ." * spatial_dims, **facts)


def _resizing(rule: str, *names: str) -> tuple[OpSpec, ...]:
    """Make records of interpolations, and of their backward. names: each ends in `1d` or so."""
    records: list[OpSpec] = []
    for name in names:
        sizes = int(name[-2])
        forward, backward = _sizes_of_result(sizes), _sizes_of_operand(sizes)
        records += family(name, rule=rule, derived={"output_size": forward})
        derived = {"output_size": backward, "input_size": result_shape}
        records += family(f"{name}_backward", rule=rule, derived=derived)
    return tuple(records)


def _sizes_of_result(num: int) -> Derivation:
    return lambda op: list(shape_of(op.results[0]))[-num:]


def _sizes_of_operand(num: int) -> Derivation:
    return lambda op: list(shape_of(op.operands[0]))[-num:]


SPECS = (
    *_resizing(
        "nearest",
        *(
            f"{name}{num}d"
            for name in ("upsample_nearest", "_upsample_nearest_exact")
            for num in (1, 2, 3)
        ),
    ),
    *_resizing("linear", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"),
    *_resizing("cubic", "upsample_bicubic2d"),
    *_windows(
        """
        reflection_pad1d reflection_pad1d_backward replication_pad1d replication_pad1d_backward
        """,
        1,
    ),
    *_windows(
        """
        reflection_pad2d reflection_pad2d_backward replication_pad2d replication_pad2d_backward
        adaptive_max_pool2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
        """,
        2,
    ),
    *_windows(
        "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward",
        2,
        derived={"input_size": result_shape},
    ),
    *_windows("adaptive_max_pool3d", 3),
    *family("grid_sampler_2d grid_sampler_3d", rule="grid_sampler"),
    *family("grid_sampler_2d_backward grid_sampler_3d_backward", rule="grid_sampler_backward"),
    *_windows("max_unpool2d adaptive_max_pool2d_backward", 2, has_indices=True),
    *_windows("max_unpool3d", 3, has_indices=True),
    *_windows(
        "max_pool2d_with_indices avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d_backward",
        2,
        rule="pool",
    ),
    *_windows(
        "max_pool3d_with_indices avg_pool3d avg_pool3d_backward _adaptive_avg_pool3d_backward",
        3,
        rule="pool",
    ),
    *_windows("_adaptive_avg_pool2d", 2, rule="pool", derived={"output_size": _sizes_of_result(2)}),
    *_windows("_adaptive_avg_pool3d", 3, rule="pool", derived={"output_size": _sizes_of_result(3)}),
    *_windows("max_pool2d_with_indices_backward", 2, rule="pool", has_indices=True),
    *_windows("max_pool3d_with_indices_backward", 3, rule="pool", has_indices=True),
    *family("im2col col2im", rule="patches"),
    *_windows("adaptive_max_pool3d_backward", 3, has_indices=True, needs_contiguous=True),
    *family("fractional_max_pool2d_backward fractional_max_pool3d_backward", needs_contiguous=True),
)
