"""Calls that compute each row by itself are told by trying them on samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from shardweave.ir.capture.substitutes.row_by_row import tried_by_row


def tried(call: Callable[..., Tensor], *args: Any) -> bool | None:
    """Tell whether a call on rows that a mask of two dims selects is one row by row."""
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    rows.meta["example_value"] = torch.zeros(8, 4)
    return tried_by_row(graph.call_function(call, (rows, *args)), {rows}, 2)


@pytest.mark.parametrize(
    ("call", "args", "expected"),
    [
        (torch.relu, (), False),
        (torch.softmax, (-1,), False),
        (torch.softmax, (1,), True),
        (torch.softmax, (0,), None),
        (torch.cumsum, (0,), None),
        (torch.flip, ((0,),), None),
        (torch.sum, (0,), None),
    ],
)
def test_rows_that_depend_on_others_are_seen(
    call: Callable[..., Tensor], args: tuple[Any, ...], expected: bool | None
) -> None:
    assert tried(call, *args) is expected
