"""Numbers that are read out of constant tensors are values; those of data or draws are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardweave.ir.capture.capture import CaptureError, capture
from shardweave.tests.compiled import compile_copy
from shardweave.tests.eager import Model, rows

Number = Callable[[Tensor], Any]


def _written(x: Tensor) -> Any:
    """A constant that forward writes to by way of a view."""
    count = torch.zeros(3)
    count[1:].add_(2)
    return count.sum().item()


@pytest.mark.parametrize(
    "number",
    [
        lambda x: torch.arange(1, x.ndim + 3).tolist()[-1],
        lambda x: torch.prod(torch.tensor(x.shape)).item(),
        lambda x: int(torch.full((2,), 6).max()),
        lambda x: torch.tensor([[1, 2], [3, 4]]).tolist()[1][0],
        lambda x: torch.linspace(0, 1, 3).sum().item(),
        lambda x: 2 if torch.tensor(3).item() > 2 else 1,
        lambda x: int(np.prod(x.shape)),
        lambda x: np.max([1, 2]).item(),
    ],
)
def test_number_of_a_constant_is_a_value(number: Number) -> None:
    model = Model(lambda self, x: (self.linear(x) * number(x)).square().sum())
    (x,) = rows()
    step = compile_copy(model, (x,), mesh="data=2", backend="reference")
    torch.testing.assert_close(step(x).detach(), model(x).detach())


@pytest.mark.parametrize(
    "number",
    [
        lambda x: x.sum().item(),
        lambda x: torch.rand(1).item(),
        lambda x: x.long().tolist()[0][0],
        lambda x: float(x.detach().numpy().sum()),
    ],
    ids=["data", "drawn", "list", "array"],
)
def test_number_of_data_or_of_a_draw_is_refused(number: Number) -> None:
    model = Model(lambda self, x: (self.linear(x) * number(x)).square().sum())
    with pytest.raises(
        CaptureError, match=r"test_constant_numbers\.py:\d+.*a Python number is read"
    ):
        capture(model, rows())


def test_constant_that_is_written_to_is_never_read_as_it_was() -> None:
    model = Model(lambda self, x: (self.linear(x) * _written(x)).square().sum())
    with pytest.raises(CaptureError, match="a Python number is read"):
        capture(model, rows())


def test_number_of_a_constant_of_the_module_is_a_setting() -> None:
    model = Model(
        lambda self, x: (self.linear(x) * self.number.item() * sum(self.numbers[0].tolist())).sum(),
        number=torch.tensor(3),
        numbers=[torch.tensor([1, 2])],
    )
    (x,) = rows()
    step = compile_copy(model, (x,), mesh="data=2", backend="reference")
    torch.testing.assert_close(step(x).detach(), model(x).detach())
    several: list[Any] = [step, model]
    for each in several:
        each.number.fill_(5)
    torch.testing.assert_close(step(x).detach(), model(x).detach())
    for each in several:
        each.numbers[0][1] = 7
    torch.testing.assert_close(step(x).detach(), model(x).detach())


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda self, x: self.linear(x).sum() * self.ema[0].item(), "but no buffer"),
        (
            lambda self, x: self.linear(x).sum() * self.number.item() * self.number,
            "as a separate attribute",
        ),
    ],
    ids=["buffer", "tensor-too"],
)
def test_number_that_could_change_unseen_is_refused(function: Any, expected: str) -> None:
    model = Model(function, number=torch.tensor(3))
    with pytest.raises(CaptureError, match=rf"test_constant_numbers\.py:\d+.*{expected}"):
        capture(model, rows())


@pytest.mark.parametrize(
    "number",
    [
        lambda self: 2 if self.numbers[0] > 1 else 3,
        lambda self: 2 if self.numbers[0].any() else 3,
        lambda self: len(range(self.numbers[0])),
    ],
)
def test_branches_on_a_constant_of_the_module_leave_none_of_it_behind(number: Any) -> None:
    model = Model(lambda self, x: (self.linear(x) * number(self)).sum(), numbers=[torch.tensor(2)])
    (x,) = rows()
    step = compile_copy(model, (x,), mesh="data=2", backend="reference")
    torch.testing.assert_close(step(x).detach(), model(x).detach())
