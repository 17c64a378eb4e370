"""Gradients of inputs: outputs of a program that go to the inputs' `.grad`, as in eager."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from shardweave.ir.program.program import INPUT_GRADIENT, Slot


def check_required(results: Iterable[Slot], batch: Mapping[str, Tensor]) -> None:
    """Raises ValueError if an input requires a gradient that the program does not compute."""
    slots = list(results)
    names = {slot.name.removeprefix(INPUT_GRADIENT) for slot in slots if slot.kind == "output"}
    is_training = any(slot.kind == "grad" for slot in slots)
    for name, tensor in batch.items():
        if is_training and tensor.requires_grad and name not in names:
            raise ValueError(
                f"input '{name}' requires a gradient, but the one that the step was captured with "
                "did not; detach it, or capture with one that does."
            )


def give(gradients: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
    """Add gradients to the inputs that require one, by name, and go on from those that are results
    of autograd, such as of a module in front of the step, as the backward pass does in eager."""
    rest: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        tensor = batch[name]
        if not tensor.requires_grad:
            continue
        gradient = gradient.to(tensor.device)
        if not tensor.is_leaf:
            rest[name] = gradient
        else:
            tensor.grad = gradient.clone() if tensor.grad is None else tensor.grad + gradient
    if rest:
        torch.autograd.backward([batch[name] for name in rest], list(rest.values()))
