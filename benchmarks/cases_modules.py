# pyright: reportArgumentType=false
# Calls stand as users write them, whatever the stubs of torch say.
"""Cases of `models.py`: the modules of torch.nn, between an embedding and a loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from shardweave.benchmarks.cases_layers import F64, LENGTH, WIDTH
from shardweave.benchmarks.cases_ops import OpModel, op_batch
from shardweave.benchmarks.models_measure import NUM_STEPS, Example

Forward = Callable[[Any, Tensor, Tensor], Any]


def linear(*sizes: int, **options: Any) -> nn.Linear:
    """A linear map in float64, from WIDTH to WIDTH unless said."""
    return nn.Linear(*(sizes or (WIDTH, WIDTH)), dtype=F64, **options)


class Structure(OpModel):
    """An OpModel with further parts, whose loss is what its function makes of the features."""

    def __init__(self, function: Forward, parts: dict[str, Any], buffers: dict[str, Tensor]):
        super().__init__(lambda m, h, ids: h)
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)
        self.to(F64)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        y = self.function(self, self.up(self.embedding(ids) + x), ids)
        return self.down(y).square().mean() if isinstance(y, Tensor) and y.dim() else y


@dataclass(frozen=True)
class Parts:
    """What a structure is made of beside its function; made anew for each."""

    function: Forward
    parts: Callable[[], dict[str, Any]] = dict
    buffers: Callable[[], dict[str, Tensor]] = dict
    prepare: Callable[[Any], None] | None = None

    def build(self) -> Example:
        model = Structure(self.function, self.parts(), self.buffers())
        if self.prepare is not None:
            self.prepare(model)
        return Example(model, [op_batch() for _ in range(NUM_STEPS)])


def layer(make: Callable[[], Any], call: Forward | None = None) -> Parts:
    """A module from torch.nn between the maps."""
    return Parts(call or (lambda m, h, i: m.part(h)), lambda: {"part": make()})


def _square(h: Tensor) -> Tensor:
    return h.view(8, 8, 4, 4)


def _planes(make: Callable[[], Any]) -> Parts:
    return layer(make, lambda m, h, i: m.part(_square(h)).mean() * 3 + m.part(_square(h)).std())


def module_cases() -> dict[str, Parts]:
    """All modules by name."""
    mha = functools.partial(nn.MultiheadAttention, WIDTH, 4, batch_first=True)
    encoder = functools.partial(
        nn.TransformerEncoderLayer, WIDTH, 4, 32, dropout=0.0, batch_first=True
    )
    decoder = functools.partial(
        nn.TransformerDecoderLayer, WIDTH, 4, 32, dropout=0.0, batch_first=True
    )
    causal = nn.Transformer.generate_square_subsequent_mask
    return {
        "sequential": layer(lambda: nn.Sequential(linear(), nn.GELU(), linear())),
        "layer-norm": layer(lambda: nn.LayerNorm(WIDTH)),
        "rms-norm": layer(lambda: nn.RMSNorm(WIDTH)),
        "group-norm": _planes(lambda: nn.GroupNorm(2, 8)),
        "batch-norm-1d": layer(
            lambda: nn.BatchNorm1d(WIDTH), lambda m, h, i: m.part(h.mT.contiguous()).mT
        ),
        "batch-norm-2d": _planes(lambda: nn.BatchNorm2d(8)),
        "batch-norm-no-momentum": _planes(lambda: nn.BatchNorm2d(8, momentum=None)),
        "batch-norm-plain": _planes(lambda: nn.BatchNorm2d(8, affine=False)),
        "batch-norm-frozen": Parts(
            lambda m, h, i: m.part(_square(h)).mean() * 3,
            lambda: {"part": nn.BatchNorm2d(8)},
            prepare=lambda m: m.part.register_forward_pre_hook(lambda p, a: p.eval() and None),
        ),
        "instance-norm": _planes(lambda: nn.InstanceNorm2d(8, affine=True)),
        "instance-norm-running": _planes(lambda: nn.InstanceNorm2d(8, track_running_stats=True)),
        "conv-net": _planes(
            lambda: nn.Sequential(
                nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
                nn.MaxPool2d(2), nn.Conv2d(16, 8, 1),
            )
        ),
        "depthwise": _planes(lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8)),
        "conv-transpose": _planes(lambda: nn.ConvTranspose2d(8, 4, 2, stride=2)),
        "lstm": layer(
            lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), lambda m, h, i: m.part(h)[0]
        ),
        "gru": layer(lambda: nn.GRU(WIDTH, WIDTH, batch_first=True), lambda m, h, i: m.part(h)[0]),
        "rnn-bidirectional": layer(
            lambda: nn.RNN(WIDTH, 8, batch_first=True, bidirectional=True),
            lambda m, h, i: m.part(h)[0],
        ),
        "lstm-cell": layer(lambda: nn.LSTMCell(WIDTH, WIDTH), _lstm_cell),
        "gru-cell": layer(lambda: nn.GRUCell(WIDTH, WIDTH), lambda m, h, i: m.part(h[:, 0])),
        "lstm-projected": layer(
            lambda: nn.LSTM(WIDTH, 32, proj_size=WIDTH, batch_first=True),
            lambda m, h, i: m.part(h)[0],
        ),
        "mha": layer(mha, lambda m, h, i: m.part(h, h, h, need_weights=False)[0]),
        "mha-weights": layer(mha, lambda m, h, i: m.part(h, h, h)[0] * m.part(h, h, h)[1].sum()),
        "mha-causal": layer(
            mha,
            lambda m, h, i: m.part(
                h, h, h, attn_mask=causal(LENGTH, dtype=F64), is_causal=True, need_weights=False
            )[0],
        ),
        "mha-padding": layer(
            mha, lambda m, h, i: m.part(h, h, h, key_padding_mask=_padding(i))[0]
        ),
        "mha-cross": layer(
            lambda: mha(kdim=8, vdim=8),
            lambda m, h, i: m.part(h, h[..., :8], h[..., 8:], need_weights=False)[0],
        ),
        "mha-sequence-first": layer(
            lambda: nn.MultiheadAttention(WIDTH, 4),
            lambda m, h, i: m.part(h.transpose(0, 1), *[h.transpose(0, 1)] * 2)[0].transpose(0, 1),
        ),
        "encoder-layer": layer(encoder),
        "encoder-layer-pre-norm": layer(lambda: encoder(norm_first=True, activation="gelu")),
        "encoder-layer-padding": layer(
            encoder, lambda m, h, i: m.part(h, src_key_padding_mask=_padding(i))
        ),
        "encoder": layer(lambda: nn.TransformerEncoder(encoder(), 2, enable_nested_tensor=False)),
        "encoder-causal": layer(
            encoder,
            lambda m, h, i: m.part(h, src_mask=causal(LENGTH, dtype=F64), is_causal=True),
        ),
        "decoder-layer": layer(decoder, lambda m, h, i: m.part(h, h.flip(1))),
        "decoder-layer-causal": layer(
            decoder,
            lambda m, h, i: m.part(h, h, tgt_mask=causal(LENGTH, dtype=F64), tgt_is_causal=True),
        ),
        "transformer": layer(
            lambda: nn.Transformer(WIDTH, 4, 1, 1, 32, dropout=0.0, batch_first=True),
            lambda m, h, i: m.part(h, h.flip(1)),
        ),
        "bilinear": layer(
            lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH), lambda m, h, i: m.part(h, h.cos())
        ),
        "embedding-bag": layer(
            lambda: nn.EmbeddingBag(16, WIDTH, mode="max"), lambda m, h, i: h[:, 0] + m.part(i)
        ),
        "adaptive-softmax": layer(
            lambda: nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 16, [4, 8]),
            lambda m, h, i: m.part(h.flatten(0, 1), i.flatten()).loss,
        ),
        "dropout-zero": layer(lambda: nn.Sequential(linear(), nn.Dropout(0.0), linear())),
        "identity": layer(nn.Identity),
        "prelu": layer(lambda: nn.PReLU(8)),
        "upsample": _planes(lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
        "cosine-loss-module": layer(
            lambda: nn.CosineSimilarity(-1), lambda m, h, i: m.part(h, h.flip(0))[..., None] * h
        ),
        "spectral-norm": layer(lambda: parametrizations.spectral_norm(linear())),
        "weight-norm": layer(lambda: parametrizations.weight_norm(linear())),
        "orthogonal": layer(lambda: parametrizations.orthogonal(linear())),
        "parametrized": layer(_parametrized),
        "lazily-shaped": layer(_lazy),
        "flatten-modules": layer(
            lambda: nn.Sequential(nn.Unflatten(-1, (4, 4)), nn.Flatten(-2), linear())
        ),
    }  # fmt: skip


def _padding(ids: Tensor) -> Tensor:
    """The last positions of each sample, some of which are padding."""
    return (torch.arange(LENGTH) > 4) & (ids > 7)


def _lstm_cell(m: Any, h: Tensor, ids: Tensor) -> Tensor:
    state, outputs = None, []
    for position in h.unbind(1):
        state = m.part(position, state)
        outputs.append(state[0])
    return torch.stack(outputs, 1)


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def _parametrized() -> nn.Module:
    module = linear()
    parametrize.register_parametrization(module, "weight", _Symmetric())
    return module


def _lazy() -> nn.Module:
    module = nn.LazyLinear(WIDTH, dtype=F64)
    module(torch.zeros(1, WIDTH, dtype=F64))
    return module
