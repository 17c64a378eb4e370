"""Rows by a boolean mask: written and updated as eager does, filtered ones refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardweave.ir.capture.capture import CaptureError, capture
from shardweave.tests.compiled import compile_copy
from shardweave.tests.eager import Model, rows

Change = Callable[[Any, Tensor, Tensor], Any]


def _set(y: Tensor, index: Any, value: Any) -> None:
    y[index] = value


def _add(y: Tensor, index: Any, value: Any) -> None:
    y[index] += value


def _scale(y: Tensor, index: Any, value: Any) -> None:
    y[index] *= value


CHANGES: dict[str, Change] = {
    "row": lambda self, y, x: _set(y, x[:, 0] > 0, self.linear.bias),
    "one-row-of-many": lambda self, y, x: _set(y, x[:, 0] > 0, self.linear.bias[None]),
    "number-tensor": lambda self, y, x: _set(y, x > 0, self.linear.bias[0]),
    "add-row": lambda self, y, x: _add(y, x[:, 0] > 0, self.linear.bias),
    "add-number": lambda self, y, x: _add(y, x > 0, 2.0),
    "scale": lambda self, y, x: _scale(y, x[:, 1] > 0, 3),
    "root-of-what-is-positive": lambda self, y, x: _set(y, x > 0, (y[x > 0].abs() + 0.1).log()),
    "exponential-of-rows": lambda self, y, x: _set(y, x[:, 0] > 0, y[x[:, 0] > 0].mul(2).exp() + 1),
    "opposite": lambda self, y, x: (_add(y, m := x[:, 0] > 0, 1), _scale(y, ~m, 2)),
    "several-reads": lambda self, y, x: _set(
        y, x > 0, torch.where(y[x > 0] > 0, F.softplus(y[x > 0]), x[x > 0])
    ),
    "layers": lambda self, y, x: _set(
        y, m := x[:, 0] > 0, F.layer_norm(self.linear(y[m]), (4,))[:, :1] + x[m]
    ),
    "columns": lambda self, y, x: _scale(y, (x[:, 0] > 0, slice(1, 3)), self.linear.bias[:2]),
    "positions": lambda self, y, x: _add(y, torch.where(x > 0), self.linear.bias[0]),
    "flattened": lambda self, y, x: _set(
        z := y.view(2, 2, 4), m := x.view(2, 2, 4)[..., 0] > 0, z[m].mm(self.linear.weight)
    ),
    "filtered-twice": lambda self, y, x: (_add(y, x > 0, 1), _scale(y, x < 0, 2)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_rows_that_a_mask_names_are_written_as_in_eager(name: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x).clone()
        CHANGES[name](self, y, x)
        return y.pow(3).sum()

    model = Model(forward)
    (x,) = rows()
    step = compile_copy(model, (x,), mesh="data=2", backend="reference")
    for batch in (x, -x, x.abs()):
        model.zero_grad()
        step.zero_grad()
        loss = model(batch)
        loss.backward()
        torch.testing.assert_close(step(batch).detach(), loss.detach())
        for key, parameter in model.linear.named_parameters():
            found = step.full_gradients()[f"linear.{key}"]
            torch.testing.assert_close(found, parameter.grad)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda self, x: self.linear(x)[x > 0].sum(), "shape of this result depends on the data"),
        (lambda self, x: self.linear(x).sum() / (len(x[x > 0]) + 1), "shape of this result"),
        (lambda self, x: F.mse_loss(self.linear(x)[x > 0], x[x > 0]), "shape of this result"),
        (
            lambda self, x: (y := self.linear(x), _set(y, x[:, 0] > 0, y[:2]))[0].sum(),
            "one row for each True in a mask",
        ),
    ],
    ids=["filter", "number-of-rows", "loss-of-rows", "rows-in-turn"],
)
def test_true_filtering_is_refused_with_the_static_form(function: Any, expected: str) -> None:
    model = Model(lambda self, x: function(self, x))
    with pytest.raises(CaptureError, match=rf"test_boolean_rows\.py:\d+.*{expected}.*torch\.where"):
        capture(model, rows())
