"""Texts of exceptions that forward catches: eager's, or refused with the line that reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw

TABLE: dict[str, int] = {}


class Own(Exception):
    def __str__(self) -> str:
        return "its own text"


def _caught(raising: Callable[[], Any], told: Callable[[Exception], int]) -> int:
    try:
        return raising()
    except (LookupError, ValueError, Own) as error:
        return told(error)


def _raise(error: Exception) -> int:
    raise error


def _length(error: Exception) -> int:
    return len(str(error))


def _first(error: Exception) -> int:
    return len(error.args[0])


def _as_key(error: Exception) -> int:
    return {"'key'": 7}.get(f"{error}", 9)


class Net(nn.Module):
    def __init__(self, scale: Callable[[], int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum() * self.scale()


@pytest.mark.parametrize(
    ("scale", "is_refused"),
    [
        (lambda: _caught(lambda: TABLE["key"], _length), True),
        (lambda: _caught(lambda: TABLE.pop("key"), _first), True),
        (lambda: _caught(lambda: [1].index(4), _length), True),
        (lambda: _caught(lambda: _raise(Own("key")), _length), True),
        (lambda: _caught(lambda: _raise(KeyError("key")), _as_key), True),
        (lambda: _caught(lambda: _raise(ValueError("key")), _length), False),
        (lambda: _caught(lambda: _raise(KeyError("key")), _first), False),
        (lambda: _caught(lambda: TABLE["key"], lambda _: 3), False),
    ],
)
def test_texts_of_caught_exceptions_are_as_in_eager_or_refused_with_their_line(
    scale: Callable[[], int], is_refused: bool
) -> None:
    model, x = Net(scale), torch.arange(4, dtype=torch.float64)
    wanted = model(x).item()
    if is_refused:
        with pytest.raises(sw.CaptureError, match=r"test_exceptions\.py:\d+.*compute nothing of"):
            sw.capture(model, (x,))
        return
    step = sw.compile(model, (x,), mesh="data=2", backend="reference")
    assert step(x).item() == pytest.approx(wanted, rel=1e-12)
