# pyright: reportArgumentType=false, reportReturnType=false, reportPrivateImportUsage=false
# Calls stand as users write them, whatever the stubs of torch say.
"""Operations of `cases_ops.py` that layers are made of: products, norms, attention, losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

F64 = torch.float64
SAMPLES, LENGTH, WIDTH, VOCAB = 8, 8, 16, 16

Op = Callable[[Any, Tensor, Tensor], Tensor]
"""(model, features of samples x positions x width, tokens of samples x positions) -> any tensor."""


def positive(h: Tensor) -> Tensor:
    """Larger than 0.5."""
    return h.square() + 0.5


def inside(h: Tensor) -> Tensor:
    """Between -0.9 and 0.9."""
    return h.tanh() * 0.9


def planes(h: Tensor) -> Tensor:
    """Samples x 8 channels x 4 x 4."""
    return h.view(SAMPLES, 8, 4, 4)


def volumes(h: Tensor) -> Tensor:
    """Samples x 2 channels x 4 x 4 x 4."""
    return h.view(SAMPLES, 2, 4, 4, 4)


def heads(h: Tensor) -> Tensor:
    """Samples x heads x positions x 4."""
    return h.view(SAMPLES, LENGTH, 4, 4).transpose(1, 2)


def spd(m: Any, h: Tensor) -> Tensor:
    """Symmetric matrices of positive eigenvalues, one for each sample."""
    square = h[:, :, :8]
    return square @ square.mT + 8 * torch.eye(8, dtype=F64)


def _products() -> dict[str, Op]:
    return {
        "matmul": lambda m, h, i: h @ m.w,
        "matmul-vector": lambda m, h, i: h @ m.b,
        "bmm": lambda m, h, i: torch.bmm(h, h.mT),
        "baddbmm": lambda m, h, i: torch.baddbmm(h, h @ h.mT, h, beta=0.5, alpha=0.1),
        "addmm": lambda m, h, i: torch.addmm(m.b, h[0], m.w, beta=0.5, alpha=2.0),
        "mv": lambda m, h, i: torch.mv(h[0], m.b),
        "einsum": lambda m, h, i: torch.einsum("bsd,de->bse", h, m.w),
        "einsum-attention": lambda m, h, i: torch.einsum("bqd,bkd->bqk", h, h),
        "einsum-three": lambda m, h, i: torch.einsum("bsd,de,bse->bs", h, m.w, h),
        "tensordot": lambda m, h, i: torch.tensordot(h, m.w, dims=([2], [1])),
        "bilinear": lambda m, h, i: F.bilinear(h, h, m.w.expand(4, 16, 16)),
        "chain-matmul": lambda m, h, i: torch.linalg.multi_dot([h[0], m.w, m.w]),
        "inner": lambda m, h, i: torch.inner(h, m.w),
        "conv1d": lambda m, h, i: F.conv1d(h.mT, m.kernel, m.b).mT,
        "conv1d-same": lambda m, h, i: F.conv1d(h.mT, m.kernel, padding="same").mT,
        "conv1d-grouped": lambda m, h, i: F.conv1d(h.mT, m.kernel[:, :1], groups=16, padding=1).mT,
        "conv1d-dilated": lambda m, h, i: F.conv1d(h.mT, m.kernel, dilation=2).mT,
        "conv-transpose1d": lambda m, h, i: F.conv_transpose1d(h.mT, m.kernel, stride=2).mT,
        "conv2d": lambda m, h, i: F.conv2d(planes(h), m.kernel_2d, padding=1),
        "conv2d-strided": lambda m, h, i: F.conv2d(planes(h), m.kernel_2d, stride=2, padding=1),
        "conv-transpose2d": lambda m, h, i: F.conv_transpose2d(planes(h), m.kernel_2d, stride=2),
        "conv3d": lambda m, h, i: F.conv3d(volumes(h), m.kernel_2d[:2, :2, None]),
        "cholesky": lambda m, h, i: torch.linalg.cholesky(spd(m, h)),
        "solve": lambda m, h, i: torch.linalg.solve(spd(m, h), h),
        "solve-triangular": lambda m, h, i: torch.linalg.solve_triangular(
            spd(m, h).tril(), h, upper=False
        ),
        "inverse": lambda m, h, i: torch.linalg.inv(spd(m, h)),
        "det": lambda m, h, i: torch.linalg.det(spd(m, h) / 20),
        "slogdet": lambda m, h, i: torch.linalg.slogdet(spd(m, h)).logabsdet,
        "qr": lambda m, h, i: torch.linalg.qr(spd(m, h)).R,
        "svdvals": lambda m, h, i: torch.linalg.svdvals(spd(m, h)),
        "eigvalsh": lambda m, h, i: torch.linalg.eigvalsh(spd(m, h)),
        "eigh": lambda m, h, i: torch.linalg.eigh(spd(m, h)).eigenvectors.abs(),
        "matrix-exp": lambda m, h, i: torch.linalg.matrix_exp(spd(m, h) / 20),
        "matrix-power": lambda m, h, i: torch.linalg.matrix_power(spd(m, h) / 10, 3),
        "pinv": lambda m, h, i: torch.linalg.pinv(spd(m, h)),
        "fft": lambda m, h, i: torch.fft.fft(h).abs(),
        "rfft": lambda m, h, i: torch.fft.irfft(torch.fft.rfft(h) * 2),
        "fft2": lambda m, h, i: torch.fft.fft2(h).real,
        "complex-rotary": _complex_rotary,
        "polar": lambda m, h, i: torch.polar(positive(h), h).imag,
        "complex-product": lambda m, h, i: (torch.complex(h, h) * torch.complex(m.b, m.b)).angle(),
    }


def _complex_rotary(m: Any, h: Tensor, ids: Tensor) -> Tensor:
    angles = torch.polar(torch.ones(8, 8, dtype=F64), torch.arange(64, dtype=F64).view(8, 8) / 9)
    turned = torch.view_as_complex(h.view(8, 8, 8, 2)) * angles
    return torch.view_as_real(turned).flatten(2)


def _pools_and_norms() -> dict[str, Op]:
    return {
        "max-pool1d": lambda m, h, i: F.max_pool1d(h.mT, 2),
        "max-pool2d": lambda m, h, i: F.max_pool2d(planes(h), 2),
        "max-pool3d": lambda m, h, i: F.max_pool3d(volumes(h), 2),
        "avg-pool1d": lambda m, h, i: F.avg_pool1d(h.mT, 2),
        "avg-pool2d": lambda m, h, i: F.avg_pool2d(planes(h), 3, 1, 1, count_include_pad=False),
        "avg-pool3d": lambda m, h, i: F.avg_pool3d(volumes(h), 2),
        "lp-pool2d": lambda m, h, i: F.lp_pool2d(positive(planes(h)), 2, 2),
        "adaptive-avg-pool1d": lambda m, h, i: F.adaptive_avg_pool1d(h, 3),
        "adaptive-avg-pool2d": lambda m, h, i: F.adaptive_avg_pool2d(planes(h), 3),
        "adaptive-avg-pool3d": lambda m, h, i: F.adaptive_avg_pool3d(volumes(h), 2),
        "adaptive-max-pool1d": lambda m, h, i: F.adaptive_max_pool1d(h, 3),
        "adaptive-max-pool2d": lambda m, h, i: F.adaptive_max_pool2d(planes(h), 3),
        "adaptive-max-pool3d": lambda m, h, i: F.adaptive_max_pool3d(volumes(h), 2),
        "max-unpool2d": lambda m, h, i: F.max_unpool2d(
            *F.max_pool2d(planes(h), 2, return_indices=True), 2
        ),
        "interpolate-nearest": lambda m, h, i: F.interpolate(planes(h), scale_factor=2),
        "interpolate-bilinear": lambda m, h, i: F.interpolate(
            planes(h), size=(6, 5), mode="bilinear"
        ),
        "interpolate-bicubic": lambda m, h, i: F.interpolate(
            planes(h), size=(6, 5), mode="bicubic", align_corners=True
        ),
        "interpolate-antialias": lambda m, h, i: F.interpolate(
            planes(h), size=(3, 3), mode="bilinear", antialias=True
        ),
        "interpolate-linear": lambda m, h, i: F.interpolate(h, size=12, mode="linear"),
        "interpolate-trilinear": lambda m, h, i: F.interpolate(
            volumes(h), size=(3, 5, 6), mode="trilinear"
        ),
        "interpolate-area": lambda m, h, i: F.interpolate(planes(h), size=2, mode="area"),
        "interpolate-exact": lambda m, h, i: F.interpolate(planes(h), size=7, mode="nearest-exact"),
        "grid-sample": lambda m, h, i: F.grid_sample(
            planes(h), inside(h).view(8, 8, 8, 2), align_corners=False
        ),
        "affine-grid": lambda m, h, i: F.grid_sample(
            planes(h),
            F.affine_grid(m.w[:2, :3].expand(8, 2, 3), (8, 8, 4, 4), align_corners=False),
            align_corners=False,
        ),
        "layer-norm": lambda m, h, i: F.layer_norm(h, (16,), m.b),
        "layer-norm-two": lambda m, h, i: F.layer_norm(h, (8, 16)),
        "rms-norm": lambda m, h, i: F.rms_norm(h, (16,), m.b),
        "group-norm": lambda m, h, i: F.group_norm(h.mT, 4, m.b),
        "instance-norm": lambda m, h, i: F.instance_norm(planes(h)),
        "batch-norm": lambda m, h, i: F.batch_norm(h.mT, None, None, m.b, training=True),
        "local-response-norm": lambda m, h, i: F.local_response_norm(planes(h), 3),
        "weight-norm": lambda m, h, i: h @ torch._weight_norm(m.w, m.b[:, None], 0),
    }


def _attention() -> dict[str, Op]:
    sdpa = F.scaled_dot_product_attention
    return {
        "sdpa": lambda m, h, i: sdpa(heads(h), heads(h), heads(h)),
        "sdpa-causal": lambda m, h, i: sdpa(*[heads(h)] * 3, is_causal=True),
        "sdpa-scale": lambda m, h, i: sdpa(*[heads(h)] * 3, scale=0.3),
        "sdpa-bool-mask": lambda m, h, i: sdpa(
            *[heads(h)] * 3, attn_mask=(i > 0)[:, None, None] | torch.eye(8, dtype=torch.bool)
        ),
        "sdpa-made-mask": lambda m, h, i: sdpa(
            *[heads(h)] * 3, attn_mask=torch.ones(8, 8, dtype=torch.bool).tril()
        ),
        "sdpa-float-mask": lambda m, h, i: sdpa(*[heads(h)] * 3, attn_mask=m.w[:8, :8]),
        "sdpa-cross": lambda m, h, i: sdpa(heads(h), heads(h)[:, :, :5], heads(h)[:, :, :5]),
        "sdpa-grouped": lambda m, h, i: sdpa(
            heads(h), heads(h)[:, ::2], heads(h)[:, ::2], enable_gqa=True
        ),
        "sdpa-three-dims": lambda m, h, i: sdpa(h, h, h),
        "attention-by-hand": lambda m, h, i: (
            (heads(h) @ heads(h).mT).masked_fill(i[:, None, None] > 13, -1e9).softmax(-1) @ heads(h)
        ),
    }


def _losses() -> dict[str, Op]:
    return {
        "cross-entropy": lambda m, h, i: F.cross_entropy(h.flatten(0, 1), i.flatten()),
        "cross-entropy-smooth": lambda m, h, i: F.cross_entropy(h.mT, i, label_smoothing=0.1),
        "cross-entropy-ignore": lambda m, h, i: F.cross_entropy(h.mT, i, ignore_index=3),
        "cross-entropy-weight": lambda m, h, i: F.cross_entropy(h.mT, i, m.b.detach().exp()),
        "cross-entropy-soft": lambda m, h, i: F.cross_entropy(
            h.mT, h.detach().cos().softmax(-1).mT
        ),
        "cross-entropy-none": lambda m, h, i: F.cross_entropy(h.mT, i, reduction="none"),
        "nll": lambda m, h, i: F.nll_loss(h.log_softmax(-1).mT, i),
        "mse": lambda m, h, i: F.mse_loss(h, h.detach().cos()),
        "l1": lambda m, h, i: F.l1_loss(h, h.detach().cos(), reduction="sum"),
        "smooth-l1": lambda m, h, i: F.smooth_l1_loss(h, h.detach().cos(), beta=0.5),
        "huber": lambda m, h, i: F.huber_loss(h, h.detach().cos(), delta=0.5),
        "bce": lambda m, h, i: F.binary_cross_entropy(h.sigmoid(), (h.detach() > 0).to(F64)),
        "bce-logits": lambda m, h, i: F.binary_cross_entropy_with_logits(
            h, (i > 7).to(F64)[..., None].expand_as(h), pos_weight=m.b.detach().exp()
        ),
        "kl-div": lambda m, h, i: F.kl_div(
            h.log_softmax(-1), h.detach().cos().softmax(-1), reduction="batchmean"
        ),
        "poisson-nll": lambda m, h, i: F.poisson_nll_loss(h, i.to(F64)[..., None].expand_as(h)),
        "gaussian-nll": lambda m, h, i: F.gaussian_nll_loss(h, h.detach().cos(), positive(h)),
        "cosine-embedding": lambda m, h, i: F.cosine_embedding_loss(
            h[:, 0], h[:, 1], (i[:, 0] % 2 * 2 - 1).to(F64)
        ),
        "hinge-embedding": lambda m, h, i: F.hinge_embedding_loss(h[..., 0], i % 2 * 2 - 1),
        "margin-ranking": lambda m, h, i: F.margin_ranking_loss(
            h[..., 0], h[..., 1], (i % 2 * 2 - 1).to(F64)
        ),
        "triplet": lambda m, h, i: F.triplet_margin_loss(h[:, 0], h[:, 1], h[:, 2]),
        "soft-margin": lambda m, h, i: F.soft_margin_loss(h[..., 0], (i % 2 * 2 - 1).to(F64)),
        "multi-margin": lambda m, h, i: F.multi_margin_loss(h[:, 0], i[:, 0]),
        "multilabel-soft-margin": lambda m, h, i: F.multilabel_soft_margin_loss(
            h[:, 0], (h[:, 1].detach() > 0).to(F64)
        ),
        "ctc": lambda m, h, i: F.ctc_loss(
            h.transpose(0, 1).log_softmax(-1),
            i[:, :3] % 15 + 1,
            torch.full((8,), 8),
            torch.full((8,), 3),
        ),
    }


def layer_ops() -> dict[str, Op]:
    """All of them by name."""
    families = (_products, _pools_and_norms, _attention, _losses)
    return {name: op for family in families for name, op in family().items()}
