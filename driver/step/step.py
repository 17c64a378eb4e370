"""A step: a module that holds a model's sharded parameters, and runs programs on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardweave.backends.batch import replicas
from shardweave.backends.optimizers.shards import is_everywhere
from shardweave.backends.programs import Key
from shardweave.backends.state.initial import Source
from shardweave.backends.state.places import in_modes
from shardweave.backends.state.state import ShardedState, state_of
from shardweave.backends.step import as_eager
from shardweave.backends.step.accumulate import Gradients, merged, micro_batches
from shardweave.backends.step.after_backward import BackwardRan
from shardweave.backends.step.autograd import AutogradCalls, give
from shardweave.backends.step.bound import BoundProgram
from shardweave.backends.step.compiled_module import make_compiled
from shardweave.backends.step.recorded import HOOKS_NOTE
from shardweave.backends.step.step_call import (
    AUTOGRAD,
    IN_CALL,
    StepCall,
    autocast_dtype,
    check_values,
)
from shardweave.backends.watch import watchdog
from shardweave.backends.watch.failure_guard import FailureGuard
from shardweave.driver.step.programs import CompiledPrograms, summary_of
from shardweave.ir.capture.outputs import LOSS
from shardweave.ir.capture.site import CaptureError
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.library.philox import STATE
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding, contiguous
from shardweave.ir.program.program import INPUT_GRADIENT, Program
from shardweave.ir.suggest import did_you_mean
from shardweave.ir.torch_private import is_under_transform, pytree, without_overrides
from shardweave.planners.plan.plan import Plan


class Step(ShardedState):
    """A model's training step on a mesh: its tensors, sharded in place, and its programs.

    Calling the model, or this step, runs forward, updates buffers, and returns the model's outputs,
    with a graph for `backward()` (see `backends.step.autograd`). With backward="in_call", a call in
    training mode also runs backward of the model's own loss, and adds to `.grad`. `model.eval()`
    and `torch.no_grad()` have their usual meaning. Calls are collective, and so are their backward
    passes: every rank makes the same ones.

    Inputs are the global batch, the same on every rank; `local_batch` makes it from each rank's
    rows. On a mesh of several devices, outputs of one or more dims are DTensors, sharded as the
    program leaves them (`.full_tensor()` gathers them); scalars are plain tensors.

    A call with backward="in_call" takes two options. accumulate: number of micro-batches to split
    the batch into, which run one after another; gradients are those of the mean of their losses.
    loss_scale: a number, a tensor or a GradScaler, which scales the loss for the gradients (1 by
    default), but not the returned loss.

    first: the program by whose shardings the tensors are sharded. make_programs: called after that;
    returns the object that finds each call's program. sync: whether rank 0 sends its values of
    parameters and buffers; with False, ranks compare digests of theirs, and all raise
    AgreementError if they differ. The caller makes sure that the ranks' models are the same except
    for values. sources, optimizers: as in `ShardedState`. backward: whether gradients arrive at
    `backward()` (`AUTOGRAD`) or in the call (`IN_CALL`).
    """

    def __init__(
        self,
        model: nn.Module,
        first: BoundProgram,
        make_programs: Callable[[], CompiledPrograms],
        *,
        sync: bool = True,
        sources: Mapping[int, Source] | None = None,
        optimizers: Sequence[Optimizer] = (),
        backward: str = IN_CALL,
    ) -> None:
        first.check_model(model)
        shardings = first.state_shardings
        super().__init__(
            model, first.backend, shardings, sync=sync, sources=sources, optimizers=optimizers
        )
        self._bound = first
        self._backward = backward
        self._is_synced = True
        self._notes: list[str] = []
        self._begin(make_programs())
        if first.draws:
            self.draw_from(self._programs.seed)
        self.failure_guard = FailureGuard(is_joint=self.backend.is_joint)
        self._num_calls = 0
        make_compiled(model, self)

    def _begin(self, programs: CompiledPrograms) -> None:
        """Begin to run the model's calls by `programs`."""
        self._programs = programs
        self._gradients = Gradients(self)
        self._ran = BackwardRan(self._gradients.parameters)
        self._calls = AutogradCalls(self) if self._backward == AUTOGRAD else None
        self._notes = list(self._notes)

    @staticmethod
    def of(model: nn.Module) -> Step:
        """Return the step of a compiled model. Raises ValueError for a model not compiled."""
        step = state_of(model)
        if not isinstance(step, Step):
            raise ValueError(
                f"{type(model).__name__} is not compiled; call sw.compile on it first."
            )
        return step

    def copied(self, model: nn.Module, memo: Mapping[int, Any]) -> Step:
        """Copy the step for `model`, a deep copy made with `memo`; it runs the same programs."""
        new = super().copied(model, memo)
        new._begin(self._programs.copied(model))
        return new

    @property
    def programs(self) -> CompiledPrograms:
        """The object that finds or compiles the program of each call."""
        return self._programs

    @property
    def bound(self) -> BoundProgram:
        """The program of the last call; before the first call, that of the example inputs."""
        return self._bound

    @property
    def gradients(self) -> Gradients:
        """The `.grad` of the parameters."""
        return self._gradients

    # Calls

    @torch.compiler.disable  # torch.compile(step) would trace what runs compiled programs.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a batch and return its outputs; see the class. Collective."""
        options = {name: kwargs.pop(name) for name in self._programs.options & kwargs.keys()}
        count = options.get("accumulate", 1)
        scale = _loss_scale(options.get("loss_scale"), self.backend.device)
        try:
            call = self.call_of(args, kwargs)
        except CaptureError:
            if self.model.training:
                raise
            self.note(as_eager.OBJECTS_NOTE)
            return self._written(args, kwargs)
        self.failure_guard.check()
        if not self.has_own_tensors():
            self.note(as_eager.NOTE)
            return self._programs.in_eager(call, call.inputs)
        check_values(call.inputs)
        call = self._programs.joined(call)
        autograd = self._calls if call.grad else None
        if autograd is not None:
            _check_no_options(options)
        is_checked = self.backend.is_joint and replicas.are_checked()
        words = f"{call}, accumulate={count}, loss_scale={scale}" if is_checked else ""
        are_compared = self.backend.is_joint and self._compare(call, words)
        recorded = None
        # Programs contain autocast's casts already.
        with torch.no_grad(), torch.autocast(self.backend.device.type, enabled=False):
            if autograd is not None:
                recorded = autograd.run(call, is_synced=self._is_synced, is_checked=are_compared)
                outputs = recorded.outputs
            elif count == 1:
                outputs = self._run(call, scale, self._is_synced)
            else:
                outputs = self._accumulate(call, count, scale)
            if call.grad and recorded is None:
                self._gradients.finish(is_synced=self._is_synced)
        if is_checked:
            replicas.check_outputs(outputs)
        if recorded is not None:
            return _built(recorded.bound, recorded.attached())
        return self._returned(call, outputs)

    def _written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the model as it is written, on full tensors, in evaluation mode. Collective."""
        autocast = autocast_dtype(self.backend.device.type) or self._programs.autocast
        with torch.no_grad(), as_eager.on_full_tensors(self):
            return self._programs.written(args, kwargs, autocast)

    def _compare(self, call: StepCall, words: str) -> bool:
        """Compare the ranks' calls and inputs: in every call if `words` is given, else in the first
        calls. Returns whether they were compared. words: a description of the call, or empty."""
        number, self._num_calls = self._num_calls, self._num_calls + 1
        if words:
            replicas.check_call(words, call.inputs, self.stored, self._programs.advice)
        elif replicas.inputs_are_checked(number):
            watchdog.meet("the call", str(call))
            replicas.check_replicas("input", call.inputs, self._programs.advice)
            if not number:
                self._programs.say_rows()
        else:
            return False
        return True

    def call_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StepCall:
        """Make a `StepCall` of these arguments and the current modes. Raises ValueError under a
        transform of torch.func."""
        if is_under_transform():
            raise ValueError(
                "torch.func (vmap, grad, jvp, ..) cannot transform a compiled model; apply it to "
                "a copy made before sw.compile (copy.deepcopy), or use torch.autograd.grad(.., "
                "create_graph=True)."
            )
        form, inputs = self._programs.taken_apart(args, kwargs)
        with without_overrides():
            trained = [parameter.requires_grad for parameter in self._gradients.parameters]
        return StepCall(
            form,
            inputs,
            self.model.training and torch.is_grad_enabled(),
            tuple([module.training for module in self.modes]),
            tuple(trained),
            autocast_dtype(self.backend.device.type) or self._programs.autocast,
        )

    def program_for(self, call: StepCall) -> BoundProgram:
        """Find the program of a call, and make it the step's `bound` program. Collective."""
        if self.backend.is_joint:
            watchdog.enter(call)
        bound = self._bound = self._programs.find(call, self.shardings)
        if bound.draws and ("buffer", STATE) not in self.stored:
            self.draw_from(self._programs.seed)
        return bound

    def _run(self, call: StepCall, scale: float | Tensor, is_last: bool) -> dict[str, Any]:
        bound = self.program_for(call)
        if call.grad:
            bound = self._gradients.program_of(bound, is_last=is_last)
        into = self._gradients.into(bound) if call.grad else {}
        guard, in_order = self.failure_guard, False
        if call.grad and is_last and self._gradients.hooked():
            in_order = bool(bound.runner.order)
            if not in_order:
                self.note(HOOKS_NOTE)
        with guard:
            running = bound.start(self, call.inputs, scale, into, guard=guard, in_order=in_order)
        results = self._gradients.take_in_order(running, bound) if in_order else running.rest()
        self._gradients.take(results, bound)
        of_inputs: dict[str, Tensor] = {}
        for (_, name), tensor in results.items():
            if name.startswith(INPUT_GRADIENT):
                given = name.removeprefix(INPUT_GRADIENT)
                of_inputs[given] = self.of_input(tensor, bound, given, call.inputs[given])
        if of_inputs:
            give(of_inputs, call.inputs)
        return self.taken(results, bound, call)

    def taken(
        self, results: Mapping[Key, Tensor], bound: BoundProgram, call: StepCall
    ) -> dict[str, Any]:
        """Return the outputs among a program's results, by name; copy new values into buffers."""
        outputs: dict[str, Any] = {}
        for key in bound.results:  # in the order that all ranks have
            if key not in results:
                continue
            (kind, name), tensor = key, results[key]
            if kind == "buffer":
                self.backend.local(self.stored[key]).copy_(tensor)
            elif kind == "output" and not name.startswith(INPUT_GRADIENT):
                output = bound.output_of(name, tensor)
                if self.are_own_rows(name, bound, call):
                    output = call.rows.own_of(output)
                elif self._programs.full_outputs and isinstance(output, DTensor):
                    output = output.full_tensor()
                outputs[name] = output
        return outputs

    def are_own_rows(self, name: str, bound: BoundProgram, call: StepCall) -> bool:
        """True if a call returns only this rank's rows of an output."""
        if call.rows is None or not self._programs.own_rows:
            return False
        return bound.output_shapes[name][:1] == (call.rows.total,)

    def of_input(self, gradient: Tensor, bound: BoundProgram, name: str, like: Tensor) -> Tensor:
        """Convert a gradient to the form of its input: on its device, a DTensor if it is one."""
        returned = bound.output_of(INPUT_GRADIENT + name, gradient)
        if isinstance(returned, DTensor):
            stays = isinstance(like, DTensor) and is_everywhere(returned.device_mesh)
            returned = returned if stays else returned.full_tensor()
        return returned.to(like.device)

    def _accumulate(self, call: StepCall, count: int, scale: float | Tensor) -> dict[str, Any]:
        parts = micro_batches(call.inputs, count)
        rows = None if call.rows is None else call.rows.split(count)
        outputs = [
            self._run(
                replace(call, inputs=part, rows=rows),
                scale / count,
                is_last=self._is_synced and index == count - 1,
            )
            for index, part in enumerate(parts)
        ]
        return merged(outputs)

    def _returned(self, call: StepCall, outputs: dict[str, Any]) -> Any:
        """Build the model's return value from outputs that raise if they are differentiated."""
        returned = self._bound.returned
        loss = "0" if returned is None else LOSS
        if self._bound.has_gradients:
            differentiable = () if returned is None else returned.differentiable
            given = call.inputs.values()
            outputs = self._ran.mark(outputs, loss, differentiable, given, call.trained)
        return _built(self._bound, outputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context whose calls add to `.grad` without reducing it over ranks, if that can wait.

        The first call after the context reduces all gradients, once. Until then an unreduced
        `.grad` is a DTensor with a `Partial` placement.
        """
        before, self._is_synced = self._is_synced, False
        try:
            yield
        finally:
            self._is_synced = before

    # Inputs

    def local_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Make the global batch from each rank's own rows, as DTensors.

        Call `step(**step.local_batch(x=x, y=y))`, or `step(*step.local_batch(x, y))`; tuples, lists
        and dicts around tensors are kept. Every rank gives equally many rows; if the step was
        compiled with a batch that does not divide evenly, a rank may instead give its rows of such
        a batch (`rows`). Raises ValueError if some inputs are given by position and some by
        keyword.
        """
        if args and kwargs:
            raise ValueError("local_batch: give all inputs by position, or all by keyword.")
        _, inputs = self._programs.taken_apart(args, kwargs, is_whole=False)
        batch = {id(tensor): self._global(name, tensor) for name, tensor in inputs.items()}
        return pytree.tree_map(lambda leaf: batch.get(id(leaf), leaf), args or kwargs)

    def _global(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        axes = self._programs.row_axes(name)
        num_rows = self._num_rows(name, axes, tensor.shape[0])
        dims = (contiguous(axes, num_rows, self._mesh), *((),) * (tensor.ndim - 1))
        return self.backend.batch(tensor, Sharding(dims))

    def _num_rows(self, name: str, axes: Sequence[str], own: int) -> int:
        """Return the number of rows of the global input, given `own` rows on this rank."""
        first = self._programs.first
        slot = first.slots.get(("input", name))
        even = own * self._mesh.sizes(axes)
        if slot is None:
            return even
        num_rows = first.shardings["input", name].global_shape(shape_of(slot.value))[0]
        dim = contiguous(axes, num_rows, self._mesh)
        is_uneven = not Sharding((dim,)).is_even((num_rows,))
        given = len(self.backend.rows(num_rows, Sharding((dim,))))
        return num_rows if is_uneven and own == given else even

    def rows(self, name: str, num_rows: int | None = None) -> Sequence[int]:
        """Return the indices of this rank's rows of a global input, for a sampler.

        name: the input's name in the model's forward. num_rows: of the global input; by default as
        in the example batch. ValueError for too few rows, or an unknown name without num_rows.
        """
        first, known = self._programs.first, self._programs.names()
        slot = first.slots.get(("input", name))
        if num_rows is None:
            if slot is None:
                raise ValueError(
                    f"there is no input '{name}'; {did_you_mean(name, known)}the inputs are "
                    f"{', '.join(known)}."
                )
            num_rows = first.shardings["input", slot.name].global_shape(shape_of(slot.value))[0]
        axes = self._programs.row_axes(name)
        dim = contiguous(axes, num_rows, self._mesh)
        return self.backend.rows(num_rows, Sharding((dim,)))

    @property
    def _mesh(self) -> Mesh:
        return self._programs.first.program.mesh or Mesh()

    # Programs

    def compile_for(
        self, *args: Any, train: bool | None = None, grad: bool | None = None, **kwargs: Any
    ) -> None:
        """Compile the program of calls with inputs of these shapes in advance. Collective.

        train: compile as after `model.train(train)`; by default in the current modes. grad: compile
        as under `torch.set_grad_enabled(grad)`; by default as currently set.
        """
        modes = [module.training if train is None else train for module in self.modes]
        is_grad = torch.is_grad_enabled() if grad is None else grad
        with in_modes(self.modes, modes), torch.set_grad_enabled(is_grad):
            call = self._programs.joined(self.call_of(args, kwargs))
            if self.backend.is_joint:
                watchdog.meet("step.compile_for", str(call))
            self._programs.compile_ahead(call, self.shardings)

    @property
    def plan(self) -> Plan | None:
        """The plan that programs follow; None for a given program, or on one device without one."""
        return self._programs.plan

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the plan, such as values that it leaves replicated, and on how the step runs."""
        return (*self._programs.notes, *self._notes)

    def note(self, text: str) -> None:
        """Add a note on how the step runs, unless it is there already."""
        if text not in self._notes:
            self._notes.append(text)

    def summary(self) -> str:
        """Summarize mesh, parameters, programs and notes, in a few lines of text."""
        return summary_of(self._mesh, self._gradients.parameters, self._programs.kept(), self.notes)

    @property
    def program(self) -> Program:
        """The program of the last call; before the first call, that of the example inputs."""
        return self._bound.program

    @property
    def source(self) -> str:
        """Source of the Python module that runs `program`; of both modules if it is split."""
        return "\n\n".join(runner.source for runner in self._bound.runners)

    @property
    def kernels(self) -> list[Any]:
        """Kernels of the fused regions of `program`."""
        return [kernel for runner in self._bound.runners for kernel in runner.kernels]

    def recompile(self) -> None:
        """Forget all programs, so that the next calls capture the model anew. Call it on all ranks.

        Changes of attributes, hooks and modules are noticed without it. Call it after a change of
        anything else that the model's code reads, such as a global, or a value in a large list.
        """
        self._programs.forget()

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh as a DeviceMesh of torch.distributed, with named dims; None on one device."""
        return getattr(self.runtime, "device_mesh", None)

    @property
    def runtime(self) -> Any:
        """The runtime of the last program: this rank's device, coordinates and process groups."""
        return self._bound.runners[0].runtime

    def explain(self) -> str:
        """Describe each fused region in a line: the kernel that runs it, or ATen and why."""
        return "\n".join(runner.explain() for runner in self._bound.runners)


def _loss_scale(given: Any, device: torch.device) -> float | Tensor:
    """Return a loss scale as a number or a scalar tensor; a GradScaler's `scale` gives its own."""
    if isinstance(given, torch.amp.GradScaler):
        return given.scale(torch.ones((), device=device))
    return 1.0 if given is None else given


def _built(bound: BoundProgram, outputs: dict[str, Any]) -> Any:
    """Build the model's return value from the outputs by name."""
    if bound.returned is not None:
        return bound.returned.build(outputs)
    return next(iter(outputs.values())) if len(outputs) == 1 else tuple(outputs.values())


def _check_no_options(options: Mapping[str, Any]) -> None:
    """Raises ValueError if a call has options, which need backward="in_call"."""
    if options:
        raise ValueError(
            f"{', '.join(options)}: with gradients computed in backward(), the call takes no "
            "such options; scale the loss, and call the step for each micro-batch, or compile "
            'with backward="in_call".'
        )
