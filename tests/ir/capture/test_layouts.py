"""Sparse and other layouts: refused with the line and what to write, or dense where that is equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardweave.ir.capture.capture import CaptureError, capture
from shardweave.passes.notes import PlanNote
from shardweave.tests.compiled import compile_copy
from shardweave.tests.eager import Model, assert_three_steps_equal_eager, rows

Function = Callable[[Any, Tensor], Tensor]


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: self.linear(x).to_sparse().to_dense().square().sum(),
        lambda self, x: torch.mm(self.linear(x).to_sparse_csr(), self.linear.weight).sum(),
        lambda self, x: torch.sparse.mm(x.to_sparse(), self.linear.weight).sum(),
        lambda self, x: torch.sparse.softmax(self.linear(x).to_sparse(), 1).to_dense().sum(),
        lambda self, x: torch.sparse.sum(self.linear(x).to_sparse(), 1).to_dense().sum(),
        lambda self, x: self.linear(x).sparse_mask(x.to_sparse()).to_dense().sum(),
        lambda self, x: torch.mm(self.edges, self.linear(x)).sum(),
        lambda self, x: (
            torch.sparse_coo_tensor(self.at, self.linear(x)[0], (4, 4)).to_dense().sum()
        ),
    ],
    ids="to_sparse csr mm softmax sum mask buffer made".split(),
)
def test_sparse_tensors_are_refused_with_line_and_remedy(function: Function) -> None:
    model = Model(function)
    model.register_buffer("edges", torch.eye(4, dtype=torch.float64).to_sparse())
    model.register_buffer("at", torch.arange(4).expand(2, 4).contiguous())
    expected = r"(?s)test_layouts\.py:\d+: .*sparse.*keep it dense: x in place of x\.to_sparse\(\)"
    with pytest.raises(CaptureError, match=expected):
        capture(model, rows())


def test_table_with_sparse_gradients_has_dense_ones_of_the_same_values() -> None:
    table = nn.Embedding(5, 4, sparse=True, dtype=torch.float64)
    model = Model(lambda self, i: self.linear(self.table(i)).square().sum(), table=table)
    index = torch.tensor([0, 3, 3, 1])
    with pytest.warns(PlanNote, match="module 'table' .*sparse=True is dense in a step"):
        step = compile_copy(model, (index,), mesh="data=2", backend="reference")
    step(index)
    model(index).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(step.full_gradients()[name], parameter.grad.to_dense())


def test_unread_sparse_buffer_stays_with_the_model() -> None:
    model = Model(lambda self, x: self.linear(x).square().sum())
    model.linear.register_buffer("heads", torch.eye(4).to_sparse(), persistent=False)
    step = compile_copy(model, rows(), mesh="data=2", backend="reference")
    assert step.get_buffer("linear.heads").to_dense().sum() == 4


def test_reductions_of_scalars_equal_eager() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        total = self.linear(x).sum()
        kept = total.mean(-1, keepdim=True) + total.var(0, correction=0)
        return total.mean(0).square() + kept + total.sum(0)

    assert_three_steps_equal_eager(Model(function))


@pytest.mark.parametrize("name", ["native_batch_norm", "_batch_norm_with_update"])
def test_batch_norms_under_their_kernels_names_equal_eager(name: str) -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        y, running = self.linear(x), (self.ema, self.other)
        if name == "native_batch_norm":
            return torch.native_batch_norm(y, None, None, *running, True, 0.1, 1e-5)[0].pow(3).sum()
        call = torch.ops.aten._batch_norm_with_update.default
        return call(y, self.linear.bias, self.linear.bias, *running, 0.1, 1e-5)[0].pow(3).sum()

    assert_three_steps_equal_eager(Model(function))
