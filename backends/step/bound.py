"""A program bound to a backend, and to the tensors of a step when it is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardweave.backends.distributed.parts import is_uneven
from shardweave.backends.programs import Key, sharding_held
from shardweave.backends.state.state import ShardedState
from shardweave.backends.step.backend import Backend
from shardweave.backends.step.running import Running
from shardweave.ir.capture.outputs import LOSS
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.library.philox import STATE
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import TANGENT, Program
from shardweave.ir.program.staged import is_staged
from shardweave.ir.program.storage import makes_memory, storage_of
from shardweave.ir.torch_private import local_part
from shardweave.passes.messages.pending_gradients import leave_gradients_pending, pending_terms
from shardweave.passes.stages.split_step import split_step


class _Held(NamedTuple):
    """Tensors of a state that a program reads. local: this rank's shards of parameters and buffers.
    versioned: the parameters, and their shards, whose version counters are watched."""

    local: Mapping[Key, Tensor]
    versioned: list[Tensor]


class BoundProgram:
    """A program that a backend has loaded. Making one is collective.

    returned: builds the model's return value from the outputs; None for a user's program, whose
    outputs are returned as they are. adds: by name, the shardings of the unreduced gradients that
    the program takes, adds its own to, and reduces. is_split: whether the program runs as a forward
    and a backward part, `parts`, if it can be split.
    """

    def __init__(
        self,
        program: Program,
        backend: Backend,
        returned: Any = None,
        adds: Mapping[str, Sharding] | None = None,
        *,
        is_split: bool = False,
    ) -> None:
        backend.check(program)
        self.program = program
        self.backend = backend
        self.returned = returned
        self.slots = {(slot.kind, slot.name): slot for slot in program.arguments}
        self.shardings = {key: sharding_held(program, slot) for key, slot in self.slots.items()}
        self.results = {
            (slot.kind, slot.name): sharding_held(program, slot) for slot in program.results
        }
        self.has_gradients = any(kind == "grad" for kind, _ in self.results)
        self.adds = adds or {}
        self._held: tuple[Callable[[], Any], int, _Held] = (lambda: None), 0, _Held({}, [])
        self.parts = self._split() if is_split else None
        if self.parts is None:
            assert self.runner

    @property
    def inputs(self) -> list[str]:
        """Names of the model's inputs, leaving out gradients of outputs."""
        names = (name for kind, name in self.slots if kind == "input")
        return [name for name in names if not name.startswith(TANGENT)]

    @cached_property
    def tangents(self) -> dict[str, Key]:
        """Map each output whose gradient the program takes to the key of that argument."""
        names = {key: key[1].removeprefix(TANGENT) for key in self.slots if key[0] == "input"}
        cut = {name: key for key, name in names.items() if name != key[1]}
        loss = LOSS if self.returned is not None else "0"
        of_loss = [key for key in self.slots if key[0] == "tangent"]
        return cut or ({loss: of_loss[0]} if of_loss else {})

    @property
    def takes_loss(self) -> bool:
        """True if the program takes the gradient of the loss as a `tangent` argument."""
        return any(kind == "tangent" for kind, _ in self.slots)

    @cached_property
    def runner(self) -> Any:
        """Runner of the program as a whole. Collective."""
        return self.backend.load(self.program, tuple(self.adds))

    def home(self, name: str) -> int | None:
        """Return the stage that has the output `name`, if only one stage does; else None."""
        return None if self.parts is not None else getattr(self.runner, "homes", {}).get(name)

    @property
    def runners(self) -> list[Any]:
        """Runners of the program: one for the whole program, or one for each part."""
        return [self.runner] if self.parts is None else [part.runner for part in self.parts]

    def _split(self) -> tuple[BoundProgram, BoundProgram] | None:
        """Load the forward and the backward part; None if it cannot be split. Collective."""
        split = split_step(self.program)
        if split is None:
            return None
        parts = (split.forward, split.backward)
        forward, backward = (BoundProgram(part, self.backend, self.returned) for part in parts)
        return forward, backward

    @cached_property
    def overwritten(self) -> list[Key]:
        """Keys of buffers that the program overwrites while other results need the old values."""
        if is_staged(self.program):
            return [key for key in self.results if key[0] == "buffer"]
        read = {slot.value for slot in self.program.results if slot.kind != "buffer"}
        for op in reversed(list(self.program.ops)):
            if any(result in read for result in op.results):
                for inner in op.walk():
                    read.update(inner.operands)
        return [
            key
            for key, slot in self.slots.items()
            if key[0] == "buffer" and key in self.results and slot.value in read
        ]

    @cached_property
    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shapes of the outputs, by name."""
        return {
            slot.name: self.results["output", slot.name].global_shape(shape_of(slot.value))
            for slot in self.program.results
            if slot.kind == "output"
        }

    def output_of(self, name: str, result: Tensor) -> Tensor:
        """Convert a runner's output to the form in which a step returns it. Collective."""
        sharding, shape = self.results["output", name], self.output_shapes[name]
        return self.backend.returned(result, sharding, self.home(name), shape)

    @property
    def draws(self) -> bool:
        """True if the program draws random numbers."""
        return ("buffer", STATE) in self.slots

    @property
    def state_shardings(self) -> dict[Key, Sharding]:
        """Shardings of the model's parameters and buffers that the program reads."""
        return {
            key: s
            for key, s in self.shardings.items()
            if key[0] in ("param", "buffer") and key[1] != STATE
        }

    @cached_property
    def shared(self) -> list[Key]:
        """Keys of results that may share memory with other results or with arguments."""
        program = self.program
        roots = [storage_of(slot.value, program.mesh) for slot in program.results]
        counts = Counter(roots)
        return [
            (slot.kind, slot.name)
            for slot, root in zip(program.results, roots, strict=True)
            if counts[root] > 1
            or not isinstance(root.owner, AtenOp)
            or not makes_memory(root.owner.name)
        ]

    @cached_property
    def pending(self) -> BoundProgram:
        """Variant of the program that leaves gradients unreduced where it can. Collective."""
        program = self.program.clone()
        if not program.is_local or not leave_gradients_pending(program):
            return self
        return BoundProgram(program, self.backend, self.returned)

    @cached_property
    def closing(self) -> BoundProgram | None:
        """Variant of the program that adds its gradients to unreduced ones, and reduces the sums.

        Reductions overlap the backward pass. None if the backend or a gradient does not allow it.
        """
        left = {
            name: sharding
            for (kind, name), sharding in self.pending.results.items()
            if kind == "grad" and sharding != self.results[kind, name]
        }
        if not self.backend.adds_pending or not left.keys() <= pending_terms(self.program).keys():
            return None
        if any(is_uneven(self.program, slot) for slot in self.program.results if slot.name in left):
            return None  # the program's own gradients have padding, those in `.grad` have none
        return BoundProgram(self.program, self.backend, self.returned, left)

    def run(
        self,
        state: ShardedState,
        batch: Mapping[str, Tensor],
        scale: float | Tensor = 1.0,
    ) -> dict[Key, Tensor]:
        """Run the program; returns results by kind and name, as `start` says. Collective."""
        return self.start(state, batch, scale).rest()

    def start(
        self,
        state: ShardedState,
        batch: Mapping[str, Tensor],
        scale: float | Tensor = 1.0,
        into: Mapping[Key, Tensor] | None = None,
        kept: dict[Key, Any] | None = None,
        *,
        guard: AbstractContextManager[None] | None = None,
        in_order: bool = False,
    ) -> Running:
        """Start a run, whose results have memory of their own.

        batch: the inputs, and the gradients of outputs that the program takes, by input name.
        scale: factor of the loss for its gradients. into: gradients that the runner may add to in
        place; results that it has added so are left out. kept: the forward part's kept values and
        the buffers' values before it; they are removed from the dict and freed after their last
        use. Results of kind `kept` may share memory with others. guard, in_order: as in `Running`.
        """
        given: dict[Key, Any] = dict(self.held_by(state).local)
        for key in self._inputs:
            given[key] = self.backend.argument(batch[key[1]], self.shardings[key])
        given |= self._tangents(scale)
        for key in [key for key in kept or () if key in self.slots]:
            assert kept is not None
            given[key] = kept.pop(key)
        given |= into or {}
        guard = guard or nullcontext()
        return Running(self.runner, given, into or {}, self.shared, guard, in_order=in_order)

    @cached_property
    def _inputs(self) -> list[Key]:
        """Keys of the arguments that a batch provides: inputs, and gradients of outputs."""
        return [key for key in self.slots if key[0] == "input"]

    def held_by(self, state: ShardedState) -> _Held:
        """Return the tensors of a state that the program reads; cached until the state, or the
        number of its stored tensors, changes."""
        stored, (of, number, held) = state.stored, self._held
        if of() is not state or number != len(stored):
            read = {key: stored[key] for key in self.slots if key in stored}
            local = {key: self.backend.local(tensor) for key, tensor in read.items()}
            held = _Held(local, with_versions(x for key, x in read.items() if key[0] == "param"))
            self._held = ref(state), len(stored), held
        return held

    def _tangents(self, scale: float | Tensor) -> dict[Key, Tensor]:
        device = self.backend.device
        return {
            key: torch.as_tensor(scale, dtype=dtype_of_value(slot.value), device=device)
            for key, slot in self.slots.items()
            if slot.kind == "tangent"
        }

    # Checks

    def check_model(self, model: nn.Module) -> None:
        """Raises ValueError unless the model has the parameters and buffers that the program reads,
        and gradients and new buffers are sharded as the tensors that they update."""
        tensors: dict[Key, Tensor] = {("param", name): p for name, p in model.named_parameters()}
        tensors |= {("buffer", name): b for name, b in model.named_buffers()}
        missing = [f"{k} '{n}'" for k, n in self.state_shardings if (k, n) not in tensors]
        if missing:
            raise ValueError(f"the model lacks {', '.join(missing)}; capture this model's program.")
        for key in self.state_shardings:
            self._check_tensor(key, tensors[key])
        for (kind, name), sharding in self.results.items():
            if kind not in ("grad", "buffer"):
                continue
            stored = self.shardings.get(("param" if kind == "grad" else "buffer", name))
            if sharding != stored:
                raise ValueError(
                    f"{kind} '{name}' is sharded as {sharding}, but the parameter or buffer that "
                    f"it updates is stored as {stored}; give both the same dist.sharding."
                )

    def _check_tensor(self, key: Key, tensor: Tensor) -> None:
        value = self.slots[key].value
        shape = self.shardings[key].global_shape(shape_of(value))
        if tuple(tensor.shape) != shape or tensor.dtype != dtype_of_value(value):
            raise ValueError(
                f"{key[0]} '{key[1]}' of the model has shape {tuple(tensor.shape)} and "
                f"{tensor.dtype}, but the program expects {shape} and {dtype_of_value(value)}; "
                "capture the program again from this model."
            )

    def check_batch(self, batch: Mapping[str, Tensor]) -> None:
        """Raises ValueError unless a batch has the program's inputs, in their global shapes."""
        if set(batch) != set(self.inputs):
            raise ValueError(
                f"the step was called with inputs {sorted(batch)}, but it was captured with "
                f"{sorted(self.inputs)}; give exactly the latter."
            )
        for name in self.inputs:
            value, tensor = self.slots["input", name].value, batch[name]
            shape = self.shardings["input", name].global_shape(shape_of(value))
            if tuple(tensor.shape) != shape or tensor.dtype != dtype_of_value(value):
                raise ValueError(
                    f"input '{name}' has shape {tuple(tensor.shape)} and {tensor.dtype}, "
                    f"expected the global shape {shape} and {dtype_of_value(value)}; to give "
                    "only this rank's rows, use step.local_batch(..)."
                )


def device_of(model: nn.Module) -> torch.device:
    """Device of a model's parameters; the CPU if it has none."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def with_versions(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among `values` that have version counters (all but inference tensors),
    followed by this rank's shards of the DTensors among them."""
    tensors = [x for x in values if isinstance(x, Tensor) and not x.is_inference()]
    return tensors + [local_part(x) for x in tensors if isinstance(x, DTensor)]
