# pyright: reportArgumentType=false, reportReturnType=false
# Calls stand as users write them, whatever the stubs of torch say.
"""Cases of `models.py`: single operations, each between an embedding, a linear map and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.benchmarks.cases_layers import (
    F64,
    LENGTH,
    SAMPLES,
    VOCAB,
    WIDTH,
    Op,
    inside,
    layer_ops,
    planes,
    positive,
)


class OpModel(nn.Module):
    """Tokens and features are mapped, meet an operation, and are mapped to a loss."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH, dtype=F64)
        self.up = nn.Linear(WIDTH, WIDTH, dtype=F64)
        self.down = nn.Linear(WIDTH, WIDTH, dtype=F64)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=F64) / 4)
        self.kernel = nn.Parameter(torch.randn(WIDTH, WIDTH, 3, dtype=F64) / 7)
        self.kernel_2d = nn.Parameter(torch.randn(8, 8, 3, 3, dtype=F64) / 9)
        self.b = nn.Parameter(torch.randn(WIDTH, dtype=F64))
        self.op = op

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h = self.up(self.embedding(ids) + x)
        y = self.op(self, h, ids)
        if y.shape == h.shape:
            y = self.down(y)
        return y.square().mean() + y.sin().sum() / 64


def op_batch() -> dict[str, Tensor]:
    """Features and tokens of one batch."""
    shape = (SAMPLES, LENGTH)
    return {"x": torch.randn(*shape, WIDTH, dtype=F64), "ids": torch.randint(0, VOCAB, shape)}


def _of(function: Callable[..., Any], prepare: Callable[[Tensor], Tensor], *args: Any) -> Op:
    return lambda m, h, ids: function(prepare(h), *args)


def _each(names: str, op: Callable[[Callable[..., Any]], Op]) -> dict[str, Op]:
    """An op of each function of torch."""
    return {name: op(getattr(torch, name)) for name in names.split()}


def _unary() -> dict[str, Op]:
    ops: dict[str, Op] = {}
    plain = (
        "abs neg exp expm1 sin cos tan sinh cosh tanh atan asinh sigmoid relu square sign floor "
        "ceil round trunc frac erf erfc sinc deg2rad positive logit nan_to_num exp2 sgn"
    )
    for name in plain.split():
        prepare = (lambda h: h.sigmoid() * 0.8 + 0.1) if name == "logit" else (lambda h: h)
        ops[name] = _of(getattr(torch, name), prepare)
    for name in "log log2 log10 log1p sqrt rsqrt reciprocal lgamma digamma i0".split():
        ops[name] = _of(getattr(torch, name), positive)
    for name in "acos asin atanh erfinv arctan".split():
        ops[name] = _of(getattr(torch, name), inside)
    ops["acosh"] = _of(torch.acosh, lambda h: h.square() + 1.5)
    activations = (
        "gelu silu elu selu celu mish softplus softsign logsigmoid hardtanh hardswish hardsigmoid "
        "leaky_relu relu6 tanhshrink softshrink hardshrink"
    )
    for name in activations.split():
        ops[name] = _of(getattr(F, name), lambda h: h)
    ops |= {
        "gelu-tanh": lambda m, h, i: F.gelu(h, approximate="tanh"),
        "prelu": lambda m, h, i: F.prelu(h.transpose(1, 2), m.b).transpose(1, 2),
        "glu": lambda m, h, i: F.glu(h, -1),
        "threshold": lambda m, h, i: F.threshold(h, 0.1, -1.0),
        "clamp": lambda m, h, i: h.clamp(-0.5, 0.7),
        "clamp-tensor": lambda m, h, i: h.clamp(min=-m.b.abs(), max=m.b.abs() + 1),
        "clip-min": lambda m, h, i: h.clip(min=0.1),
        "pow-2": lambda m, h, i: h**2,
        "pow-3.5": lambda m, h, i: positive(h) ** 3.5,
        "pow-tensor": lambda m, h, i: positive(h) ** m.b,
        "scalar-pow": lambda m, h, i: 2.0**h,
        "rsub": lambda m, h, i: 1 - h,
        "to-int-and-back": lambda m, h, i: h + h.detach().long().to(F64),
        "masked-fill": lambda m, h, i: h.masked_fill(i[..., None] > 7, 0.5),
        "where": lambda m, h, i: torch.where(h > 0, h, 0.1 * h),
        "where-scalar": lambda m, h, i: torch.where(i[..., None] % 2 == 0, h, 0.0),
        "lerp": lambda m, h, i: torch.lerp(h, h.flip(0), 0.3),
        "lerp-tensor": lambda m, h, i: torch.lerp(h, h * 2, m.b),
        "addcmul": lambda m, h, i: torch.addcmul(h, h, m.b, value=0.5),
        "addcdiv": lambda m, h, i: torch.addcdiv(h, h, positive(m.b), value=0.5),
        "heaviside": lambda m, h, i: h * torch.heaviside(h.detach(), torch.zeros((), dtype=F64)),
        "isfinite": lambda m, h, i: torch.where(h.isfinite(), h, 0.0),
        "polygamma": lambda m, h, i: torch.polygamma(1, positive(h)),
        "xlogy": lambda m, h, i: torch.xlogy(positive(h), positive(m.b)),
        "logical": lambda m, h, i: h * ((h > 0) & ~(h > 1) | (h < -1)).to(F64),
        "bitwise": lambda m, h, i: h * ((i & 3) | (i ^ 1)).to(F64)[..., None],
        "shift": lambda m, h, i: h * (((i << 1) >> 2) + 1).to(F64)[..., None],
        "special-xlog1py": lambda m, h, i: torch.special.xlog1py(h, positive(m.b)),
        "special-entr": lambda m, h, i: torch.special.entr(positive(h)),
        "special-ndtr": lambda m, h, i: torch.special.ndtr(h),
    }
    return ops


