"""Evaluation with arguments that are objects, as the cache that text generation passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import shardweave as sw
from shardweave.tests.integrations.frameworks import example
from shardweave.tests.spawn import run_ranks


def generates_as_eager(mesh: str, zero: int) -> None:
    tiny = example("tiny")
    model, plain = tiny.model(), tiny.model()
    sw.compile(model, kwargs=tiny.batch(), mesh=mesh, zero=zero)
    start = tiny.batch(2)["input_ids"]
    for each in (model, plain):
        each.eval()
    ours, theirs = (
        each.generate(start, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        for each in (model, plain)
    )
    assert isinstance(ours.past_key_values, DynamicCache)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert any("cache of generate()" in note for note in model.notes)
    model.train()
    model(**tiny.batch()).loss.backward()  # the parameters are its own again


@pytest.mark.parametrize(
    ("mesh", "zero"), [("data=2", 3), pytest.param("tensor=2", 0, marks=pytest.mark.slow)]
)
def test_text_is_generated_with_a_cache_as_in_eager(mesh: str, zero: int) -> None:
    run_ranks(generates_as_eager, 2, mesh, zero)


class Offset(nn.Module):
    """Adds a slice's start to a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, rows: slice | None = None) -> Tensor:
        y = self.linear(x).square()
        return (y if rows is None else y[rows]).mean()


def test_object_is_refused_in_training_and_taken_in_evaluation() -> None:
    x = torch.randn(4, 4)
    model = Offset()
    expected = model(x, slice(2)).detach()
    sw.compile(model, (x,), mesh="data=2", backend="reference")
    with pytest.raises(ValueError, match="argument 'rows' is a slice"):
        model(x, slice(2))
    torch.testing.assert_close(model.eval()(x, slice(2)), expected)
