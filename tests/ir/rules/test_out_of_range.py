"""An index beyond a table is an error where the table is cut, as it is where it is whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.tests.compiled import compile_copy

ROWS = 8


class Embedded(nn.Module):
    """A table that is looked up, and the same one as the head of a loss."""

    def __init__(self, lookup: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, 4, dtype=torch.float64))
        self.lookup = lookup

    def forward(self, ids: Tensor) -> Tensor:
        return self.lookup(self.table, ids).square().sum()


@pytest.mark.parametrize("index", [-1, ROWS, ROWS + 3, 1000])
@pytest.mark.parametrize(
    "lookup",
    [
        lambda table, ids: F.embedding(ids, table),
        lambda table, ids: table.gather(0, ids),
    ],
    ids=["embedding", "gather"],
)
def test_index_out_of_range_raises_on_shards_of_the_table(
    lookup: Callable[[Tensor, Tensor], Tensor], index: int
) -> None:
    ids = torch.arange(ROWS).view(2, 4)
    model = Embedded(lookup)
    plan = {"table": '[{"tensor"}, {}]'}
    step = compile_copy(model, [ids], mesh="tensor=4", plan=plan, backend="reference")
    loss = step(ids)
    torch.testing.assert_close(loss, model(ids).detach())
    ids[1, 2] = index
    for run in (model, step):
        with pytest.raises((IndexError, RuntimeError, ValueError), match=r"out of (range|bounds)"):
            run(ids)
