"""Sample calls of products, convolutions, attention, reductions and normalisations."""

from __future__ import annotations

import torch
from torch import Tensor

from shardweave.ir.library.grouped import ALL_ROWS, GROUPED_MM, GROUPED_OUTER, OWN_ROWS
from shardweave.ir.library.positional_attention import (
    ATTENTION,
    ATTENTION_BACKWARD,
    MERGE_ATTENTION,
)
from shardweave.tests.ir.rules.samples_windows import PLANES, VOLUMES, WINDOWS
from shardweave.tests.ir.rules.sharded_op import Sample, sample
from shardweave.tests.ir.rules.tensors import above_one, booleans, integers, normal

PRODUCTS = (
    sample("mm", normal(4, 6), normal(6, 8)),
    sample("mv", normal(4, 6), normal(6)),
    sample("dot", normal(12), normal(12)),
    sample("bmm", normal(2, 4, 6), normal(2, 6, 4)),
    sample("addmm", normal(8), normal(4, 6), normal(6, 8)),
    sample("addmm", normal(4, 1), normal(4, 6), normal(6, 8), beta=0.5, alpha=2.0),
    sample("addmm", normal(4, 8), normal(4, 6), normal(6, 8)),
    sample("addmv", normal(4), normal(4, 6), normal(6)),
    sample("baddbmm", normal(1, 4, 4), normal(2, 4, 6), normal(2, 6, 4)),
)


FLOAT8 = torch.float8_e4m3fn


def scaled_product(left_scale: Tensor, right_scale: Tensor, bias: Tensor | None = None) -> Sample:
    """A product of factors in float8, which sums exactly what small whole numbers give."""
    left, right = (integers(*shape, high=4).to(FLOAT8) for shape in ((16, 32), (16, 32)))
    scales = left_scale.float(), right_scale.float()
    return sample("_scaled_mm", left, right.t(), *scales, bias, None, torch.float32)


SCALED = (
    scaled_product(torch.tensor(0.5), torch.tensor(2.0)),
    *(
        [scaled_product(2.0 ** integers(16, 1), 2.0 ** integers(1, 16))]
        if torch.__version__ >= (2, 12)  # pyright: ignore[reportOperatorIssue]
        else []  # CPUs take one scale for a tensor alone
    ),
    scaled_product(torch.tensor(0.5), torch.tensor(2.0), integers(16).float()),
)


FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def attention(
    mask: Tensor | None,
    *,
    backward: bool,
    keys: int = 4,
    is_causal: bool = False,
    heads: int = 4,
) -> Sample:
    """Flash attention of 2 samples, 8 positions and a head dim of 6."""
    q, k, v = normal(2, heads, 8, 6), normal(2, keys, 8, 6), normal(2, keys, 8, 6)
    keywords = {"attn_mask": mask} if mask is not None else {}
    if not backward:
        return sample(FLASH, q, k, v, 0.0, is_causal, **keywords)
    out, row = getattr(torch.ops.aten, FLASH)(q, k, v, 0.0, is_causal, **keywords)
    tensors = normal(2, heads, 8, 6), q, k, v, out, row
    return sample(f"{FLASH}_backward", *tensors, 0.0, is_causal, **keywords)


FLASH_ATTENTION = tuple(
    attention(mask, backward=backward, is_causal=is_causal)
    for backward in (False, True)
    for mask, is_causal in [
        (None, False),
        (None, True),
        (normal(8, 8), False),
        (normal(2, 1, 8, 8), False),
        (normal(2, 4, 8, 8), False),
    ]
) + tuple(
    attention(mask, backward=backward, keys=keys, is_causal=True, heads=heads)
    for backward in (False, True)
    for mask, keys, heads in [
        (None, 2, 4),
        (None, 1, 4),
        (normal(2, 4, 8, 8), 2, 4),
        (None, 2, 6),
        (None, 3, 6),
    ]
)


def attention_by_positions(mask: Tensor | None, *, backward: bool, keys: int = 4) -> Sample:
    """Attention of 8 queries at every other of 12 positions, 6 of them with keys."""
    q, k, v = normal(2, 4, 8, 6), normal(2, keys, 6, 6), normal(2, keys, 6, 6)
    more = mask, torch.arange(1, 17, 2), torch.arange(6)
    if not backward:
        return sample(ATTENTION, q, k, v, *more)
    forward = torch.ops.shardweave.attention(q, k, v, *more)
    return sample(ATTENTION_BACKWARD, normal(2, 4, 8, 6), q, k, v, *forward, *more)


