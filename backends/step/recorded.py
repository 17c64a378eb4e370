"""Records of a step's calls: what `backward()` needs, and the chain of autograd's nodes.

A node runs the backward part of the program up to the gradients that it returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardweave.backends.batch import replicas
from shardweave.backends.programs import Key
from shardweave.backends.step import as_eager
from shardweave.backends.step.bound import BoundProgram, with_versions
from shardweave.backends.step.running import Running, memory_of, owned
from shardweave.backends.step.step_call import StepCall
from shardweave.ir.program.program import INPUT_GRADIENT, TANGENT
from shardweave.ir.torch_private import (
    autograd_engine,
    keeps_graph,
    version_of,
    without_overrides,
)
from shardweave.passes.stages.split_step import KEPT, gives_gradient

Calls = Any
"""A `backends.step.autograd.AutogradCalls`, whose file imports this one."""

TWICE = (
    "Trying to backward through the graph of a step's call a second time; what it kept was freed "
    "after the first. Call backward(retain_graph=True) the first time."
)

UNSYNCED = (
    "create_graph=True: gradients of calls under no_sync() are not reduced over ranks yet; take "
    "gradients with create_graph=True before the calls under no_sync()."
)

HOOKS_NOTE = (
    "hooks of register_post_accumulate_grad_hook run after the whole backward pass, so all "
    "gradients exist at once: the step has stages, sub-batches across passes, a loss in chunks, a "
    "CUDA graph, or sums of calls under no_sync()"
)

CHANGED = (
    "a hook changed parameter '{name}' before the backward pass had computed its gradient; change "
    "a parameter in its own hook, or after backward()."
)

LOCAL_ROWS = (
    'create_graph=True: with batch="local" a rank has its own rows alone, and gradients of the '
    'global batch are not differentiated again; compile with batch="global", or compute the inner '
    "gradient in the model's forward."
)


class _Run(NamedTuple):
    """A backward program that has started. versions: of parameters, by the keys of their gradients;
    a hook must not change a parameter before its gradient exists."""

    running: Running
    program: BoundProgram
    versions: Mapping[Key, list[int]]


class Recorded:
    """The record that a call leaves for `backward()`.

    made: gradients, computed in the call, of the loss times `scale`; else None. outputs: by name.
    """

    def __init__(
        self,
        calls: Calls,
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
        self._ends = [len(self._parameters)]
        """For each node of the chain, the number of parameters whose gradients exist after it."""
        if hooked := step.gradients.hooked():
            self._follow_order({("grad", name) for name in hooked})
        self._names: list[str] = []
        self._kept_too: Mapping[int, Any] = {}
        """Storages that a retained graph keeps; returned gradients must not share them."""
        self._run: _Run | None = None
        self._given: list[Tensor | None] | None = None
        self._watched: list[Tensor] = []
        self._versions: list[int] = []

    def _follow_order(self, hooked: set[Key]) -> None:
        """Sort the parameters as the backward part completes their gradients; let each that has a
        hook end a node of the chain."""
        bound = self.bound
        order: Sequence[Key] = ()
        if bound.parts is not None or not bound.takes_loss:
            order = bound.runners[-1].order
        if not order:
            self.calls.step.note(HOOKS_NOTE)
            return
        places = {key: place for place, key in enumerate(order)}
        pairs = list(zip(self._keys, self._parameters, strict=True))
        pairs.sort(key=lambda pair: places.get(pair[0], len(order)))
        self._keys, self._parameters = [key for key, _ in pairs], [p for _, p in pairs]
        alone = [i for i, key in enumerate(self._keys) if key in hooked and key in places]
        ends = {end for i in alone for end in (i, i + 1)}
        self._ends = sorted({*ends, len(pairs)} - {0})

    def take(self, results: dict[Key, Tensor], program: BoundProgram) -> dict[str, Tensor]:
        """Return the outputs among a program's results, and keep those of kind `KEPT` here."""
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
        """Return the outputs by name; the differentiable ones are results of this record's node."""
        returned = self.bound.returned
        chosen = self.bound.tangents if returned is None else returned.differentiable
        names = [name for name in self.outputs if name in chosen]
        inputs = [tensor for tensor in self.call.inputs.values() if tensor.requires_grad]
        if not (self._parameters or inputs) or not names:
            return self.outputs
        self._names = names
        tensors = [self.outputs[name] for name in names]
        begins = [0, *self._ends]
        last = len(self._ends) - 1
        link: tuple[Tensor, ...] = ()
        with torch.enable_grad():
            for number in range(last, 0, -1):
                anchors = self._parameters[begins[number] : self._ends[number]]
                anchors += inputs if number == last else link
                link = _Call.apply(self, number, 1, self._link(), *anchors)
            anchors = [*self._parameters[: self._ends[0]], *(link if last else inputs)]
            marked = _Call.apply(self, 0, len(names), *tensors, *anchors)
        outputs = self.outputs | dict(zip(names, marked, strict=True))
        self.outputs = {}
        return outputs

    # Backward

    def begin(self, incoming: Sequence[Tensor | None]) -> None:
        """Store the outputs' incoming gradients, for `part` to run backward from them."""
        pairs = zip(self._names, incoming, strict=True)
        given = {name: gradient for name, gradient in pairs if gradient is not None}
        inputs = [x for x in self.call.inputs.values() if x.requires_grad]
        none: list[Tensor | None] = [None] * (len(self._parameters) + len(inputs))
        self._run, self._given = None, none
        if not given:
            return
        is_graph = torch.is_grad_enabled()
        step = self.calls.step
        if is_graph and (not self.is_synced or step.gradients.are_pending):
            raise RuntimeError(UNSYNCED)
        if is_graph and self.call.rows is not None:
            raise RuntimeError(LOCAL_ROWS)
        if self._kept is None:
            raise RuntimeError(TWICE)
        self._check_versions()
        if is_graph:
            step.note(as_eager.NOTE)
            targets = [*self._parameters, *inputs]
            self._given = as_eager.differentiable_gradients(
                step, self.call, self.bound, given, self._kept, targets
            )
        else:
            self._begin(given)

    def _begin(self, given: dict[str, Tensor]) -> None:
        given = {name: self._joined(name, gradient) for name, gradient in given.items()}
        if self.is_checked:
            replicas.check_gradients(given)
        kept = dict(self._kept or {})
        if not keeps_graph():
            self._kept, self._watched, self._versions = None, [], []
        with torch.no_grad():
            if given.keys() != self.bound.tangents.keys():
                self._by_another_program(given, kept)
            elif self.made is not None:
                self._take_all(self._scaled(self.made, *given.values()), self.bound)
            else:
                parts = self.bound.parts
                self._start(self.bound if parts is None else parts[1], given, kept)

    def part(self, number: int) -> list[Tensor | None]:
        """Return the gradients of a node's inputs: parameters, and model inputs or a link."""
        begin, end = [0, *self._ends][number], self._ends[number]
        is_last = number == len(self._ends) - 1
        if self._given is not None:
            part = self._given[begin:] if is_last else self._given[begin:end]
        else:
            part = self._arrived(begin, end, is_last=is_last)
        if is_last:
            self._run = self._given = None
            return part
        return [*part, self._link()]

    def _link(self) -> Tensor:
        """Return a scalar that links two nodes, on the device whose queue runs the hooks."""
        return torch.zeros((), device=self.calls.step.backend.device)

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

    def _by_another_program(self, given: Mapping[str, Tensor], kept: dict[Key, Any]) -> None:
        """Run forward and backward by a program that takes gradients of exactly these outputs."""
        positions: dict[str, int] = {}
        for position, leaf in enumerate(self.bound.returned.leaves):
            if leaf.name in given and leaf.is_differentiable:
                positions.setdefault(leaf.name, position)
        tangents = tuple(positions.values())
        self.calls.expect(self.call, tangents)
        bound = self.calls.step.program_for(replace(self.call, tangents=tangents))
        self._start(bound, given, {key: x for key, x in kept.items() if key[0] != KEPT})

    def _start(
        self, bound: BoundProgram, given: Mapping[str, Tensor], kept: dict[Key, Any]
    ) -> None:
        step, gradients = self.calls.step, self.calls.step.gradients
        batch = dict(self.call.inputs) | {TANGENT + name: x for name, x in given.items()}
        scale = 1.0 if not bound.takes_loss else next(iter(given.values()))
        self._kept_too = memory_of(kept.values()) if self._kept is not None else {}
        pending = not self.is_synced or gradients.are_pending
        program = gradients.program_of(bound, is_last=self.is_synced) if pending else bound
        into = gradients.into(program) if pending else {}
        is_chain = len(self._ends) > 1 and not pending
        with step.failure_guard:
            running = program.start(
                step, batch, scale, into, kept, guard=step.failure_guard, in_order=is_chain
            )
        if pending:
            if len(self._ends) > 1:
                step.note(HOOKS_NOTE)
            self._take_all(self._gradients_among(running.rest()), program)
            return
        gradients.note_sync(is_synced=True)
        versions: dict[Key, list[int]] = {}
        if is_chain:
            pairs = zip(self._keys, self._parameters, strict=True)
            versions = {
                key: versions_of(with_versions([parameter]))
                for key, parameter in pairs
                if ("param", key[1]) in program.slots
            }
            # Autograd may leave out later nodes; ranks without hooks run the whole program.
            autograd_engine.queue_callback(running.rest)
        self._run, self._given = _Run(running, program, versions), None

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

    def _take_all(self, results: dict[Key, Tensor], bound: BoundProgram) -> None:
        """Keep gradients for `part`; while some are unreduced, add them to `.grad` instead."""
        gradients = self.calls.step.gradients
        if self.is_synced and not gradients.are_pending:
            gradients.note_sync(is_synced=True)
            made = self._of_parameters(results, bound, 0, len(self._parameters))
        else:
            gradients.take(results, bound)
            gradients.finish(is_synced=self.is_synced)
            made = [None] * len(self._parameters)
        self._given = made + self._of_inputs(results, bound)

    def _arrived(self, begin: int, end: int, *, is_last: bool) -> list[Tensor | None]:
        """Run on until the gradients of parameters `begin` to `end` exist; return them. The last
        call runs to the end, and returns the inputs' gradients too."""
        assert self._run is not None
        running, program, versions = self._run
        results = running.rest() if is_last else running.until(self._keys[begin:end])
        results = self._gradients_among(results)
        for key, parameter in zip(self._keys[begin:end], self._parameters[begin:end], strict=True):
            before = versions.get(key)
            if before is not None and versions_of(with_versions([parameter])) != before:
                raise RuntimeError(CHANGED.format(name=key[1]))
        given = self._of_parameters(results, program, begin, end)
        return given + (self._of_inputs(results, program) if is_last else [])

    def _gradients_among(self, results: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Return a program's gradients; they share no memory with what a retained graph keeps."""
        chosen = {key: result for key, result in results.items() if gives_gradient(*key)}
        return owned(chosen, self._kept_too) if self._kept_too else chosen

    def _of_parameters(
        self, results: dict[Key, Tensor], bound: BoundProgram, begin: int, end: int
    ) -> list[Tensor | None]:
        step = self.calls.step
        given: list[Tensor | None] = []
        pairs = zip(self._parameters[begin:end], self._keys[begin:end], strict=True)
        for parameter, key in pairs:
            if key not in bound.results:
                given.append(None)
            elif key in results:
                given.append(step.backend.gradient(results[key], parameter))
            else:
                given.append(step.gradients.elsewhere(parameter))
        return given

    def _of_inputs(self, results: dict[Key, Tensor], bound: BoundProgram) -> list[Tensor | None]:
        given: list[Tensor | None] = []
        for name, tensor in self.call.inputs.items():
            if tensor.requires_grad:
                key = ("output", INPUT_GRADIENT + name)
                is_given = key in results
                step = self.calls.step
                given.append(step.of_input(results[key], bound, name, tensor) if is_given else None)
        return given


class _Call(torch.autograd.Function):
    """Autograd node `number` of a call's chain. Inputs: parameters, and model inputs or the next
    node's link. Results: the call's differentiable outputs, or a link for the node before."""

    @staticmethod
    def forward(
        ctx: Any, recorded: Recorded, number: int, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.recorded, ctx.number, ctx.count = recorded, number, count
        # Not views of the arguments: those could not be changed in place.
        return tuple([tensor.detach() for tensor in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.number == 0:
            ctx.recorded.begin(gradients)
        return (None, None, None, *[None] * ctx.count, *ctx.recorded.part(ctx.number))


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return the version counter of each tensor: the number of in-place writes to it."""
    with without_overrides():
        return list(map(version_of, tensors))
