"""All training loops for plain PyTorch, and what is refused of them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

import shardweave as sw
from shardweave.tests.driver.step import loops, loops_gradients, loops_models, loops_training

LOOPS: dict[str, loops.Loop] = {
    **loops.LOOPS,
    **loops_gradients.LOOPS,
    **loops_models.LOOPS,
    **loops_training.LOOPS,
}

REFUSED = {
    "torch.func": r"apply it to a copy made before sw\.compile",
    "forward hooks": "hold it in a buffer",
}
"""Loops that raise an error of one sentence, and a part of that."""


def plain(model: nn.Module, example: object, **options: object) -> nn.Module:
    """In place of the line that compiles."""
    del example, options
    return model


def assert_trains_as_in_eager(name: str, mesh: str, zero: int, backend: str) -> None:
    """Run a loop with only the compile line added, and compare losses and weights with eager's."""

    def compiled(model: nn.Module, example: Any, **options: Any) -> nn.Module:
        return sw.compile(model, example, mesh=mesh, zero=zero, backend=backend, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sw.PlanNote)
        losses, models = LOOPS[name](compiled)
    expected, eager = LOOPS[name](plain)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-9, atol=1e-9)
    for model, other in zip(models, eager, strict=True):
        is_compiled = isinstance(model, sw.CompiledModule)
        state = sw.Step.of(model).full_state_dict() if is_compiled else model.state_dict()
        for key, value in other.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-9)