def _binary() -> dict[str, Op]:
    names = "add sub mul maximum minimum fmax fmin atan2 hypot logaddexp logaddexp2"
    ops = _each(names, lambda f: lambda m, h, i: f(h, m.b))
    ops |= _each(
        "div true_divide fmod remainder", lambda f: lambda m, h, i: h + f(h, positive(m.b))
    )
    ops |= _each("eq ne lt le gt ge", lambda f: lambda m, h, i: h * f(h, m.b).to(F64))
    ops |= {
        "div-rounded": lambda m, h, i: h + torch.div(h, positive(m.b), rounding_mode="trunc"),
        "copysign": lambda m, h, i: torch.copysign(h, m.b),
        "outer": lambda m, h, i: h + torch.outer(m.b, m.b)[:8],
        "cross": lambda m, h, i: torch.linalg.cross(h[..., :3], h[..., 3:6]),
        "dot": lambda m, h, i: torch.dot(h.flatten(), h.flatten().cos()),
        "cosine-similarity": lambda m, h, i: F.cosine_similarity(h, h.flip(1), -1),
        "pairwise-distance": lambda m, h, i: F.pairwise_distance(h, h.flip(1) + 1),
        "cdist": lambda m, h, i: torch.cdist(h, h.flip(1) + 1),
        "dist": lambda m, h, i: torch.dist(h, h.flip(1)),
    }
    return ops