BY_POSITIONS = tuple(
    attention_by_positions(mask, backward=backward, keys=keys)
    for backward in (False, True)
    for mask, keys in [(None, 4), (None, 2), (normal(2, 1, 8, 6), 4)]
)
MERGED = sample(
    MERGE_ATTENTION, normal(2, 4, 8, 6), normal(2, 4, 8), normal(2, 4, 8, 6), normal(2, 4, 8)
)

OF_DIM = "all.dim any.dim argmax argmin max.dim min.dim median.dim nanmedian.dim mode prod.dim_int".split()
ALONG_DIM = "cumsum cumprod logcumsumexp cummax cummin argsort sort topk kthvalue".split()
OF_DIMS = "amax amin sum.dim_IntList mean.dim logsumexp all.dims any.dims".split()
WITH_CORRECTION = "var var_mean std std_mean".split()
OF_ALL = "sum max min mean prod all any argmax argmin".split()


def _of_dim(name: str, dim: int | list[int], *, keepdim: bool) -> Sample:
    x = booleans(4, 6) if name.startswith(("all", "any")) else normal(4, 6)
    return sample(name, x, dim, keepdim)


def _along_dim(name: str, dim: int) -> Sample:
    if name in ("topk", "kthvalue"):
        return sample(name, normal(4, 6), 3, dim)
    return sample(name, normal(4, 6), dim)


REDUCTIONS = (
    *(_of_dim(name, 1, keepdim=False) for name in OF_DIM),
    *(_of_dim(name, -2, keepdim=True) for name in OF_DIM),
    *(_along_dim(name, dim) for name in ALONG_DIM for dim in (0, -1)),
    *(_of_dim(name, [0], keepdim=False) for name in OF_DIMS),
    *(_of_dim(name, [-1], keepdim=True) for name in OF_DIMS),
    *(_of_dim(name, [0, 1], keepdim=True) for name in OF_DIMS),
    *(sample(f"{name}.correction", normal(4, 6), [1], correction=1) for name in WITH_CORRECTION),
    *(sample(f"{name}.correction", normal(4, 6), keepdim=True) for name in WITH_CORRECTION),
    *(sample(name, booleans(4, 6) if name in ("all", "any") else normal(4, 6)) for name in OF_ALL),
    sample("sum.dim_IntList", integers(4, 6), [1]),
    sample("sum.dim_IntList", normal(2, 4, 6), [0, -1]),
    sample("sum.dim_IntList", booleans(4, 6), [1]),
    sample("sum.dim_IntList", normal(4, 6).float(), [1], dtype=torch.float64),
    sample("amax", integers(4, 6), [1]),
    sample("sort.stable", normal(4, 6), stable=True, dim=0),
    sample("linalg_vector_norm", normal(4, 6)),
    sample("linalg_vector_norm", normal(4, 6), 1, [1], True),
    sample("_softmax", normal(4, 6), -1, False),
    sample("_log_softmax", normal(4, 6), 0, False),
    sample("_safe_softmax", normal(4, 6), -1),
    sample("_softmax_backward_data", normal(4, 6), normal(4, 6), -1, torch.float64),
    sample("_log_softmax_backward_data", normal(4, 6), normal(4, 6), 0, torch.float64),
)

X, ROW, CHANNELS = (2, 4, 6), (2, 4, 1), (2, 8, 4, 4)

