"""Calls of a step as nodes of autograd's graph: `backward()` runs the backward part of the program.

A call runs the forward part and keeps the values that the backward part reads. Autograd then passes
in the gradients of outputs, and receives those of parameters and inputs.

- A program of stages, of sub-batches that cross passes, or of a loss in chunks, cannot be split.
  If it takes the gradient of the loss, it runs in the call, and its gradients wait for
  `backward()`. Else the call runs forward alone, and `backward()` runs the whole program.
- If parameters have hooks that run after a gradient is accumulated, the call is a chain of nodes,
  one for each such parameter: each runs the program up to that gradient, so that autograd can call
  the hooks, which may free it, before the program goes on.
- If gradients arrive for other outputs than the program expects, `backward()` runs a program that
  takes exactly these; the next call with the same key begins with that program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardweave.backends.step.recorded import Recorded
from shardweave.backends.step.step_call import StepCall
from shardweave.ir.program.program import INPUT_GRADIENT, Slot
from shardweave.passes.stages.split_step import gives_gradient

Step = Any
"""A `driver.step.step.Step`, whose file imports this one."""

IN_CALL_NOTE = (
    "gradients of the loss are computed in the call, and scaled at backward() by the incoming "
    "gradient: the program has no separate backward part (stages, sub-batches across passes, a "
    "loss in chunks)"
)

TWICE_NOTE = (
    "backward() runs the forward pass again: the program has no separate backward part (stages, "
    "sub-batches across passes); return the loss from the model to run it once"
)


class AutogradCalls:
    """Runs the calls of a step for which gradients arrive at `backward()`."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self._tangents: dict[Any, tuple[int, ...]] = {}
        """By key of a call: positions of the outputs whose gradients arrived last."""
        self._scale: float | Tensor = 1.0
        """The last incoming gradient of the loss, by which a loss in float16 is scaled."""

    def run(self, call: StepCall, *, is_synced: bool, is_checked: bool) -> Recorded:
        """Run a call and return its record, whose outputs have no graph yet. Collective."""
        step = self.step
        call = replace(call, tangents=self._tangents.get(call.key, ()))
        bound = step.program_for(call)
        recorded = Recorded(self, call, bound, is_synced=is_synced, is_checked=is_checked)
        if bound.parts is not None:
            program = bound.parts[0]
        elif bound.takes_loss:
            step.note(IN_CALL_NOTE)
            recorded.scale = self._scale if call.autocast == torch.float16 else 1.0
            program = bound
        else:
            step.note(TWICE_NOTE)
            program = step.program_for(replace(call, grad=False, tangents=None))
        with step.failure_guard:
            results = program.run(step, call.inputs, recorded.scale)
        if program is bound:
            recorded.made = {key: each for key, each in results.items() if gives_gradient(*key)}
        recorded.outputs = recorded.take(results, program)
        recorded.note_versions()
        return recorded

    def expect(self, call: StepCall, tangents: tuple[int, ...]) -> None:
        """Let later calls with the same key use the program that takes these outputs' gradients."""
        self._tangents[replace(call, tangents=None).key] = tangents

    def scale_by(self, gradient: Tensor) -> None:
        """Scale losses in float16 by `gradient` from the next call on."""
        self._scale = gradient


def check_required(results: Iterable[Slot], batch: Mapping[str, Tensor]) -> None:
    """Raises ValueError if an input requires a gradient that the program does not compute."""
    slots = list(results)
    names = {slot.name.removeprefix(INPUT_GRADIENT) for slot in slots if slot.kind == "output"}
    is_training = any(slot.kind == "grad" for slot in slots)
    for name, tensor in batch.items():
        if is_training and tensor.requires_grad and name not in names:
            raise ValueError(
                f"input '{name}' requires a gradient, but the example input at capture did not; "
                "detach it, or capture with an example input that requires a gradient."
            )


def give(gradients: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
    """Add gradients, by input name, to `.grad` of the leaf inputs in `batch` that require one; for
    inputs that autograd computed, such as outputs of an earlier module, run backward from them."""
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