def _reductions() -> dict[str, Op]:
    ops: dict[str, Op] = {}
    for name in "sum mean prod amax amin logsumexp var std norm nansum median".split():
        for dim in (-1, 1, 0):
            f = getattr(torch, name)
            ops[f"{name}-{dim}"] = lambda m, h, i, f=f, dim=dim: _value(f(h, dim=dim))
    of_all = _each("sum mean max min var std norm median", lambda f: lambda m, h, i: f(h))
    ops |= {f"{name}-all": op for name, op in of_all.items()}
    for name in "cumsum logcumsumexp cumprod cummax cummin".split():
        for dim in (-1, 1):
            f = getattr(torch, name)
            ops[f"{name}-{dim}"] = lambda m, h, i, f=f, dim=dim: _value(f(h, dim=dim))
    ops |= {
        "prod-all": lambda m, h, i: (1 + h[0] * 0.01).prod(),
        "aminmax": lambda m, h, i: torch.stack(torch.aminmax(h, dim=-1)),
        "argmax": lambda m, h, i: h * h.argmax(-1, keepdim=True),
        "argmin": lambda m, h, i: h * h.argmin(1, keepdim=True),
        "any-all": lambda m, h, i: h * (h > 1).any(-1, keepdim=True) + (h > -9).all(),
        "count-nonzero": lambda m, h, i: h * (h > 0).count_nonzero(dim=-1)[..., None],
        "max-dim": lambda m, h, i: h.max(-1).values,
        "min-dim-0": lambda m, h, i: h.min(0).values,
        "var-mean": lambda m, h, i: torch.stack(torch.var_mean(h, (1, 2))),
        "std-mean-unbiased": lambda m, h, i: torch.stack(torch.std_mean(h, -1, correction=0)),
        "norm-1": lambda m, h, i: h.norm(p=1, dim=-1),
        "norm-inf": lambda m, h, i: h.norm(p=float("inf"), dim=-1),
        "norm-3": lambda m, h, i: torch.linalg.vector_norm(h, 3, dim=(1, 2)),
        "matrix-norm": lambda m, h, i: torch.linalg.matrix_norm(h),
        "normalize": lambda m, h, i: F.normalize(h, dim=-1),
        "softmax": lambda m, h, i: h.softmax(-1),
        "softmax-positions": lambda m, h, i: h.softmax(1),
        "softmax-samples": lambda m, h, i: h.softmax(0),
        "log-softmax": lambda m, h, i: h.log_softmax(-1),
        "softmin": lambda m, h, i: F.softmin(h, -1),
        "quantile": lambda m, h, i: h.quantile(0.3, dim=-1),
        "mode": lambda m, h, i: h.round().mode(-1).values + h.sum(-1),
        "kthvalue": lambda m, h, i: h.kthvalue(3, dim=-1).values,
        "topk": lambda m, h, i: h.topk(4, dim=-1).values,
        "sort": lambda m, h, i: h.sort(dim=-1).values,
        "sort-descending": lambda m, h, i: h.sort(dim=1, descending=True).values,
        "argsort": lambda m, h, i: h.gather(-1, h.argsort(-1)),
        "msort": lambda m, h, i: torch.msort(h),
        "diff": lambda m, h, i: h.diff(dim=1),
        "trapezoid": lambda m, h, i: torch.trapezoid(h, dim=-1),
        "renorm": lambda m, h, i: h.renorm(2, 0, 1.0),
        "histogram-by-one-hot": lambda m, h, i: F.one_hot(i, VOCAB).sum(1).to(F64) * h.sum(1),
        "bucketize": lambda m, h, i: h * torch.bucketize(h.detach(), torch.arange(3.0, dtype=F64)),
        "searchsorted": lambda m, h, i: (
            h * torch.searchsorted(torch.arange(3.0, dtype=F64), h.detach())
        ),
        "cov": lambda m, h, i: torch.cov(h.flatten(0, 1).T),
    }
    return ops


