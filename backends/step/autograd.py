"""Calls of a step as nodes of autograd's graph: `backward()` runs the backward part of the program.

A call runs the forward part and keeps the values that the backward part reads. Autograd then passes
in the gradients of outputs, and receives those of parameters and inputs.

- A program of stages, of sub-batches that cross passes, or of a loss in chunks, cannot be split.
  If it takes the gradient of the loss, it runs in the call, and its gradients wait for
  `backward()`. Else the call runs forward alone, and `backward()` runs the whole program.
- If gradients arrive for other outputs than the program expects, `backward()` runs a program that
  takes exactly these; the next call with the same key begins with that program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from shardweave.backends.batch import replicas
from shardweave.backends.programs import Key
from shardweave.backends.step import as_eager
from shardweave.backends.step.bound import BoundProgram, owned, with_versions
from shardweave.backends.step.step_call import StepCall
from shardweave.ir.program.program import INPUT_GRADIENT, TANGENT, Slot
from shardweave.ir.torch_private import keeps_graph, version_of, without_overrides
from shardweave.passes.stages.split_step import KEPT

Step = Any
"""A `backends.step.step.Step`, whose file imports this one."""

TWICE = (
    "Trying to backward through the graph of a step's call a second time; what it kept was freed "
    "after the first. Call backward(retain_graph=True) before."
)

IN_CALL_NOTE = (
    "gradients of the loss are computed in the call, and multiplied at backward() by the one that "
    "comes in: the program has no backward part of its own (stages, sub-batches across passes, a "
    "loss in chunks)"
)

TWICE_NOTE = (
    "backward() runs the forward pass again: the program has no backward part of its own (stages, "
    "sub-batches across passes); return the loss from the model to run it once"
)

UNSYNCED = (
    "create_graph=True: gradients of calls under no_sync() are waiting for their sums; take the "
    "gradients that are differentiated again outside of no_sync(), before these."
)

LOCAL_ROWS = (
    'create_graph=True: with batch="local" a rank has its own rows alone, and gradients of the '
    'global batch are not differentiated again; compile with batch="global", or compute the inner '
    "gradient in the model's forward."
)


class AutogradCalls:
    """Runs the calls of a step for which gradients arrive at `backward()`."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self._tangents: dict[Any, tuple[int, ...]] = {}
        """By key of a call: positions of the outputs whose gradients arrived last."""
        self._scale: float | Tensor = 1.0
        """The last incoming gradient of the loss, by which a loss in float16 is scaled."""

    def run(self, call: StepCall, *, is_synced: bool, is_checked: bool) -> _Recorded:
        """Run a call; return its record, whose outputs are not in autograd's graph yet.
        Collective."""
        step = self.step
        call = replace(call, tangents=self._tangents.get(call.key, ()))
        bound = step.program_for(call)
        recorded = _Recorded(self, call, bound, is_synced=is_synced, is_checked=is_checked)
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
            recorded.made = {key: each for key, each in results.items() if _gives_gradient(key)}
        recorded.outputs = recorded.take(results, program)
        recorded.note_versions()
        return recorded

    def expect(self, call: StepCall, tangents: tuple[int, ...]) -> None:
        """Let later calls with the same key use the program that takes these outputs' gradients."""
        self._tangents[replace(call, tangents=None).key] = tangents

    def scale_by(self, gradient: Tensor) -> None:
        """Scale losses in float16 by `gradient` from the next call on."""
        self._scale = gradient


