"""Texts of exceptions that forward catches: eager's, or refused with the line that reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.tests.compiled import compile_copy

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


OWN_TEXT = lambda: _caught(lambda: _raise(Own("key")), _length)  # noqa: E731
"""From torch 2.14 on dynamo makes it as Python does."""

SCALES = [
    lambda: _caught(lambda: TABLE["key"], _length),
    lambda: _caught(lambda: TABLE.pop("key"), _first),
    lambda: _caught(lambda: [1].index(4), _length),
    OWN_TEXT,
    lambda: _caught(lambda: _raise(KeyError("key")), _as_key),
]
"""Texts that dynamo does not make as Python does."""

MADE_ALIKE = [
    lambda: _caught(lambda: _raise(ValueError("key")), _length),
    lambda: _caught(lambda: _raise(KeyError("key")), _first),
    lambda: _caught(lambda: TABLE["key"], lambda _: 3),
]


@pytest.mark.filterwarnings("ignore::shardweave.PlanNote")
@pytest.mark.parametrize("scale", SCALES + MADE_ALIKE)
def test_texts_of_caught_exceptions_are_those_of_eager(scale: Callable[[], int]) -> None:
    model, x = Net(scale), torch.arange(4, dtype=torch.float64)
    step = compile_copy(model, (x,), mesh="data=2", backend="reference")
    assert step(x).item() == pytest.approx(model(x).item(), rel=1e-12)
    assert not step.notes or scale in SCALES


@pytest.mark.parametrize("scale", [scale for scale in SCALES if scale is not OWN_TEXT])
def test_what_reads_them_is_refused_where_a_model_cannot_run(scale: Callable[[], int]) -> None:
    with torch.device("meta"):
        model, x = Net(scale), torch.ones(4, dtype=torch.float64)
    with pytest.raises(
        sw.CaptureError, match=r"test_exceptions\.py:\d+.*(compute nothing of|make this part)"
    ):
        sw.capture(model, (x,))
