# pyright: reportArgumentType=false, reportReturnType=false
# Calls stand as users write them, whatever the stubs of torch say.
"""Cases of `models.py`: how layers share, route and combine, and attention as users write it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.benchmarks.cases_layers import F64, LENGTH, WIDTH
from shardweave.benchmarks.cases_modules import Parts, linear


def _tie(m: Any) -> None:
    m.down.weight = m.up.weight


def _tie_embedding(m: Any, h: Tensor, i: Tensor) -> Tensor:
    return F.cross_entropy((h @ m.embedding.weight.T).flatten(0, 1), i.flatten())


def _looped(m: Any, h: Tensor, i: Tensor) -> Tensor:
    for _ in range(3):
        h = h + m.down(h).tanh()
    return h


def _listed(m: Any, h: Tensor, i: Tensor) -> Tensor:
    for index, part in enumerate(m.parts):
        h = h + part(h) * (index + 1)
    return h


def _dense(m: Any, h: Tensor, i: Tensor) -> Tensor:
    states = [h]
    for part in m.parts:
        states.append(part(sum(states)).relu())
    return torch.stack(states).mean(0)


def _gated(m: Any, h: Tensor, i: Tensor) -> Tensor:
    scores = m.parts[0](h)[..., :3].softmax(-1)
    return sum(scores[..., k, None] * part(h) for k, part in enumerate(m.parts))


def _top_two(m: Any, h: Tensor, i: Tensor) -> Tensor:
    values, chosen = m.parts[0](h)[..., :3].topk(2)
    weights = torch.zeros_like(h[..., :3]).scatter(-1, chosen, values.softmax(-1))
    return sum(weights[..., k, None] * part(h) for k, part in enumerate(m.parts))


def _three() -> dict[str, Any]:
    return {"parts": nn.ModuleList(linear() for _ in range(3))}


def layout_cases() -> dict[str, Parts]:
    """All of them by name."""
    return {
        "tied-weights": Parts(lambda m, h, i: h.tanh(), prepare=_tie),
        "tied-embedding": Parts(_tie_embedding),
        "looped-layer": Parts(_looped),
        "module-list": Parts(_listed, _three),
        "dense-connections": Parts(_dense, _three),
        "soft-mixture": Parts(_gated, _three),
        "top-two-mixture": Parts(_top_two, _three),
        "module-dict": Parts(
            lambda m, h, i: m.named["b"](m.named["a"](h)),
            lambda: {"named": nn.ModuleDict({"a": linear(), "b": linear()})},
        ),
        "parameter-list": Parts(
            lambda m, h, i: h * m.scales[0] + m.scales[1],
            lambda: {"scales": nn.ParameterList([torch.ones(WIDTH), torch.zeros(WIDTH)])},
        ),
        "parameter-dict": Parts(
            lambda m, h, i: h * m.scales["a"],
            lambda: {"scales": nn.ParameterDict({"a": torch.ones(WIDTH)})},
        ),
        "scalar-parameter": Parts(
            lambda m, h, i: h * m.scale, lambda: {"scale": nn.Parameter(torch.tensor(1.5))}
        ),
        "residual": Parts(lambda m, h, i: h + F.gelu(m.down(h))),
        "gated-mlp": Parts(
            lambda m, h, i: m.out(F.silu(m.gate(h)) * m.value(h)),
            lambda: {"gate": linear(16, 32), "value": linear(16, 32), "out": linear(32, 16)},
        ),
        "fused-gate": Parts(
            lambda m, h, i: m.out(F.glu(m.wide(h), -1)),
            lambda: {"wide": linear(16, 64), "out": linear(32, 16)},
        ),
        "fused-qkv": Parts(_fused_qkv, lambda: {"qkv": linear(16, 48)}),
        "fused-qkv-by-head": Parts(_fused_by_head, lambda: {"qkv": linear(16, 48)}),
        "multi-query": Parts(_multi_query, lambda: {"q": linear(), "kv": linear(16, 8)}),
        "low-rank": Parts(
            lambda m, h, i: m.frozen(h) + m.second(m.first(h)) * 0.5,
            lambda: {"frozen": linear(), "first": linear(16, 4), "second": linear(4, 16)},
            prepare=lambda m: m.frozen.requires_grad_(False),
        ),
        "rotary": Parts(_rotary),
        "alibi": Parts(_alibi),
        "relative-bias": Parts(
            _relative, lambda: {"bias": nn.Parameter(torch.randn(4, 15, dtype=F64))}
        ),
        "linear-attention": Parts(_linear_attention),
        "state-space-scan": Parts(_scan, lambda: {"decay": nn.Parameter(torch.rand(WIDTH))}),
        "squeeze-excite": Parts(
            lambda m, h, i: h * m.second(m.first(h.mean(1)).relu()).sigmoid()[:, None],
            lambda: {"first": linear(16, 4), "second": linear(4, 16)},
        ),
        "patches": Parts(
            lambda m, h, i: m.patch(h.view(8, 1, 8, 16)).flatten(2).mT,
            lambda: {"patch": nn.Conv2d(1, 16, 4, stride=4, dtype=F64)},
        ),
        "windows": Parts(_windows),
        "class-token": Parts(
            lambda m, h, i: torch.cat([m.token.expand(8, -1, -1), h], 1),
            lambda: {"token": nn.Parameter(torch.zeros(1, 1, WIDTH))},
        ),
        "u-shape": Parts(
            lambda m, h, i: F.interpolate(m.low(F.avg_pool1d(h.mT, 2).mT).mT, size=8).mT + h,
            lambda: {"low": linear()},
        ),
        "autocast": Parts(_autocast),
        "float32-inside": Parts(
            lambda m, h, i: h * h.float().pow(2).mean(-1, True).rsqrt().to(F64)
        ),
        "branch-on-shape": Parts(lambda m, h, i: h * 2 if h.shape[1] > 4 else h),
        "branch-on-training": Parts(lambda m, h, i: h * 2 if m.training else h),
        "refused-branch-on-value": Parts(lambda m, h, i: h * 2 if h.sum() > 0 else h),
        "refused-boolean-index": Parts(lambda m, h, i: h[i > 3].square().sum()),
        "refused-item": Parts(lambda m, h, i: h * h.detach().sum().item()),
    }  # fmt: skip


def _heads(h: Tensor) -> Tensor:
    return h.unflatten(-1, (-1, 4)).transpose(1, 2)


def _merged(h: Tensor) -> Tensor:
    return h.transpose(1, 2).flatten(2)


def _fused_qkv(m: Any, h: Tensor, ids: Tensor) -> Tensor:
    q, k, v = map(_heads, m.qkv(h).chunk(3, -1))
    return _merged(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def _fused_by_head(m: Any, h: Tensor, ids: Tensor) -> Tensor:
    q, k, v = m.qkv(h).view(8, 8, 4, 3, 4).permute(3, 0, 2, 1, 4)
    return _merged(F.scaled_dot_product_attention(q, k, v))


def _multi_query(m: Any, h: Tensor, ids: Tensor) -> Tensor:
    k, v = (part[:, None].expand(-1, 4, -1, -1) for part in m.kv(h).chunk(2, -1))
    return _merged(F.scaled_dot_product_attention(_heads(m.q(h)), k, v))


def _rotary(m: Any, h: Tensor, ids: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(8, dtype=F64), 0.3 ** torch.arange(2, dtype=F64))
    angles = torch.cat([angles, angles], -1)

    def turn(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()

    q = turn(_heads(h))
    return _merged(F.scaled_dot_product_attention(q, q, _heads(h), is_causal=True))


def _alibi(m: Any, h: Tensor, ids: Tensor) -> Tensor:
    positions = torch.arange(8)
    slopes = 2.0 ** -torch.arange(1, 5, dtype=F64)
    bias = -(positions[None] - positions[:, None]).abs() * slopes[:, None, None]
    scores = _heads(h) @ _heads(h).mT / 2 + bias
    return _merged(scores.softmax(-1) @ _heads(h))


def _relative(m: Any, h: Tensor, ids: Tensor) -> Tensor:
    positions = torch.arange(8)
    bias = m.bias[:, positions[None] - positions[:, None] + 7]
    return _merged(F.scaled_dot_product_attention(*[_heads(h)] * 3, attn_mask=bias))


def _linear_attention(m: Any, h: Tensor, ids: Tensor) -> Tensor:
    q, v = F.elu(_heads(h)) + 1, _heads(h)
    state = torch.einsum("bhsd,bhse->bhde", q, v)
    return _merged(torch.einsum("bhsd,bhde->bhse", q, state) / q.sum(-1, keepdim=True))


def _scan(m: Any, h: Tensor, ids: Tensor) -> Tensor:
    state, outputs = torch.zeros_like(h[:, 0]), []
    for position in range(LENGTH):
        state = state * m.decay.sigmoid() + h[:, position]
        outputs.append(state)
    return torch.stack(outputs, 1)


def _windows(m: Any, h: Tensor, ids: Tensor) -> Tensor:
    windows = h.roll(-2, 1).view(8, 2, 4, 16).flatten(0, 1)
    mixed = F.scaled_dot_product_attention(*[windows[:, None]] * 3)[:, 0]
    return mixed.view(8, 8, 16).roll(2, 1)


def _autocast(m: Any, h: Tensor, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (h.float() @ m.w.float()).to(F64)