NORMALIZATIONS = (
    sample("native_layer_norm", normal(*X), [6], normal(6), normal(6), 1e-5),
    sample("native_layer_norm", normal(*X), [6], None, None, 1e-5),
    sample("native_layer_norm", normal(*X), [4, 6], normal(4, 6), None, 1e-5),
    sample("native_layer_norm", normal(*X), [4, 6], None, normal(4, 6), 1e-5),
    sample("native_layer_norm", normal(2, 1, 6), [6], None, None, 1e-5),
    sample(
        "native_layer_norm_backward",
        *(normal(*X), normal(*X), [6], normal(*ROW), above_one(*ROW), normal(6), normal(6)),
        [True, True, True],
    ),
    sample(
        "native_layer_norm_backward",
        *(normal(*X), normal(*X), [6], normal(*ROW), above_one(*ROW), normal(6), None),
        [True, True, False],
    ),
    sample(
        "native_layer_norm_backward",
        *(normal(*X), normal(*X), [6], normal(*ROW), above_one(*ROW), None, None),
        [True, False, False],
    ),
    sample("_fused_rms_norm", normal(*X), [6], normal(6), 1e-6),
    sample("_fused_rms_norm", normal(*X), [6], None, 1e-6),
    sample(
        "_fused_rms_norm_backward",
        *(normal(*X), normal(*X), [6], above_one(*ROW), normal(6), [True, True]),
    ),
    sample("native_group_norm", normal(*CHANNELS), normal(8), normal(8), 2, 8, 16, 4, 1e-5),
    sample("native_group_norm", normal(*CHANNELS), None, None, 2, 8, 16, 2, 1e-5),
    sample("native_group_norm", normal(*CHANNELS), None, normal(8), 2, 8, 16, 2, 1e-5),
    sample(
        "native_group_norm_backward",
        *(normal(*CHANNELS), normal(*CHANNELS), normal(2, 4), above_one(2, 4), normal(8)),
        *(2, 8, 16, 4, [True, True, True]),
    ),
    sample(
        "native_group_norm_backward",
        *(normal(*CHANNELS), normal(*CHANNELS), normal(2, 2), above_one(2, 2), normal(8)),
        *(2, 8, 16, 2, [True, True, False]),
    ),
)


TRANSFORMS = (
    sample("_fft_r2c", normal(4, 6, 8), [2], 0, True),
    sample("_fft_c2c", torch.complex(normal(4, 6), normal(4, 6)), [0], 1, False),
    sample("_fft_c2r", torch.complex(normal(4, 5), normal(4, 5)), [1], 2, 8),
)

STARTS, ENDS = (torch.tensor(bounds, dtype=torch.int32) for bounds in ([0, 3, 3, 6], [3, 3, 6, 11]))
"""Four groups of 12 rows: the second is empty, and the last row belongs to none."""

BOUNDS = torch.tensor([0, 6, 12])
"""Two devices' rows, of as many as types count: those of two groups each."""

FIRSTS, LASTS = (
    torch.tensor(bounds, dtype=torch.int32) for bounds in ([0, 2, 6, 6], [2, 6, 6, 12])
)

GROUPED = (
    sample(OWN_ROWS, normal(12, 6), BOUNDS, blocks=2),
    sample(ALL_ROWS, normal(12, 6), BOUNDS, num_rows=12, blocks=2),
    sample(GROUPED_MM, normal(12, 6), normal(4, 6, 8), FIRSTS, LASTS, BOUNDS, groups=4, blocks=2),
    sample(GROUPED_OUTER, normal(12, 6), normal(12, 8), FIRSTS, LASTS, BOUNDS, groups=4, blocks=2),
    sample(GROUPED_MM, normal(12, 6), normal(4, 6, 8), STARTS, ENDS, groups=4),
    sample(GROUPED_OUTER, normal(12, 6), normal(12, 8), STARTS, ENDS, groups=4),
    sample("histc", normal(12), 4, -2, 2),
    sample("histc", normal(12), 4, 0, 0),
)

MATRICES = torch.eye(4, dtype=torch.float64) * 9 + normal(4, 4, 4)
SYMMETRIC = MATRICES @ MATRICES.mT
LU = torch.ops.aten.linalg_lu_factor_ex(MATRICES)
LDL, GEQRF = torch.ops.aten.linalg_ldl_factor_ex(SYMMETRIC), torch.geqrf(MATRICES)
NAMED_ALIKE = "linalg_inv_ex linalg_qr linalg_lu linalg_lu_factor_ex linalg_matrix_exp".split()

