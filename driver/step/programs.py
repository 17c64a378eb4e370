"""The programs of a step: compiled when a call first needs them, and kept while they are used."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardweave.backends.batch.replicas import ADVICE
from shardweave.backends.batch.rows import LocalRows, axes_of_rows
from shardweave.backends.distributed.distributed import DistributedBackend
from shardweave.backends.step.autograd import check_required
from shardweave.backends.step.bound import BoundProgram
from shardweave.backends.step.compiled_module import as_written
from shardweave.backends.step.step_call import AUTOGRAD, StepCall
from shardweave.driver.processes import world
from shardweave.driver.step.binding import Binding, gives_rows
from shardweave.driver.step.lowering import (
    Lowered,
    Stored,
    capture_call,
    lower,
    made_here,
    on_rank_0,
)
from shardweave.driver.step.precision import AUTOCAST, inputs_in_precision
from shardweave.driver.step.request import Request
from shardweave.driver.step.settings import ABSENT, Settings, Snapshot, changes
from shardweave.ir.capture.arguments import Form, taken_apart
from shardweave.ir.capture.outputs import chosen_loss
from shardweave.ir.dialects.types import form_of
from shardweave.ir.inspect.stats import stats
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.notes import say, warn
from shardweave.ir.program.staged import ops_of_parts
from shardweave.passes.notes import PlanNote
from shardweave.planners.cost.quantity import bytes_text
from shardweave.planners.lowering.other_shapes import fit_plan

OPTIONS = ("accumulate", "loss_scale")
"""Arguments of a call that the step takes, unless the model's forward has one of the same name."""


@dataclass(frozen=True, eq=False)
class _Kept:
    """A program, the call that it was made for, and the settings with which it was captured.

    unread: settings known not to affect the program: it stayed equal when they changed.
    """

    call: StepCall
    bound: BoundProgram
    settings: Snapshot
    unread: frozenset[str] = frozenset()


