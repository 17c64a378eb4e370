"""Sample calls of ops that slide windows along spatial dims: convolutions, pools, interpolation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from shardweave.tests.ir.rules.sharded_op import Sample, instance_of, sample
from shardweave.tests.ir.rules.tensors import normal


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int = 1,
    transposed: bool = False,
    window: tuple[int, int, int, int] = (2, 1, 1, 0),
) -> Sample:
    """A convolution. window: stride, padding, dilation and padding of the output."""
    *pairs, more = ([value] * (x.dim() - 2) for value in window)
    return sample("convolution", x, weight, bias, *pairs, transposed, more, groups)


def convolution_backward(
    x: Tensor,
    weight: Tensor,
    mask: list[bool],
    groups: int = 1,
    transposed: bool = False,
    window: tuple[int, int, int, int] = (2, 1, 1, 0),
) -> Sample:
    """The backward of `convolution` of the results that `mask` asks for."""
    forward = convolution(x, weight, None, groups, transposed, window)
    y = torch.ops.aten.convolution(*forward.arguments)
    sizes = [y.shape[1]] if mask[2] else None
    arguments = [y, x, weight, sizes, *forward.arguments[3:], mask]
    return Sample("aten.convolution_backward", tuple(arguments))


CONVOLUTIONS = (
    convolution(normal(2, 4, 8, 8), normal(6, 4, 3, 3), None),
    convolution(normal(2, 4, 8, 8), normal(6, 4, 3, 3), normal(6)),
    convolution(normal(2, 4, 8), normal(6, 4, 3), None),
    convolution(normal(2, 8, 8, 8), normal(12, 2, 3, 3), normal(12), groups=4),
    convolution(normal(2, 8, 8, 8), normal(8, 1, 3, 3), None, groups=8),
    convolution(normal(2, 4, 4, 4), normal(4, 6, 3, 3), normal(6), transposed=True),
    convolution(normal(2, 8, 4, 4), normal(8, 3, 3, 3), None, groups=4, transposed=True),
    convolution_backward(normal(2, 4, 8, 8), normal(6, 4, 3, 3), [True, True, True]),
    convolution_backward(normal(2, 4, 8, 8), normal(6, 4, 3, 3), [True, True, False]),
    convolution_backward(normal(2, 4, 8, 8), normal(6, 4, 3, 3), [False, True, False]),
    convolution_backward(normal(2, 4, 8, 8), normal(6, 4, 3, 3), [False, False, True]),
    convolution_backward(normal(2, 8, 8, 8), normal(12, 2, 3, 3), [True, True, True], 4),
    convolution_backward(normal(2, 8, 8, 8), normal(12, 2, 3, 3), [True, True, False], 4),
    convolution_backward(normal(2, 4, 4, 4), normal(4, 6, 3, 3), [True, True, True], 1, True),
    convolution_backward(normal(2, 8, 4, 4), normal(8, 3, 3, 3), [True, True, False], 4, True),
)

SHAPES_OF_WINDOWS: tuple[tuple[int, tuple[int, ...], tuple[int, int, int, int], bool], ...] = (
    (3, (2, 2, 12, 6), (1, 1, 1, 0), False),
    (3, (1, 2, 12), (1, 2, 2, 0), False),
    (7, (1, 2, 24), (2, 3, 1, 0), False),
    (2, (1, 2, 4, 4, 4), (2, 0, 1, 0), False),
    (1, (1, 2, 12), (2, 0, 1, 0), False),
    (3, (1, 2, 6, 6, 6), (1, 1, 1, 0), False),
    (2, (1, 2, 6, 6), (2, 0, 1, 0), True),
    (3, (1, 2, 6, 6), (2, 1, 1, 1), True),
    (4, (1, 2, 6, 6), (2, 1, 1, 0), True),
    (3, (1, 2, 6), (1, 1, 1, 0), True),
    (1, (1, 2, 6), (2, 0, 1, 1), True),
)
"""Kernel size, input shape, window and whether it is transposed, of convolutions whose spatial dims
can be sharded."""

SPATIAL_CONVOLUTIONS = tuple(
    case
    for kernel, shape, window, turned in SHAPES_OF_WINDOWS
    for x, weight in [(normal(*shape), normal(2, 2, *[kernel] * (len(shape) - 2)))]
    for case in (
        convolution(x, weight, normal(2), 1, turned, window),
        convolution_backward(x, weight, [True, True, True], 1, turned, window),
        convolution_backward(x, weight, [True, False, False], 1, turned, window),
    )
)

PLANES, VOLUMES = (2, 4, 6, 6), (2, 4, 6, 6, 6)


def max_pool_backward(shape: tuple[int, ...]) -> Sample:
    """The backward of a max pool of windows of size and stride 2."""
    num = len(shape) - 2
    x, window = normal(*shape), ([2] * num, [2] * num, [0] * num, [1] * num, False)
    name = f"max_pool{num}d_with_indices"
    y, indices = getattr(torch.ops.aten, name)(x, *window)
    return sample(f"{name}_backward", y, x, *window, indices)


def pools(
    name: str, shape: tuple[int, ...], kernel: int, stride: int, padding: int, *rest: Any
) -> Iterator[Sample]:
    """A pool and its backward. rest: further arguments."""
    num = len(shape) - 2
    x, window = normal(*shape), [[value] * num for value in (kernel, stride, padding)]
    given = sample(name.format(num), x, *window, *rest)
    yield given
    made = instance_of(given).results
    places = made[1:]
    if places:
        rest = rest or ([1] * num, False)
    else:
        rest = (*rest, *(False, True, None)[len(rest) :])
    yield sample(f"{name.format(num)}_backward", normal(*made[0].shape), x, *window, *rest, *places)


OVERLAPPING_POOLS = tuple(
    case
    for arguments in (
        ("max_pool{}d_with_indices", (2, 2, 12, 12), 3, 2, 1),
        ("max_pool{}d_with_indices", (1, 2, 6, 12, 6), 3, 1, 1),
        ("max_pool{}d_with_indices", (2, 2, 8, 8), 3, 2, 0, [1, 1], True),
        ("avg_pool{}d", (2, 2, 12, 6), 3, 1, 1),
        ("avg_pool{}d", (2, 2, 12, 6), 3, 1, 1, False, False, None),
        ("avg_pool{}d", (1, 2, 6, 12, 6), 3, 2, 1, False, True, 5),
    )
    for case in pools(*cast("tuple[Any, ...]", arguments))
)

SCALED_BY_WHOLE = tuple(
    case
    for name, num, sizes in (
        ("upsample_nearest", 2, (12, 18)),
        ("upsample_nearest", 2, (3, 2)),
        ("_upsample_nearest_exact", 3, (12, 6, 3)),
        ("upsample_linear", 1, (18,)),
        ("upsample_bilinear", 2, (12, 3)),
        ("upsample_bilinear", 2, (2, 12)),
        ("upsample_trilinear", 3, (12, 6, 18)),
        ("upsample_bicubic", 2, (12, 18)),
        ("upsample_bicubic", 2, (3, 2)),
    )
    for corners in [() if "nearest" in name else (False,)]
    for case in (
        sample(f"{name}{num}d", normal(1, 2, *[6] * num), list(sizes), *corners),
        sample(
            f"{name}{num}d_backward",
            normal(1, 2, *sizes), list(sizes), [1, 2, *[6] * num], *corners,
        ),
    )
)  # fmt: skip


def adaptive_max_pool3d_backward() -> Sample:
    x = normal(*VOLUMES)
    y, indices = torch.ops.aten.adaptive_max_pool3d(x, [3, 2, 2])
    return sample("adaptive_max_pool3d_backward", y, x, indices)


def adaptive_max_pool_backward() -> Sample:
    x = normal(*PLANES)
    y, indices = torch.ops.aten.adaptive_max_pool2d(x, [3, 2])
    return sample("adaptive_max_pool2d_backward", y, x, indices)


POOLS = (
    sample("max_pool2d_with_indices", normal(*PLANES), [2, 2], [2, 2], [1, 1]),
    sample("max_pool2d_with_indices", normal(4, 6, 6), [3, 3], [1, 1]),
    max_pool_backward(PLANES),
    sample("avg_pool2d", normal(*PLANES), [2, 2]),
    sample(
        "avg_pool2d_backward",
        *(normal(2, 4, 3, 3), normal(*PLANES), [2, 2], [2, 2], [0, 0], False, True, None),
    ),
    sample("_adaptive_avg_pool2d", normal(*PLANES), [3, 2]),
    sample("_adaptive_avg_pool2d_backward", normal(2, 4, 3, 2), normal(*PLANES)),
    sample("max_pool3d_with_indices", normal(*VOLUMES), [2, 2, 2]),
    max_pool_backward(VOLUMES),
    sample("avg_pool3d", normal(*VOLUMES), [2, 2, 2]),
    sample(
        "avg_pool3d_backward",
        *(normal(2, 4, 3, 3, 3), normal(*VOLUMES), [2, 2, 2], [2, 2, 2], [0, 0, 0]),
        *(False, True, None),
    ),
    sample("_adaptive_avg_pool3d", normal(*VOLUMES), [3, 2, 1]),
    sample("_adaptive_avg_pool3d_backward", normal(2, 4, 3, 2, 1), normal(*VOLUMES)),
    sample("upsample_nearest1d", normal(2, 4, 6), [12]),
    sample("upsample_nearest2d", normal(*PLANES), [12, 9]),
    sample("upsample_nearest2d_backward", normal(2, 4, 12, 9), [12, 9], [2, 4, 6, 6]),
    sample("upsample_nearest3d", normal(*VOLUMES), [12, 9, 6]),
    sample("upsample_bilinear2d", normal(*PLANES), [12, 9], False),
    sample("upsample_bicubic2d", normal(*PLANES), [12, 9], True),
    sample("reflection_pad1d", normal(2, 4, 6), [1, 2]),
    sample("reflection_pad1d_backward", normal(2, 4, 9), normal(2, 4, 6), [1, 2]),
    sample("replication_pad1d_backward", normal(2, 4, 9), normal(2, 4, 6), [1, 2]),
    sample("adaptive_max_pool2d", normal(*PLANES), [3, 2]),
    adaptive_max_pool_backward(),
    sample("adaptive_max_pool3d", normal(*VOLUMES), [3, 2, 2]),
    adaptive_max_pool3d_backward(),
    sample("im2col", normal(*PLANES), [2, 3], [1, 1], [0, 1], [1, 2]),
    sample("im2col", normal(4, 6, 6), [2, 3], [1, 1], [0, 1], [1, 2]),
    sample("col2im", normal(2, 24, 16), [5, 6], [2, 3], [1, 1], [0, 0], [1, 1]),
    sample("reflection_pad2d", normal(*PLANES), [1, 2, 0, 1]),
    sample("reflection_pad2d_backward", normal(2, 4, 7, 9), normal(*PLANES), [1, 2, 0, 1]),
    sample("replication_pad1d", normal(2, 4, 6), [1, 2]),
    sample("replication_pad2d", normal(*PLANES), [1, 2, 0, 1]),
    sample("replication_pad2d_backward", normal(2, 4, 7, 9), normal(*PLANES), [1, 2, 0, 1]),
)

WINDOWS = (
    *CONVOLUTIONS,
    *SPATIAL_CONVOLUTIONS,
    *POOLS,
    *OVERLAPPING_POOLS,
    *SCALED_BY_WHOLE,
)