FACTORISATIONS = (
    *(sample(name, MATRICES) for name in [*NAMED_ALIKE, "_linalg_det", "_linalg_slogdet"]),
    *(sample(name, SYMMETRIC) for name in ("linalg_cholesky_ex", "_linalg_eigh")),
    sample("_linalg_svd", MATRICES),
    sample("_linalg_svd", MATRICES, False, False),
    sample("linalg_eig", SYMMETRIC),
    sample("_linalg_solve_ex", MATRICES, normal(4, 4, 6)),
    sample("_linalg_solve_ex", MATRICES, normal(4, 4)),
    sample("linalg_lu_solve", *LU[:2], normal(4, 4, 6)),
    sample("linalg_solve_triangular", MATRICES.tril(), normal(4, 4, 6), upper=False),
    sample("triangular_solve", normal(4, 4, 6), MATRICES.tril(), False),
    sample("cholesky_inverse", MATRICES.tril()),
    sample("lu_unpack", *LU[:2]),
    sample("linalg_ldl_factor_ex", SYMMETRIC),
    sample("linalg_ldl_solve", *LDL[:2], normal(4, 4, 6)),
    sample("linalg_householder_product", *GEQRF),
    sample("geqrf", MATRICES),
    sample("ormqr", *GEQRF, normal(4, 4, 6)),
    sample("cholesky_solve", normal(4, 4, 6), MATRICES.tril()),
)


def distances_backward() -> Sample:
    x, y = normal(2, 4, 3), normal(2, 6, 3)
    forward = torch.ops.aten._cdist_forward(x, y, 2.0, None)
    return sample("_cdist_backward", normal(2, 4, 6), x, y, 2.0, forward)


OF_PAIRS = (
    sample("_cdist_forward", normal(2, 4, 3), normal(2, 6, 3), 2.0, None),
    distances_backward(),
    sample("linalg_cross", normal(4, 3, 6), normal(4, 3, 1), dim=1),
)

GRID, GRID_OF_VOLUMES = normal(2, 3, 5, 2) / 2, normal(2, 3, 5, 2, 3) / 2


def unpool(shape: tuple[int, ...]) -> Sample:
    num = len(shape) - 2
    pool = getattr(torch.ops.aten, f"max_pool{num}d_with_indices")
    y, indices = pool(normal(*shape), [2] * num, [2] * num)
    sizes = [list(shape[2:])] + ([[2] * num, [0] * num] if num == 3 else [])
    return sample(f"max_unpool{num}d", y, indices, *sizes)


RESAMPLED = (
    sample("_upsample_bilinear2d_aa", normal(*PLANES), [3, 4], False),
    sample("_upsample_bicubic2d_aa", normal(*PLANES), [3, 4], False),
    *(
        sample(f"{name}_backward", normal(2, 4, 3, 4), [3, 4], list(PLANES), False)
        for name in (
            "upsample_bilinear2d",
            "upsample_bicubic2d",
            "_upsample_bilinear2d_aa",
            "_upsample_bicubic2d_aa",
        )
    ),
    *(
        sample(f"_upsample_nearest_exact{num}d", normal(2, 4, *[6] * num), [9] * num)
        for num in (1, 2, 3)
    ),
    *(
        sample(f"{kind}{num}d_backward", normal(2, 4, *[9] * num), [9] * num, [2, 4, *[6] * num])
        for kind, nums in (("_upsample_nearest_exact", (1, 2, 3)), ("upsample_nearest", (1, 3)))
        for num in nums
    ),
    sample("upsample_linear1d_backward", normal(2, 4, 9), [9], [2, 4, 6], False),
    sample("upsample_trilinear3d_backward", normal(2, 4, 9, 3, 6), [9, 3, 6], list(VOLUMES), True),
    sample("upsample_linear1d", normal(2, 4, 6), [9], False),
    sample("upsample_trilinear3d", normal(*VOLUMES), [9, 3, 6], True),
    unpool(PLANES),
    unpool(VOLUMES),
    sample("grid_sampler_2d", normal(*PLANES), GRID, 0, 0, False),
    sample("grid_sampler_3d", normal(*VOLUMES), GRID_OF_VOLUMES, 0, 0, False),
    *(
        sample("grid_sampler_2d_backward", normal(2, 4, 3, 5), normal(*PLANES), GRID, *mode)
        for mode in ((0, 0, False, [True, True]), (1, 1, True, [False, True]))
    ),
    sample(
        "grid_sampler_3d_backward",
        *(normal(2, 4, 3, 5, 2), normal(*VOLUMES), GRID_OF_VOLUMES, 0, 0, False, [True, True]),
    ),
)

COMPUTE = (
    *PRODUCTS,
    *SCALED,
    *GROUPED,
    *WINDOWS,
    *FLASH_ATTENTION,
    MERGED,
    *BY_POSITIONS,
    *REDUCTIONS,
    *NORMALIZATIONS,
    *TRANSFORMS,
    *FACTORISATIONS,
    *OF_PAIRS,
    *RESAMPLED,
)
