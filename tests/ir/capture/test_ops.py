"""Ordinary operations that once had no form: each is exact over three steps on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.ir.capture.capture import CaptureError, capture
from shardweave.tests.compiled import compile_copy
from shardweave.tests.eager import Model, assert_three_steps_equal_eager
from shardweave.tests.marks import slow
from shardweave.tests.torch_versions import new_torch

F64 = torch.float64

Function = Callable[[Any, Tensor, Tensor], Tensor]


def batch() -> tuple[Tensor, Tensor]:
    """Rows of 4 features, and a class for each."""
    return torch.randn(4, 4, dtype=F64), torch.randint(0, 4, (4,))


def _slice_assign(self: Any, x: Tensor, index: Tensor) -> Tensor:
    y = self.linear(x).clone()
    y[:, 0] = y[:, 1] * 2
    y[1:3, 2:] = 0.0
    return y


def _in_place_on_views(self: Any, x: Tensor, index: Tensor) -> Tensor:
    y = self.linear(x)
    y.view(2, 8).mul_(2)
    y[0].add_(1)
    return y


def _fill_diagonal_of_a_slice(self: Any, x: Tensor, index: Tensor) -> Tensor:
    """What is filled is a part of a larger tensor, with its strides."""
    return (self.linear(x)[1:, :2] * 1).fill_diagonal_(0.5)


def _gradient(self: Any, x: Tensor, index: Tensor) -> Tensor:
    y = self.linear(x)
    (slope,) = torch.autograd.grad(y.cos().sum(), y, create_graph=True)
    return y + slope


def _spd(self: Any) -> Tensor:
    return self.linear.weight @ self.linear.weight.T + torch.eye(4, dtype=F64)


def _rotary(self: Any, x: Tensor, index: Tensor) -> Tensor:
    angles = torch.polar(torch.ones(2, dtype=F64), torch.arange(2, dtype=F64))
    turned = torch.view_as_complex(self.linear(x).view(4, 2, 2)) * angles
    return torch.view_as_real(turned)


@pytest.mark.filterwarnings("ignore::shardweave.passes.notes.PassNote", "ignore:.*torch.jit.script")
@pytest.mark.parametrize(
    "function",
    [
        lambda self, x, i: F.embedding_bag(i.view(2, 2), self.linear.weight),
        lambda self, x, i: torch.func.jvp(self.linear, (x,), (x.cos(),))[1],
        lambda self, x, i: self.linear(x) * F.one_hot(i, 4),
        lambda self, x, i: F.adaptive_avg_pool1d(self.linear(x), 2),
        lambda self, x, i: F.adaptive_avg_pool2d(self.linear(x)[None], 3),
        _slice_assign,
        _in_place_on_views,
        lambda self, x, i: (self.linear(x) * 1).fill_diagonal_(0.0),
        _fill_diagonal_of_a_slice,
        lambda self, x, i: self.linear(x).as_strided((4, 2), (4, 2), 1),
        lambda self, x, i: torch.add(0.25, self.linear(x) > 0, alpha=0.5) * self.linear(x),
        lambda self, x, i: self.linear(x).T.as_strided((3, 2), (4, 3), 1),
        lambda self, x, i: x.T.as_strided_scatter(self.linear(x)[:2].T, (4, 2), (1, 5)),
        lambda self, x, i: torch.polar(self.linear(x).exp(), x).imag,
        lambda self, x, i: self.linear(x) * torch.arange(-2, 2, 1.0, dtype=torch.int64),
        lambda self, x, i: self.linear(x) * self.linear(x).sgn(),
        lambda self, x, i: torch.vmap(lambda row: self.linear(row).cumsum(0))(x),
        lambda self, x, i: torch.func.grad(lambda z: self.linear(z).cos().sum())(x),
        _gradient,
        lambda self, x, i: F.pad(self.linear(x)[None], (2, 1), mode="circular"),
        lambda self, x, i: F.cosine_embedding_loss(self.linear(x), x, (i % 2 * 2 - 1).to(F64)),
        pytest.param(
            lambda self, x, i: torch.quantile(self.linear(x), 0.3, dim=1),
            marks=new_torch("torch.quantile looks at its values"),
        ),
        lambda self, x, i: torch.empty(4, 4, dtype=F64).copy_(self.linear(x)),
        lambda self, x, i: F.cross_entropy(self.linear(x), i, torch.arange(1, 5, dtype=F64)),
        lambda self, x, i: F.cross_entropy(
            self.linear(x), i, torch.arange(1, 5, dtype=F64), ignore_index=2, reduction="sum"
        ),
        lambda self, x, i: F.cross_entropy(
            self.linear(x)[None].mT, i[None], torch.arange(1, 5, dtype=F64), reduction="none"
        ),
        lambda self, x, i: torch.fft.irfft(torch.fft.rfft(self.linear(x)) * 2),
        _rotary,
        lambda self, x, i: torch.linalg.solve(_spd(self), self.linear(x)),
        lambda self, x, i: torch.linalg.cholesky(_spd(self)) + x,
    ],
    ids=[
        "embedding-bag", "functional-jvp", "one-hot", "adaptive-1d-unbatched", "adaptive-2d-unbatched", "slice-assign", "views",
        "fill-diagonal", "fill-diagonal-of-a-slice", "as-strided", "number-first", "as-strided-transposed", "as-strided-scatter", "complex-constant",
        "arange-by-float", "sgn", "vmap", "functional-grad", "gradient-of-gradient", "circular-pad", "cosine-loss", "quantile", "empty-then-written",
        "weighted", "weighted-ignoring", "weighted-rows", "fft", "rotary", "solve", "cholesky",
    ],
)  # fmt: skip
def test_operation_equals_eager(function: Function) -> None:
    model = Model(lambda self, x, i: function(self, x, i).square().sum())
    assert_three_steps_equal_eager(model, batch)


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, slow(nn.RNN)])
def test_recurrent_layers_equal_eager(cell: type[nn.Module]) -> None:
    kwargs: dict[str, Any] = {"batch_first": True, "bidirectional": cell is nn.GRU}
    recurrent = cell(4, 4, 2, dtype=F64, **kwargs)
    model = Model(lambda self, x: self.cell(self.linear(x))[0].square().sum(), cell=recurrent)
    assert_three_steps_equal_eager(model, lambda: (torch.randn(4, 3, 4, dtype=F64),))


@pytest.mark.parametrize(
    "read",
    [lambda y: torch.empty_like(y) + y, lambda y: torch.cat([y, y.new_empty(4, 4)[:2]])],
    ids=["added", "a-view"],
)
def test_reading_what_was_never_written_is_refused_with_its_line(
    read: Callable[[Tensor], Tensor],
) -> None:
    model = Model(lambda self, x, i: read(self.linear(x)).sum())
    expected = r"^the model \(test_ops\.py:\d+: .*makes an uninitialized tensor, which aten\."
    with pytest.raises(CaptureError, match=expected):
        capture(model, batch())


def test_memory_laid_out_otherwise_is_not_read_by_strides() -> None:
    model = Model(lambda self, x, i: self.linear(x)[:, :2].as_strided((2, 2), (4, 1)).sum())
    with pytest.raises(
        CaptureError, match=r"test_ops\.py:\d+: .*call contiguous\(\) on the operand before"
    ):
        capture(model, batch())


def test_addmm_with_scales_is_cut_along_its_rows() -> None:
    def forward(self: Any, x: Tensor, i: Tensor) -> Tensor:
        y = self.linear(x).relu()
        return torch.addmm(self.out.bias, y, self.out.weight.T, beta=0.5, alpha=2.0).square().sum()

    model = Model(forward, out=nn.Linear(4, 4, dtype=F64))
    assert_three_steps_equal_eager(model, batch, mesh="tensor=2")


def test_maximum_over_the_batch_is_taken_over_sub_batches_too() -> None:
    def forward(self: Any, x: Tensor, i: Tensor) -> Tensor:
        y = self.linear(x)
        return (y / y.abs().max()).square().sum()

    model = Model(forward)
    inputs = (torch.randn(8, 4, dtype=F64), torch.zeros(1))
    step = compile_copy(model, inputs, mesh="data=2", passes="preset:oases", backend="reference")
    torch.testing.assert_close(step(*inputs), model(*inputs).detach(), rtol=1e-12, atol=0)
