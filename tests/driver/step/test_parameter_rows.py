"""Parameters whose rows meet those of the batch, in stages, and such that are returned."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from shardweave.tests.compiled import compile_copy

F64 = torch.float64

WAYS = {
    "rows": lambda m, x: x * m.rows,
    "slice": lambda m, x: x + m.table[: len(x)],
    "transposed": lambda m, x: (x.t() * m.wide).t(),
    "both products": lambda m, x: m.mix @ x + m.mix.t() @ x,
}


class _Meeting(nn.Module):
    """Parameters with a row for each of the batch, read on both sides of a cut."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.rows = nn.Parameter(torch.rand(4, 1, dtype=F64))
        self.table = nn.Parameter(torch.randn(8, 4, dtype=F64))
        self.wide = nn.Parameter(torch.randn(4, dtype=F64))
        self.mix = nn.Parameter(torch.randn(4, 4, dtype=F64))
        self.h = nn.ModuleList(nn.Linear(4, 4, dtype=F64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = WAYS[self.way](self, x + torch.tanh(layer(x)))
        return x.square().mean()


@pytest.mark.parametrize(("mesh", "zero"), [("stage=2", 0), ("stage=2,data=2", 3)])
@pytest.mark.parametrize("way", WAYS)
def test_parameters_whose_rows_meet_the_batch_equal_eager_in_stages(
    way: str, mesh: str, zero: int
) -> None:
    model, x = _Meeting(way), torch.randn(4, 4, dtype=F64)
    eager = copy.deepcopy(model)
    step = compile_copy(model, (x,), mesh=mesh, zero=zero, backend="reference")
    loss = eager(x)
    loss.backward()
    torch.testing.assert_close(step(x).detach(), loss.detach())
    for name, parameter in eager.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(step.full_gradients()[name], parameter.grad)


class _Returned(nn.Module):
    """A model that returns a parameter, beside its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4, dtype=F64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ self.weight.t()).square().mean(), self.weight


def test_parameter_that_is_stored_in_shards_is_returned_whole() -> None:
    model, x = _Returned(), torch.randn(4, 4, dtype=F64)
    step = compile_copy(model, (x,), mesh="data=2", zero=3, backend="reference")
    _, weight = step(x)
    torch.testing.assert_close(weight.detach(), model.weight.detach())
