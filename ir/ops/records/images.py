"""Pools, paddings and upsampling of planes, and their patches."""

from __future__ import annotations

from typing import Any

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.ops.spec import OpSpec, family, result_plane, result_shape


def _operand_plane(op: AtenOp) -> list[int]:
    return list(shape_of(op.operands[0]))[-2:]


def _windows(names: str, spatial_dims: int, **facts: Any) -> tuple[OpSpec, ...]:
    """Make records of ops that compute each line, plane or volume by itself."""
    return family(names, rule="window", notation="..." + " ." * spatial_dims, **facts)


SPECS = (
    *_windows(
        """
        upsample_nearest1d reflection_pad1d reflection_pad1d_backward replication_pad1d
        replication_pad1d_backward _upsample_nearest_exact1d upsample_linear1d
        """,
        1,
    ),
    *_windows(
        """
        max_pool2d_with_indices avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d_backward
        upsample_bilinear2d upsample_bicubic2d reflection_pad2d reflection_pad2d_backward
        replication_pad2d replication_pad2d_backward adaptive_max_pool2d _upsample_bilinear2d_aa
        _upsample_bicubic2d_aa _upsample_nearest_exact2d
        """,
        2,
    ),
    *_windows(
        """
        upsample_nearest1d_backward upsample_linear1d_backward _upsample_nearest_exact1d_backward
        """,
        1,
        derived={"input_size": result_shape},
    ),
    *_windows(
        """
        upsample_bilinear2d_backward upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward
        _upsample_bicubic2d_aa_backward _upsample_nearest_exact2d_backward
        """,
        2,
        derived={"input_size": result_shape},
    ),
    *_windows(
        """
        upsample_nearest3d_backward upsample_trilinear3d_backward _upsample_nearest_exact3d_backward
        """,
        3,
        derived={"input_size": result_shape},
    ),
    *family("grid_sampler_2d grid_sampler_3d", rule="grid_sampler"),
    *family("grid_sampler_2d_backward grid_sampler_3d_backward", rule="grid_sampler_backward"),
    *_windows(
        "max_unpool2d max_pool2d_with_indices_backward adaptive_max_pool2d_backward",
        2,
        has_indices=True,
    ),
    *_windows("_adaptive_avg_pool2d upsample_nearest2d", 2, derived={"output_size": result_plane}),
    *_windows(
        "upsample_nearest2d_backward",
        2,
        derived={"output_size": _operand_plane, "input_size": result_shape},
    ),
    *_windows(
        """
        max_pool3d_with_indices avg_pool3d avg_pool3d_backward _adaptive_avg_pool3d
        _adaptive_avg_pool3d_backward upsample_nearest3d upsample_trilinear3d
        _upsample_nearest_exact3d adaptive_max_pool3d
        """,
        3,
    ),
    *_windows("max_unpool3d max_pool3d_with_indices_backward", 3, has_indices=True),
    *family("im2col col2im", rule="patches"),
    *_windows("adaptive_max_pool3d_backward", 3, has_indices=True, needs_contiguous=True),
    *family("fractional_max_pool2d_backward fractional_max_pool3d_backward", needs_contiguous=True),
)
