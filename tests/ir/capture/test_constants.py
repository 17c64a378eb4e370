"""Constants that forward reads but no module has registered: buffers from then on, with a note."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.passes.notes import PlanNote
from shardweave.tests.compiled import compile_copy
from shardweave.tests.eager import Model, rows

_TENSOR = torch.ones(4, dtype=torch.float64)
_TABLE = np.linspace(0.5, 2, 4)


def _closure() -> Callable[[Any], Tensor]:
    held = torch.linspace(1, 2, 4, dtype=torch.float64)
    return lambda self: held


CONSTANTS: dict[str, tuple[Callable[[Any], Tensor], Any, str]] = {
    "attribute": (lambda self: self.state, _TENSOR, "tensor `state`.* buffer 'state'"),
    "list": (lambda self: self.state[0], [_TENSOR], r"tensor `state\[0\]`.*'constant_0'"),
    "dict": (lambda self: self.state["a"], {"a": _TENSOR}, r"`state\['a'\]`.*'constant_0'"),
    "object": (lambda self: self.state.n, SimpleNamespace(n=_TENSOR), r"tensor `state\.n`"),
    "global": (lambda self: _TENSOR, None, "a constant tensor from outside the model"),
    "closure": (_closure(), None, "a constant tensor from outside the model"),
    "numpy": (lambda self: torch.from_numpy(_TABLE), None, "a constant tensor from outside"),
    "array": (lambda self: torch.from_numpy(self.state), _TABLE, "a constant tensor from outside"),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constant_tensor_becomes_a_buffer_that_is_not_saved(name: str) -> None:
    read, state, expected = CONSTANTS[name]
    model = Model(lambda self, x: (self.linear(x) * read(self)).sum(), state=state)
    model.state = state
    eager = copy.deepcopy(model)
    (x,) = rows()
    with pytest.warns(PlanNote, match=rf"^the model \(test_constants\.py:\d+: .*{expected}"):
        step = compile_copy(model, (x,), mesh="data=2", backend="reference")
    assert step.state_dict().keys() == eager.state_dict().keys()
    for rows_of_x in (x, x[:2], x + 1):  # captured again for another shape
        torch.testing.assert_close(step(rows_of_x).detach(), eager(rows_of_x).detach())


class _Scaled(nn.Module):
    """A block with a constant of its own, by attribute and in a list."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        self.scale = torch.full((4,), scale, dtype=torch.float64)
        self.shifts = [torch.full((4,), -scale, dtype=torch.float64)]
        self.table = np.full((4,), scale)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x) * self.scale + torch.from_numpy(self.table)
        return self.down(y) + self.shifts[0]


def test_repeated_blocks_have_constants_of_their_own() -> None:
    model = nn.Sequential(*(_Scaled(number) for number in (1.0, 2.0, 3.0)))
    (x,) = rows()
    wanted = copy.deepcopy(model)(x).square().sum()
    with pytest.warns(PlanNote):
        step = compile_copy(model, (x,), mesh="data=2", backend="reference", loss=_sum_of_squares)
    loss = step(x)[0]
    torch.testing.assert_close(loss.detach(), wanted.detach())


def _sum_of_squares(y: Tensor) -> Tensor:
    return y.square().sum()


def test_constant_is_a_buffer_whose_changes_in_place_are_followed() -> None:
    model = Model(lambda self, x: (self.linear(x) * self.scale).sum())
    model.scale = torch.ones(4, dtype=torch.float64)
    (x,) = rows()
    with pytest.warns(PlanNote, match="write into it to change it"):
        step = sw.compile(model, (x,), mesh="data=2", backend="reference")
    before = step(x)
    model.scale.add_(1)
    torch.testing.assert_close(step(x), 2 * before)
    model.scale = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(ValueError, match="'scale' of the compiled model was replaced"):
        step(x)