class _Recorded:
    """The record that a call leaves for `backward()`.

    made: gradients, computed in the call, of the loss times `scale`; else None. outputs: by name.
    """

    def __init__(
        self,
        calls: AutogradCalls,
        call: StepCall,
        bound: BoundProgram,
        *,
        is_synced: bool,
        is_checked: bool,
    ) -> None:
        self.calls = calls
        self.call = call
        self.bound = bound
        self.is_synced = is_synced
        self.is_checked = is_checked
        self.made: dict[Key, Tensor] | None = None
        self.scale: float | Tensor = 1.0
        self.outputs: dict[str, Tensor] = {}
        step = calls.step
        self._kept: dict[Key, Any] | None = {
            key: step.backend.local(step.stored[key]).clone() for key in bound.overwritten
        }
        self._parameters, self._keys = step.gradients.parameters, step.gradients.keys
        if not all(call.trained):
            self._parameters = list(compress(self._parameters, call.trained))
            self._keys = list(compress(self._keys, call.trained))
        self._watched: list[Tensor] = []
        self._versions: list[int] = []

    def take(self, results: dict[Key, Tensor], program: BoundProgram) -> dict[str, Tensor]:
        """Return the outputs among a program's results; store results of kind `KEPT` here."""
        assert self._kept is not None
        self._kept |= {key: result for key, result in results.items() if key[0] == KEPT}
        results = {key: result for key, result in results.items() if key[0] in ("output", "buffer")}
        return self.calls.step.taken(results, program, self.call)

    def note_versions(self) -> None:
        """Record the version counters of the tensors that `backward()` reads."""
        if self.made is not None:
            return
        reader = self.bound if self.bound.parts is None else self.bound.parts[1]
        read = [tensor for key, tensor in (self._kept or {}).items() if key[0] == KEPT]
        read += [self.call.inputs[name] for name in reader.inputs]
        self._watched = reader.held_by(self.calls.step).versioned + with_versions(read)
        self._versions = versions_of(self._watched)

    def attached(self) -> dict[str, Tensor]:
        """Return the outputs by name; for autograd this record computed the differentiable ones."""
        returned = self.bound.returned
        chosen = self.bound.tangents if returned is None else returned.differentiable
        names = [name for name in self.outputs if name in chosen]
        anchors = [tensor for tensor in self.call.inputs.values() if tensor.requires_grad]
        anchors = [*self._parameters, *anchors]
        if not anchors or not names:
            return self.outputs
        self.names = names
        tensors = [self.outputs[name] for name in names]
        with torch.enable_grad():
            marked = _Call.apply(self, len(names), *tensors, *anchors)
        outputs = self.outputs | dict(zip(names, marked, strict=True))
        self.outputs = {}
        return outputs

    # Backward

    def backward(self, incoming: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return gradients of trained parameters, then of inputs, given those of the outputs."""
        pairs = zip(self.names, incoming, strict=True)
        given = {name: gradient for name, gradient in pairs if gradient is not None}
        num_inputs = sum(tensor.requires_grad for tensor in self.call.inputs.values())
        if not given:
            return [None] * (len(self._parameters) + num_inputs)
        if self._kept is None:
            raise RuntimeError(TWICE)
        self._check_versions()
        given = {name: self._joined(name, gradient) for name, gradient in given.items()}
        if self.is_checked:
            replicas.check_gradients(given)
        kept = dict(self._kept)
        if not keeps_graph():
            self._kept, self._watched, self._versions = None, [], []
        with torch.no_grad():
            if given.keys() != self.bound.tangents.keys():
                return self._by_another_program(given, kept)
            if self.made is not None:
                return self._given(self._scaled(self.made, *given.values()), self.bound)
            parts = self.bound.parts
            return self._run(self.bound if parts is None else parts[1], given, kept)

    def differentiable(self, incoming: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Compute the gradients that `backward` returns, with a graph of their own."""
        pairs = zip(self.names, incoming, strict=True)
        given = {name: gradient for name, gradient in pairs if gradient is not None}
        targets = [x for x in self.call.inputs.values() if x.requires_grad]
        targets = [*self._parameters, *targets]
        if not given:
            return [None] * len(targets)
        step = self.calls.step
        if not self.is_synced or step.gradients.are_pending:
            raise RuntimeError(UNSYNCED)
        if self.call.rows is not None:
            raise RuntimeError(LOCAL_ROWS)
        if self._kept is None:
            raise RuntimeError(TWICE)
        self._check_versions()
        step.note(as_eager.NOTE)
        return as_eager.differentiable_gradients(
            step, self.call, self.bound, given, self._kept, targets
        )

    def _joined(self, name: str, gradient: Tensor) -> Tensor:
        """Return an output's global gradient; `gradient` may be of this rank's own rows only."""
        if not self.calls.step.are_own_rows(name, self.bound, self.call):
            return gradient
        return self.call.rows.joined_gradient(gradient)

    def _check_versions(self) -> None:
        now = versions_of(self._watched)
        if now != self._versions:
            pairs = zip(now, self._versions, strict=True)
            changed = next(i for i, (new, old) in enumerate(pairs) if new != old)
            raise RuntimeError(
                f"a parameter, input or output of shape {tuple(self._watched[changed].shape)} "
                "was changed in place between the step's call and backward(), which needs its "
                "old value. Run backward() before optimizer.step(), and change a copy (clone) of "
                "inputs and outputs."
            )

    def _by_another_program(
        self, given: Mapping[str, Tensor], kept: dict[Key, Any]
    ) -> list[Tensor | None]:
        """Run forward and backward by a program that takes gradients of exactly these outputs."""
        positions: dict[str, int] = {}
        for position, leaf in enumerate(self.bound.returned.leaves):
            if leaf.name in given and leaf.is_differentiable:
                positions.setdefault(leaf.name, position)
        tangents = tuple(positions.values())
        self.calls.expect(self.call, tangents)
        bound = self.calls.step.program_for(replace(self.call, tangents=tangents))
        return self._run(bound, given, {key: x for key, x in kept.items() if key[0] != KEPT})

    def _run(
        self, bound: BoundProgram, given: Mapping[str, Tensor], kept: dict[Key, Any]
    ) -> list[Tensor | None]:
        step = self.calls.step
        batch = dict(self.call.inputs) | {TANGENT + name: x for name, x in given.items()}
        scale = 1.0 if not bound.takes_loss else next(iter(given.values()))
        kept_too = dict(kept) if self._kept is not None else {}
        gradients, pending = step.gradients, not self.is_synced or step.gradients.are_pending
        program = gradients.program_of(bound, is_last=self.is_synced) if pending else bound
        into = gradients.into(program) if pending else {}
        with step.failure_guard:
            results = program.run(step, batch, scale, into, kept)
        results = {key: result for key, result in results.items() if _gives_gradient(key)}
        if kept_too:
            tensors = [x for x in kept_too.values() if isinstance(x, Tensor)]
            results = owned(results, tensors)
        return self._given(results, program, is_added=pending)

    def _scaled(self, made: dict[Key, Tensor], gradient: Tensor) -> dict[Key, Tensor]:
        """Multiply the gradients computed in the call by the incoming gradient of the loss."""
        if self.call.autocast == torch.float16:
            self.calls.scale_by(gradient.detach().clone())
        factor = gradient / self.scale
        if self._kept is not None:
            return {key: x * factor.to(x.dtype) for key, x in made.items()}
        self.made = None
        if factor.is_cpu and factor.item() == 1.0:
            return made
        for total in made.values():
            total.mul_(factor.to(total.dtype))
        return made

    def _given(
        self, results: Mapping[Key, Tensor], bound: BoundProgram, *, is_added: bool = False
    ) -> list[Tensor | None]:
        """Return the gradients for autograd; while some are unreduced, add them to `.grad` here."""
        step = self.calls.step
        is_added = is_added or not self.is_synced or step.gradients.are_pending
        given: list[Tensor | None] = []
        for parameter, key in zip(self._parameters, self._keys, strict=True):
            if is_added or key not in bound.results:
                given.append(None)
            elif key in results:
                given.append(step.backend.gradient(results[key], parameter))
            else:
                given.append(step.gradients.elsewhere(parameter))
        if is_added:
            step.gradients.take(results, bound)
            step.gradients.finish(is_synced=self.is_synced)
        else:
            step.gradients.note_sync(is_synced=True)
        for name, tensor in self.call.inputs.items():
            if tensor.requires_grad:
                key = ("output", INPUT_GRADIENT + name)
                is_given = key in results
                given.append(step.of_input(results[key], bound, name, tensor) if is_given else None)
        return given


def _gives_gradient(key: Key) -> bool:
    """Whether a result is a gradient, of a parameter or an input."""
    return key[0] == "grad" or key[1].startswith(INPUT_GRADIENT)


class _Call(torch.autograd.Function):
    """Autograd node of a call, from its parameters and inputs to its differentiable outputs."""

    @staticmethod
    def forward(ctx: Any, recorded: _Recorded, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.recorded, ctx.count = recorded, count
        # Not views of the arguments: those could not be changed in place.
        return tuple([tensor.detach() for tensor in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            made = ctx.recorded.differentiable(gradients)
            return (None, None, *[None] * ctx.count, *made)
        return (None, None, *[None] * ctx.count, *ctx.recorded.backward(gradients))


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return the version counter of each tensor: the number of in-place writes to it."""
    with without_overrides():
        return list(map(version_of, tensors))


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
