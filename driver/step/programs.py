"""The programs of a step: compiled when a call first needs them, and kept while they are used."""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardweave.backends.distributed.distributed import DistributedBackend
from shardweave.backends.distributed.pipeline import holders_of
from shardweave.backends.distributed.runtime import Runtime
from shardweave.backends.programs import Key
from shardweave.backends.reference.virtual import VirtualBackend
from shardweave.backends.step.backend import Backend
from shardweave.backends.step.bound import BoundProgram
from shardweave.backends.step.step_call import StepCall
from shardweave.backends.step.step_programs import OPTIONS, GivenProgram, Programs
from shardweave.backends.watch import watchdog
from shardweave.driver.processes import world
from shardweave.driver.step.binding import Binding
from shardweave.driver.step.lowering import Lowered, compile_call
from shardweave.driver.step.model.original import Original
from shardweave.driver.step.model.settings import Settings, Snapshot, changes
from shardweave.driver.step.precision import AUTOCAST, inputs_in_precision
from shardweave.driver.step.request import Request
from shardweave.ir.capture.arguments import Form, taken_apart
from shardweave.ir.dialects.types import form_of
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.notes import warn
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import is_staged
from shardweave.passes.notes import PlanNote

MAX_PROGRAMS = 16
"""Programs that a step keeps: modes, times the shapes that come again, such as a last batch's."""

log = logging.getLogger("shardweave")


@dataclass(eq=False)
class _Kept:
    """A program, the call that it was made for, and the settings with which it was captured.

    unread: settings that were changed and did not change it.
    """

    call: StepCall
    bound: BoundProgram
    settings: Snapshot
    unread: frozenset[str] = frozenset()