def _value(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def _shapes() -> dict[str, Op]:
    return {
        "reshape": lambda m, h, i: h.reshape(64, 16).reshape(8, 8, 16),
        "flatten": lambda m, h, i: h.flatten(1),
        "unflatten": lambda m, h, i: h.unflatten(-1, (4, 4)),
        "transpose": lambda m, h, i: h.transpose(1, 2),
        "permute": lambda m, h, i: h.permute(2, 0, 1),
        "movedim": lambda m, h, i: h.movedim(0, -1),
        "squeeze": lambda m, h, i: h[:, :1].squeeze(1),
        "expand": lambda m, h, i: h.unsqueeze(1).expand(-1, 3, -1, -1),
        "repeat": lambda m, h, i: h.repeat(1, 2, 1),
        "tile": lambda m, h, i: h.tile(1, 1, 2),
        "repeat-interleave": lambda m, h, i: h.repeat_interleave(2, dim=1),
        "cat": lambda m, h, i: torch.cat([h, h * 2], 1),
        "cat-features": lambda m, h, i: torch.cat([h[..., :8], h[..., 8:] * 2], -1),
        "cat-samples": lambda m, h, i: torch.cat([h, h.cos()], 0),
        "stack": lambda m, h, i: torch.stack([h, h.sin()], 2),
        "chunk": lambda m, h, i: h.chunk(2, -1)[0] * h.chunk(2, -1)[1],
        "split": lambda m, h, i: h.split([4, 12], -1)[1],
        "tensor-split": lambda m, h, i: torch.tensor_split(h, 3, dim=-1)[1],
        "unbind": lambda m, h, i: sum(part * n for n, part in enumerate(h.unbind(1))),
        "narrow": lambda m, h, i: h.narrow(1, 2, 4),
        "slice": lambda m, h, i: h[:, 1:-1, ::2],
        "slice-samples": lambda m, h, i: h[1:5],
        "select": lambda m, h, i: h[:, -1],
        "roll": lambda m, h, i: h.roll(1, 1) + h.roll((1, 3), (0, 2)),
        "flip": lambda m, h, i: h.flip(1),
        "rot90": lambda m, h, i: h.rot90(1, (1, 2)),
        "pad": lambda m, h, i: F.pad(h, (1, 2, 0, 1)),
        "pad-negative": lambda m, h, i: F.pad(h, (-1, 0)),
        "pad-reflect": lambda m, h, i: F.pad(h, (1, 2), mode="reflect"),
        "pad-replicate": lambda m, h, i: F.pad(h, (1, 2), mode="replicate"),
        "pad-circular": lambda m, h, i: F.pad(h, (1, 2), mode="circular"),
        "tril": lambda m, h, i: h.tril(),
        "triu": lambda m, h, i: h.triu(1),
        "diagonal": lambda m, h, i: h.diagonal(dim1=1, dim2=2),
        "diag-embed": lambda m, h, i: torch.diag_embed(h),
        "diagflat": lambda m, h, i: torch.diagflat(m.b) @ h.mT,
        "trace": lambda m, h, i: torch.trace(h[0]),
        "unfold": lambda m, h, i: h.unfold(1, 3, 2),
        "as-strided": lambda m, h, i: h.as_strided((8, 4, 16), (128, 32, 1)),
        "meshgrid": lambda m, h, i: h + torch.meshgrid(m.b, m.b[:4], indexing="ij")[0].sum(1),
        "cartesian-prod": lambda m, h, i: torch.cartesian_prod(m.b, h[0, 0]),
        "block-diag": lambda m, h, i: torch.block_diag(h[0], h[1]),
        "kron": lambda m, h, i: torch.kron(h[0], m.w[:2, :2]),
        "channel-shuffle": lambda m, h, i: F.channel_shuffle(planes(h), 2),
        "pixel-shuffle": lambda m, h, i: F.pixel_shuffle(planes(h), 2),
        "pixel-unshuffle": lambda m, h, i: F.pixel_unshuffle(planes(h), 2),
        "im2col": lambda m, h, i: F.unfold(planes(h), 2),
        "col2im": lambda m, h, i: F.fold(h.view(8, 16, 8)[:, :, :4], 4, 2, stride=2),
        "new-zeros": lambda m, h, i: h + h.new_zeros(16) + h.new_ones(()) + torch.zeros_like(h),
        "arange": lambda m, h, i: h * torch.arange(16, dtype=F64),
        "linspace": lambda m, h, i: h * torch.linspace(0, 1, 16, dtype=F64),
        "logspace": lambda m, h, i: h * torch.logspace(0, 1, 16, dtype=F64),
        "eye": lambda m, h, i: h @ torch.eye(16, dtype=F64),
        "tri-mask": lambda m, h, i: h * torch.ones(8, 16, dtype=F64).tril(),
        "full": lambda m, h, i: h * torch.full((16,), 0.3, dtype=F64),
        "hann-window": lambda m, h, i: h * torch.hann_window(16, dtype=F64),
    }


def _indexing() -> dict[str, Op]:
    return {
        "gather": lambda m, h, i: h.gather(-1, i[..., None]),
        "take-along-dim": lambda m, h, i: h.take_along_dim((i % 8)[..., None], dim=1),
        "index-select": lambda m, h, i: h.index_select(1, i[0] % 8),
        "index": lambda m, h, i: h[:, i[0] % 8],
        "index-two": lambda m, h, i: h[torch.arange(8)[:, None], i % 8],
        "index-bool-where": lambda m, h, i: torch.where((i > 3)[..., None], h, 0.0),
        "take": lambda m, h, i: torch.take(h, i),
        "embedding": lambda m, h, i: h + F.embedding(i, m.w),
        "embedding-padding": lambda m, h, i: h + F.embedding(i, m.w, padding_idx=3),
        "embedding-bag": lambda m, h, i: F.embedding_bag(i, m.w, mode="sum"),
        "embedding-bag-mean": lambda m, h, i: F.embedding_bag(i, m.w, mode="mean"),
        "one-hot": lambda m, h, i: h + F.one_hot(i, VOCAB),
        "scatter": lambda m, h, i: h.scatter(-1, i[..., None], 1.5),
        "scatter-src": lambda m, h, i: h.scatter(-1, i[..., None], h[..., :1].cos()),
        "scatter-add": lambda m, h, i: h.scatter_add(-1, i[..., None], h[..., :1].cos()),
        "scatter-reduce": lambda m, h, i: h.scatter_reduce(-1, i[..., None], h[..., :1], "mean"),
        "scatter-amax": lambda m, h, i: h.scatter_reduce(-1, i[..., None], h[..., :1] + 1, "amax"),
        "index-add": lambda m, h, i: h.index_add(2, i[0], h[..., :8].cos()),
        "index-copy": lambda m, h, i: h.index_copy(1, torch.tensor([2, 0]), h[:, 4:6].cos()),
        "index-fill": lambda m, h, i: h.index_fill(1, torch.tensor([2, 0]), 0.5),
        "index-put": lambda m, h, i: h.index_put((i[0] % 8,), m.w[:8] * 0.1, accumulate=True),
        "masked-scatter-like": lambda m, h, i: torch.where(h > 0, m.b.expand_as(h), h),
        "slice-assign": _slice_assign,
        "in-place-chain": lambda m, h, i: h.clone().mul_(2).add_(m.b).sigmoid_(),
        "fill-diagonal": lambda m, h, i: (h[0, :, :8] * 1).fill_diagonal_(0.5),
        "select-scatter": lambda m, h, i: torch.select_scatter(h, h[:, 0] * 2, 1, 3),
        "slice-scatter": lambda m, h, i: torch.slice_scatter(h, h[:, :2] * 2, 1, 3, 5),
        "index-put-assign": _index_assign,
    }


def _slice_assign(m: Any, h: Tensor, ids: Tensor) -> Tensor:
    y = h.clone()
    y[:, 0] = y[:, 1] * 2
    y[:, 2:5, 3:] = 0.5
    return y


def _index_assign(m: Any, h: Tensor, ids: Tensor) -> Tensor:
    y = h.clone()
    y[torch.arange(8), ids[:, 0] % 8] = m.b
    return y


def op_cases() -> dict[str, Op]:
    """All operations by name."""
    families = (_unary, _binary, _reductions, _shapes, _indexing)
    return {name: op for family in families for name, op in family().items()} | layer_ops()