class CompiledPrograms:
    """Cache of a model's programs by the form, shapes and modes of calls, all on the same tensors.

    Evicts the least recently used program. Compiling is collective. A program is compiled again if
    a setting of the model that it depends on has changed.

    call, lowered, first: the example's call, and its program as lowered and as loaded, by whose
    shardings parameters are sharded. kept: calls and their programs to start with; by default the
    example's alone.
    """

    def __init__(
        self,
        request: Request,
        call: StepCall,
        lowered: Lowered,
        first: BoundProgram,
        seed: int,
        kept: Sequence[tuple[StepCall, BoundProgram]] | None = None,
    ) -> None:
        self.request = request
        self.plan = lowered.plan
        self.lowered = lowered
        self.first = first
        self.seed = seed
        self.autocast = AUTOCAST.get(request.precision)
        """Dtype of autocast for calls outside of torch.autocast."""
        self.full_outputs = request.outputs == "full" or (
            request.outputs is None and request.backward == AUTOGRAD and not first.takes_loss
        )
        self.rows: LocalRows | None = None
        """Joins the rows of all ranks, if each rank gives its own."""
        self.own_rows = False
        """True if each rank gets only its rows of outputs."""
        if gives_rows(request):
            cut = self.row_axes("")
            assert isinstance(first.backend, DistributedBackend)
            runtime = first.backend.runtime
            self.rows = LocalRows(runtime, axes_of_rows(runtime.mesh, cut), call.inputs)
            self.own_rows = request.outputs is None
        self._binding = Binding(request.model)
        self.options = frozenset(OPTIONS).difference(self._binding.names)
        self._torch_seed = torch.initial_seed() if request.seed is None else None
        self.notes: list[str] = []
        self._note(lowered)
        self._settings = Settings(request.model, request.loss)
        kept, now = [(call, first)] if kept is None else kept, self._settings.now()
        self._kept = OrderedDict((of.key, [_Kept(of, bound, now)]) for of, bound in kept)
        """By key of a call, its programs, one per setting of the model; the last was used last."""
        self._dropped: set[Any] = set()
        self._first_call = call
        self._ahead = {self._shape_key(call)}
        self._forms = parameter_forms(request.model)

    def in_eager(self, call: StepCall, inputs: Mapping[str, Tensor]) -> Any:
        """Run the model's own code eagerly, with these inputs."""
        choice = self.request.loss
        args, kwargs = call.form.arguments(tuple(inputs.values()))
        output = self.written(args, kwargs, call.autocast)
        if callable(choice):
            output = choice(output), output
        is_alone = self.request.only_loss and call.grad
        return chosen_loss(output, choice) if is_alone else output

    def written(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], autocast: torch.dtype | None
    ) -> Any:
        """Run the model's own code eagerly, with any arguments."""
        cast = autocast or torch.get_default_dtype()
        kind = self.first.backend.device.type
        with (
            as_written(self.request.model),
            torch.autocast(kind, cast, enabled=autocast is not None),
        ):
            return self.request.model(*args, **kwargs)

    def copied(self, model: nn.Module) -> CompiledPrograms:
        """Return the programs for a deep copy of the model; they share those compiled so far."""
        now = self._settings.now()
        last = [programs[-1] for programs in self._kept.values()]
        kept = [(each.call, each.bound) for each in last if each.settings.is_same(now)]
        request = replace(self.request, model=model)
        first = self._first_call, self.lowered, self.first
        return CompiledPrograms(request, *first, self.seed, kept)

    def taken_apart(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_whole: bool = True
    ) -> tuple[Form, dict[str, Tensor]]:
        """Split arguments into their form and tensors by name. is_whole: refuse missing ones."""
        form, inputs = taken_apart(*self._binding.bound(args, kwargs, is_whole=is_whole))
        # A batch of rows is put together of the tensors that are given.
        return form, inputs_in_precision(inputs, self.request.precision) if is_whole else inputs

    def names(self) -> list[str]:
        """Return the names of the inputs in the model's forward."""
        return list(dict.fromkeys([*self._binding.names, *self.first.inputs]))

    def kept(self) -> list[tuple[str, BoundProgram]]:
        """Return the programs, each with a text that says which calls it runs."""
        return [
            (f"{kept.call.mode}, {kept.call.shapes_text}", kept.bound)
            for programs in self._kept.values()
            for kept in programs
        ]

    def joined(self, call: StepCall) -> StepCall:
        """Make the call of the global batch from a call with this rank's rows. Collective."""
        return call if self.rows is None else self.rows.joined(call)

    @property
    def advice(self) -> str:
        """Advice for ranks that give different inputs."""
        return ADVICE if self.rows is None else self.rows.advice

    def row_axes(self, name: str) -> tuple[str, ...]:
        """Return the mesh axes that shard dim 0 of an input, given its name in programs. For an
        input that the first program lacks, these are the axes of all its inputs."""
        inputs = {n: s for (kind, n), s in self.first.shardings.items() if kind == "input"}
        chosen = [inputs[name]] if name in inputs else list(inputs.values())
        return tuple(dict.fromkeys(p.axis for s in chosen if s.dims for p in s.dims[0]))

    def say_rows(self) -> None:
        """Tell the user that inputs, equal on all ranks, were taken for the global batch."""
        mesh = self.first.program.mesh
        if self.request.batch is None and mesh and axes_of_rows(mesh) and world.rank() == 0:
            say(
                "shardweave: all ranks pass the same rows, which the step takes as the global "
                'batch (batch="global"); if each rank reads its own rows, compile with '
                'batch="local"'
            )

    # Finding

    def find(self, call: StepCall, stored: Stored) -> BoundProgram:
        """Return the program that runs a call, compiled now if there is none yet. Collective."""
        bound = self._found(call, stored)
        if bound.draws and self._torch_seed is not None:
            self._check_seed()
        return bound

    def _check_seed(self) -> None:
        """Warn, once, if torch's seed was set after the step took its own seed from it."""
        if torch.initial_seed() != self._torch_seed:
            self._torch_seed = None
            if world.rank() == 0:
                warn(
                    "torch.manual_seed has no effect on a step after sw.compile, which draws "
                    "from a seed and state of its own (step.random_state). Leave it out, or give "
                    "the seed to sw.compile(.., seed=..)",
                    UserWarning,
                )

    def _found(self, call: StepCall, stored: Stored) -> BoundProgram:
        if self.request.program is not None:
            _check_given(self.first, call)
            return self.first
        programs = self._kept.get(call.key)
        if programs is None:
            self._check_allowed(call)
            return self._compile(call, stored)
        self._kept.move_to_end(call.key)
        last, now = programs[-1], self._settings.now()
        if last.settings.is_same(now):
            return last.bound
        for kept in reversed(programs):
            if not changes(kept.settings, now).keys() - kept.unread:
                programs.remove(kept)
                programs.append(replace(kept, settings=now))
                return kept.bound
        self._check_allowed(call)
        made = made_here(self.request, call, partial(self._lowered, call=call, stored=stored))
        changed = changes(last.settings, now)
        if str(made.program) != str(last.bound.program):
            why = [f"{place} {how}" for place, how in changed.items() if place not in last.unread]
            return self._compile(call, stored, ", ".join(why), lambda: made)
        # The program does not depend on the changed settings, perhaps on this rank alone: it is
        # kept, and these are ignored for it from now on. An attribute that hides the class's may
        # have the same value.
        old, new = last.settings.by_place(), now.by_place()
        unread = last.unread.union(p for p in changed if ABSENT not in (old[p], new[p]))
        self._settings.look()
        programs[-1] = replace(last, settings=self._settings.now(), unread=unread)
        return last.bound

    def compile_ahead(self, call: StepCall, stored: Stored) -> BoundProgram:
        """Call `find` for a call that will be made later; with dynamic=False, allow its shapes."""
        self._ahead.add(self._shape_key(call))
        return self._found(call, stored)

    def forget(self) -> None:
        """Drop the compiled programs. Raises ValueError if the step runs a given program."""
        if self.request.program is not None:
            raise ValueError(
                "the model runs the program given to sw.compile, which recompile() cannot "
                "compile anew; remove the call, or compile without `program`."
            )
        self._kept.clear()

    def _shape_key(self, call: StepCall) -> Any:
        return call.form, tuple((t.shape, t.dtype) for t in call.inputs.values())

    def _check_allowed(self, call: StepCall) -> None:
        if not self.request.dynamic and self._shape_key(call) not in self._ahead:
            raise ValueError(
                f"the step was compiled with dynamic=False for {self._first_call.shapes_text}, "
                f"but this call has {call.shapes_text}. Compile for these shapes before "
                "(step.compile_for), or leave dynamic=False out."
            )

    def _compile(
        self,
        call: StepCall,
        stored: Stored,
        why: str = "",
        made: Callable[[], Lowered] | None = None,
    ) -> BoundProgram:
        """Compile a call's program and keep it. Collective. made: lowers it on this rank."""
        start_s = time.perf_counter()
        last = next(reversed(self._kept.values()), None)
        why = why or (difference(last[-1].call, call) if last else "asked for by recompile()")
        if call.key in self._dropped:
            why += (
                ". It was compiled before, and dropped: the last "
                f"{self.request.max_programs} programs are kept; pad batches to fewer shapes, or "
                "raise max_programs"
            )
        self._check_parameters()
        make = partial(self._lowered, call=call, stored=stored)
        lowered = on_rank_0(
            self.request, call, made or partial(made_here, self.request, call, make), why
        )
        self._note(lowered)
        if lowered.constants:
            raise ValueError(
                "this call reads a constant tensor that the example's call did not read, "
                f"'{next(iter(lowered.constants))}'; register it as a buffer in __init__ "
                "(self.register_buffer(.., persistent=False)), and compile the model again."
            )
        is_split = self.request.backward == AUTOGRAD and call.grad
        bound = BoundProgram(
            lowered.program, self.first.backend, lowered.returned, is_split=is_split
        )
        self._keep(call, bound)
        wrong = [key for key, s in bound.state_shardings.items() if s != stored[key]]
        if wrong and wrong[0] not in self.first.slots:
            raise ValueError(
                f"this call needs '{wrong[0][1]}' in another sharding than it is stored in, "
                "since the example given to sw.compile does not use it. Give sw.compile an "
                "example that uses every parameter."
            )
        assert not wrong, f"{wrong[0]} is read in another sharding than it is stored in"
        if world.rank() == 0:
            took_s = time.perf_counter() - start_s
            say(f"shardweave: compiled a program for {call.mode} in {took_s:.1f} s: {why}")
        return bound

    def _lowered(self, request: Request, call: StepCall, stored: Stored) -> Lowered:
        """Capture a call and lower it by the step's plan, fitted to the call. On rank 0."""
        captured = capture_call(request, call)
        if self.plan is None:
            return lower(request, call, captured, None, stored=stored)
        mesh = request.devices.refined(self.plan.mesh)
        fitted = fit_plan(self.plan, captured.program, mesh, stored, self.row_axes(""))
        return lower(request, call, captured, fitted.plan, stored=stored, warnings=fitted.notes)

    def _check_parameters(self) -> None:
        """Raise ValueError if parameters of the model were added, removed or changed in shape."""
        now = parameter_forms(self.request.model)
        names = [name for name in {**self._forms, **now} if self._forms.get(name) != now.get(name)]
        if names:
            before, form = (forms.get(names[0], "none") for forms in (self._forms, now))
            raise ValueError(
                f"parameter '{names[0]}' of the model is now {form}, but was {before} in "
                "sw.compile, so that no further program can be compiled. Restore it, or compile "
                "the model again."
            )

    def _note(self, lowered: Lowered) -> None:
        """Keep the new notes, and warn of requests that were not met."""
        for note in lowered.notes:
            if note not in self.notes:
                self.notes.append(note)
                if note in lowered.warnings and world.rank() == 0:
                    warn(note, PlanNote)

    def _keep(self, call: StepCall, bound: BoundProgram) -> None:
        self._settings.look()
        programs = self._kept.setdefault(call.key, [])
        programs.append(_Kept(call, bound, self._settings.now()))
        if sum(map(len, self._kept.values())) <= self.request.max_programs:
            return
        if len(programs) > 1:
            del programs[0]
        else:
            self._dropped.add(self._kept.popitem(last=False)[0])