class CompiledPrograms(Programs):
    """Programs of a model by the form, shapes and modes of calls, all on the same tensors.

    limit: how many are kept; the one that was not used for longest goes first. dynamic: whether
    calls may have other shapes than those that were compiled ahead. Making one is collective.
    A program is made anew where a setting of the model was changed since, and it reads that.
    """

    def __init__(
        self,
        request: Request,
        device: torch.device,
        *,
        limit: int = MAX_PROGRAMS,
        dynamic: bool = True,
    ) -> None:
        self.request = request
        self.limit = limit
        self.dynamic = dynamic
        # A given program names its inputs after the example's positions.
        self.binding = Binding(request.model, len(request.args) if request.program else 0)
        self.settings = Settings(request.model, request.loss)
        self.options = frozenset(OPTIONS).difference(self.binding.names)
        self.autocast = AUTOCAST[request.precision]
        self.seed = world.from_rank_0(partial(seed_of, request.seed))
        self._torch_seed = torch.initial_seed() if request.seed is None else None
        self.original: Original | None = None
        """What looks at the model, once there is a step of it."""
        self.notes: list[str] = []
        self._kept: OrderedDict[Any, _Kept] = OrderedDict()
        self._dropped: set[Any] = set()
        call = self._example()
        lowered = self._lower(call, None)
        self.plan = lowered.plan
        if lowered.plan is not None:
            self.request = request = request.with_plan(lowered.plan)
        self.backend = backend_of(request, lowered.program, device)
        self.first = self._keep(call, lowered)
        self._first_call = call
        self._ahead = {self._shape_key(call)}
        self._forms = parameter_forms(request.model)

    def _example(self) -> StepCall:
        """The call that the request's inputs stand for, in the modes of the model."""
        request = self.request
        form, inputs = self.taken_apart(request.args, request.kwargs)
        modes = [m.training for m in request.model.modules()]
        if request.train is not None:
            modes = [request.train] * len(modes)
        trained = tuple(p.requires_grad for p in request.model.parameters())
        return StepCall(form, inputs, modes[0], tuple(modes), trained, self.autocast)

    def taken_apart(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_whole: bool = True
    ) -> tuple[Form, dict[str, Tensor]]:
        form, inputs = taken_apart(*self.binding.bound(args, kwargs, is_whole=is_whole))
        # A batch of rows is put together of the tensors that are given.
        return form, inputs_in_precision(inputs, self.request.precision) if is_whole else inputs

    def input_name(self, name: str) -> str:
        return self.binding.input_name(name)

    def names(self) -> list[str]:
        return list(dict.fromkeys([*self.binding.names, *self.first.inputs]))

    def kept(self) -> list[tuple[str, BoundProgram]]:
        return [
            (f"{kept.call.mode}, {kept.call.shapes_text}", kept.bound)
            for kept in self._kept.values()
        ]

    # Finding

    def find(self, call: StepCall) -> BoundProgram:
        if self.original is not None:
            self.original.check(call)
        bound = self._found(call)
        if bound.draws and self._torch_seed is not None:
            self._check_seed()
        return bound

    def _check_seed(self) -> None:
        """Warn, once, if torch was given another seed than the step has taken of it."""
        if torch.initial_seed() != self._torch_seed:
            self._torch_seed = None
            if world.rank() == 0:
                warn(
                    "torch.manual_seed has no effect on a step after sw.compile: what it draws "
                    "goes on from its own seed, and where it was (step.random_state). Leave it "
                    "out, or give the seed to sw.compile(.., seed=..)",
                    UserWarning,
                )

    def _found(self, call: StepCall) -> BoundProgram:
        if self.request.program is not None:
            return GivenProgram(self.first, self.seed).find(call)
        key = call.key
        kept = self._kept.get(key)
        if kept is None:
            self._check_allowed(call)
            return self._compile(call)
        self._kept.move_to_end(key)
        now = self.settings.now()
        if kept.settings.is_same(now):
            return kept.bound
        changed = changes(kept.settings, now)
        why = [f"{place} {how}" for place, how in changed.items() if place not in kept.unread]
        if not why:
            kept.settings = now
            return kept.bound
        return self._compile_anew(call, kept, changed, ", ".join(why))

    def _compile_anew(
        self, call: StepCall, kept: _Kept, changed: Mapping[str, str], why: str
    ) -> BoundProgram:
        """The program of a call after settings were changed. Where it turns out not to read them,
        it stays, and they are not looked at again for it."""
        self._check_allowed(call)
        bound = self._compile(call, why)
        if str(kept.bound.program) == str(bound.program):
            new = self._kept[call.key]
            new.bound, new.unread = kept.bound, kept.unread | changed.keys()
        return self._kept[call.key].bound

    def compile_ahead(self, call: StepCall) -> BoundProgram:
        """The program of a call that is to come; its shapes are allowed from now on."""
        self._ahead.add(self._shape_key(call))
        return self._found(call)

    def _shape_key(self, call: StepCall) -> Any:
        return call.form, tuple((t.shape, t.dtype) for t in call.inputs.values())

    def _check_allowed(self, call: StepCall) -> None:
        if not self.dynamic and self._shape_key(call) not in self._ahead:
            raise ValueError(
                f"the step was compiled for {self._first_call.shapes_text} with dynamic=False; "
                f"this call is of {call.shapes_text}. Compile it ahead (step.compile_for), or "
                "leave dynamic=False out."
            )

    def _compile(self, call: StepCall, why: str = "") -> BoundProgram:
        start_s = time.perf_counter()
        last = next(reversed(self._kept.values())).call
        why = why or difference(last, call)
        if call.key in self._dropped:
            why += (
                f". It was compiled before, and dropped: the last {self.limit} programs are kept; "
                "pad batches to fewer shapes, or raise max_programs"
            )
        lowered = self._lower(call, self.stored)
        bound = self._keep(call, lowered)
        wrong = [key for key, s in bound.state_shardings.items() if s != self.stored[key]]
        assert not wrong, f"{wrong[0]} is not read in the shards in which it is stored"
        if world.rank() == 0:
            took_s = time.perf_counter() - start_s
            say(f"shardweave: compiled a program for {call.mode} in {took_s:.1f} s: {why}")
        return bound

    def _lower(self, call: StepCall, stored: Mapping[Key, Sharding] | None) -> Lowered:
        """The program of a call, compiled on rank 0 for all. Collective, and it warns."""
        request = self.request
        if stored is not None:
            self._check_parameters()
        is_shared = request.backend != "reference"
        if is_shared:
            watchdog.meet("the call", str(call))
        given = None if stored is None else (self.plan, stored, self.row_axes(""))
        with in_modes(request.model, call), _explaining_empty_inputs(call):
            lowered = compile_call(request, call, given)
        if not call.grad and stored is None and request.train is None:
            lowered = lowered.with_warning(_EVALUATION)
        if call.grad and not any([*call.trained, *(t.requires_grad for t in call.inputs.values())]):
            lowered = lowered.with_warning(_FROZEN)
        self._note(lowered)
        return lowered

    def _check_parameters(self) -> None:
        """Raises ValueError if the model, which programs are captured of, has other parameters."""
        now = parameter_forms(self.request.model)
        names = [name for name in {**self._forms, **now} if self._forms.get(name) != now.get(name)]
        if names:
            before, form = (forms.get(names[0], "none") for forms in (self._forms, now))
            raise ValueError(
                f"parameter '{names[0]}' of the model is {form}, and was {before} in sw.compile: "
                "no other program can be captured for the step. Bring it back, or compile the "
                "model anew."
            )

    def _note(self, lowered: Lowered) -> None:
        """Keep what is new among the notes, and warn of what was not done."""
        for note in lowered.notes:
            if note not in self.notes:
                self.notes.append(note)
                if note in lowered.warnings and world.rank() == 0:
                    warn(note, PlanNote)

    def _keep(self, call: StepCall, lowered: Lowered) -> BoundProgram:
        bound = BoundProgram(lowered.program, self.backend, lowered.returned)
        self.settings.look()
        self.notes += [note for note in self.settings.beyond if note not in self.notes]
        self._kept[call.key] = _Kept(call, bound, self.settings.now())
        if len(self._kept) > self.limit:
            self._dropped.add(self._kept.popitem(last=False)[0])
        return bound


