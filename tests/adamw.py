"""A sharded step trained beside eager PyTorch, on the processes of a test."""

from __future__ import annotations

import torch

import shardweave as sw
from shardweave.driver.models.models import Example


def errors_of_three_steps(step: sw.CompiledModule, example: Example) -> list[float]:
    """Three steps of AdamW of a step and of its model: the errors of each loss, and then the
    largest of each parameter."""
    model = example.module
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (step, model)]
    errors: list[float] = []
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(**example.kwargs)
        loss.backward()
        errors.append((step(**example.kwargs) - loss).item())
        for optimizer in optimizers:
            optimizer.step()
    full = step.full_state_dict()
    return errors + [(full[n] - p).abs().max().item() for n, p in model.named_parameters()]