def _check_given(bound: BoundProgram, call: StepCall) -> None:
    """Raises ValueError for a call that a given program does not run."""
    bound.check_batch(call.inputs)
    if call.autocast is not None:
        raise ValueError(
            "the model runs the program given to sw.compile, whose dtypes torch.autocast cannot "
            "change; call the step outside torch.autocast, or compile without `program`."
        )
    if bound.has_gradients:
        if not call.grad:
            raise ValueError(
                "the model runs the program given to sw.compile, which always computes gradients "
                "and updates buffers; to evaluate, compile a program captured with train=False, "
                "or compile without `program`."
            )
        check_required(bound.program.results, call.inputs)


def parameter_forms(model: nn.Module) -> dict[str, str]:
    """Shape and dtype of each parameter, by name; tied parameters appear under the first name."""
    return {name: form_of(parameter) for name, parameter in model.named_parameters()}


def seed_of(seed: int | None) -> int:
    """The seed of a step: the given one, or torch's."""
    return (torch.initial_seed() if seed is None else seed) & (2**63 - 1)


# Words


def difference(before: StepCall, call: StepCall) -> str:
    """Describe how a call differs from the call `before`."""
    if before.form != call.form:
        return f"its arguments are {call.form}, those before were {before.form}"
    forms = [
        f"{name} is {form_of(tensor)}, was {form_of(before.inputs[name])}"
        for name, tensor in call.inputs.items()
        if form_of(tensor) != form_of(before.inputs[name])
    ]
    if forms:
        return ", ".join(forms)
    if before.mode != call.mode or before.modes != call.modes:
        return f"the first call in this mode with {call.shapes_text}"
    if before.tangents != call.tangents:
        return "backward() got gradients of other outputs"
    return "other parameters or inputs require gradients"


def summary_of(
    mesh: Mesh,
    parameters: Iterable[Tensor],
    programs: Sequence[tuple[str, BoundProgram]],
    notes: Sequence[str],
) -> str:
    """Describe the mesh, the bytes of parameters, each program's collectives, and the notes."""
    tensors = list(parameters)
    whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    here = sum(
        tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes
        for tensor in tensors
    )
    lines = [
        f"mesh {mesh}" if mesh.axes else "one device",
        f"{len(tensors)} parameters of {bytes_text(whole)}, {bytes_text(here)} in this process",
    ]
    for what, bound in programs:
        collectives = stats(bound.program).collectives
        sent = [f"{c.count} {c.kind} over {', '.join(c.axes)} ({c.phase})" for c in collectives]
        num_ops = sum(1 for _ in ops_of_parts(bound.program))
        lines.append(f"{what}: {num_ops} ops; {'; '.join(sent) or 'no collectives'}")
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])