def parameter_forms(model: nn.Module) -> dict[str, str]:
    """Shape and dtype of each parameter, of tied ones under the first name."""
    return {name: form_of(parameter) for name, parameter in model.named_parameters()}


def seed_of(seed: int | None) -> int:
    """The seed of a step: the given one, or torch's."""
    return (torch.initial_seed() if seed is None else seed) & (2**63 - 1)


_EVALUATION = (
    "the model is in evaluation mode, so that the step computes no gradients and has no effect on "
    "parameters; call step.train() to train, or pass train=False to say that this is wanted"
)


_FROZEN = (
    "a call in training mode computes no gradients: no parameter of the step requires one, nor an "
    "input; call step.requires_grad_(), or step.eval() if this is wanted"
)


@contextmanager
def in_modes(model: nn.Module, call: StepCall) -> Iterator[None]:
    """Meanwhile a model has the modes of a call, and its parameters require gradients as there."""
    modules, parameters = list(model.modules()), list(model.parameters())
    before = [m.training for m in modules], [p.requires_grad for p in parameters]
    try:
        _set_modes(modules, parameters, call.modes, call.trained)
        yield
    finally:
        _set_modes(modules, parameters, *before)


@contextmanager
def _explaining_empty_inputs(call: StepCall) -> Iterator[None]:
    """Say of what cannot be compiled that an input has no elements, if so."""
    try:
        yield
    except ValueError as error:
        empty = [name for name, tensor in call.inputs.items() if not tensor.numel()]
        if not empty:
            raise
        raise ValueError(
            f"input '{empty[0]}' of {form_of(call.inputs[empty[0]])} has no elements, and there is "
            f"no program for such a batch; leave it out ({error})"
        ) from error


def _set_modes(
    modules: Sequence[nn.Module],
    parameters: Sequence[Tensor],
    modes: Sequence[bool],
    trained: Sequence[bool],
) -> None:
    for module, mode in zip(modules, modes, strict=True):
        module.training = mode
    for parameter, is_trained in zip(parameters, trained, strict=True):
        if parameter.requires_grad != is_trained:
            parameter.requires_grad_(is_trained)


def backend_of(request: Request, program: Program, device: torch.device) -> Backend:
    """The backend of a request for its program. Collective."""
    if request.backend == "reference":
        return VirtualBackend()
    mesh = program.mesh if program.is_local else None
    runtime = Runtime(mesh, device, program.devices)
    kernels = request.backend == "triton"
    holders = holders_of(program) if is_staged(program) else None
    return DistributedBackend(
        runtime, kernels=kernels, cuda_graph=request.cuda_graph, holders=holders
    )


# Words


def say(text: str) -> None:
    """Tell the user: to the logger "shardweave", or on standard error where nobody logs."""
    if log.hasHandlers():
        log.info(text)
    else:
        print(text, file=sys.stderr)


def difference(before: StepCall, call: StepCall) -> str:
    """What is new in a call."""
    if before.form != call.form:
        return f"its arguments are {call.form}, those before were {before.form}"
    found = [
        f"{name} is {form_of(tensor)}, was {form_of(before.inputs[name])}"
        for name, tensor in call.inputs.items()
        if form_of(tensor) != form_of(before.inputs[name])
    ]
    if found:
        return ", ".join(found)
    if before.mode != call.mode or before.modes != call.modes:
        return f"the first call in this mode with {call.shapes_text}"
    return "other parameters or inputs require gradients"
