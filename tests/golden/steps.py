"""Golden cases of running: losses, gradients and states of a few steps in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import shardweave as sw
from shardweave.backends.optimizers.shards import full_value
from shardweave.driver.models.models import build_example
from shardweave.driver.step.step import Step
from shardweave.passes.notes import unheard
from shardweave.tests.golden.figures import Figures

GPT = "gpt:layers=2,hidden=16,heads=4,vocab=32,seq=8,batch=8"
DROPOUT = GPT + ",dropout=0.1"

Make = Callable[..., torch.optim.Optimizer]

STEPS: dict[str, tuple[str, Make, dict[str, Any]]] = {
    "alone": (GPT, torch.optim.AdamW, {"backend": "distributed"}),
    "data": (GPT, torch.optim.AdamW, {"mesh": "data=2", "zero": 2}),
    "tensor": (GPT, torch.optim.SGD, {"mesh": "tensor=2", "sequence_parallel": True}),
    "stages": (GPT, torch.optim.Adagrad, {"mesh": "pipeline=2,data=2", "zero": 1}),
    "dropout": (DROPOUT, torch.optim.RMSprop, {"mesh": "data=2,tensor=2", "seed": 3}),
    "weights": (GPT, torch.optim.NAdam, {"mesh": "data=2", "zero": 3, "backward": "in_call"}),
}
"""Runs by name: the model, the optimizer, and options of `sw.compile`."""


def step_figures(name: str) -> Figures:
    """Figures of three steps: losses, the sums of each parameter and of its state, and the words
    of the step."""
    spec, make, options = STEPS[name]
    example = build_example(spec, dtype=torch.float64)
    with unheard():
        model = sw.compile(
            example.module, kwargs=example.kwargs, **{"backend": "reference", "seed": 0, **options}
        )
    optimizer = make(model.parameters(), lr=0.01)
    losses: list[float] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**example.kwargs)
        if options.get("backward") != "in_call":
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    step = Step.of(model)
    sums = {n: p.double().abs().sum().item() for n, p in model.full_state_dict().items()}
    return {
        **{f"loss {number}": loss for number, loss in enumerate(losses)},
        "sums": {key: f"{value:.5g}" for key, value in sums.items()},
        "summary": step.summary(),
        "notes": step.notes,
        "state": optimizer_text(optimizer),
    }


def optimizer_text(optimizer: torch.optim.Optimizer) -> list[str]:
    """Write the kinds, shapes and sums of an optimizer's states, in the order of parameters."""
    states = optimizer.state_dict()["state"]
    return [
        f"{number} {name} {list(value.shape)} {full(value).double().abs().sum().item():.5g}"
        for number, state in states.items()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    ]


def full(value: torch.Tensor) -> torch.Tensor:
    return full_value(value) if isinstance(value, DTensor) else value
