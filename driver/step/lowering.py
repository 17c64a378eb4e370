"""From a model and a call of it to the program of each rank: capture, plan, passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardweave.backends.programs import Key
from shardweave.backends.step.bound import device_of
from shardweave.backends.step.step_call import StepCall
from shardweave.driver.processes import world
from shardweave.driver.step.lowering_notes import idle_axes, undivided, unread, without_rules
from shardweave.driver.step.plan_choice import choose_plan
from shardweave.driver.step.precision import in_precision
from shardweave.driver.step.request import Request
from shardweave.ir.capture.arguments import taken_apart
from shardweave.ir.capture.outputs import Outputs
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program
from shardweave.ir.program.text import print_module
from shardweave.ir.sharding.padding import notes_on_padding
from shardweave.ir.verify.program import check
from shardweave.passes.kernels.unfuse_kernels import has_regions
from shardweave.passes.notes import unheard
from shardweave.passes.observers import Observer
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.passes.stages.batches import JoinedMicroBatches
from shardweave.planners.lowering.other_shapes import fit_plan, in_one_micro_batch
from shardweave.planners.lowering.partition import partition
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Predicted
from shardweave.planners.registry import PLANNERS

if TYPE_CHECKING:
    from shardweave.ir.capture.capture import Captured

Given = tuple[Plan | None, Mapping[Key, Sharding], Sequence[str]]
"""A plan that is followed already, how parameters and buffers are stored, and the batch's axes."""


@dataclass(frozen=True)
class Making:
    """How a program was made: seconds, ops before the passes, the plan's notes, and what it
    predicts."""

    capture_s: float
    passes_s: float
    num_captured_ops: int
    notes: tuple[str, ...]
    predicted: Predicted | None = None


@dataclass(frozen=True)
class Lowered:
    """The program of each rank for a call, the plan that it follows, and what there is to say.

    warnings: of the notes those on what was asked for and not done. returned: how what the model
    returns is made of the outputs.
    """

    program: Program
    plan: Plan | None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    returned: Outputs | None = None

    def with_warning(self, text: str) -> Lowered:
        """The same, with one more thing to warn of."""
        return replace(self, notes=(*self.notes, text), warnings=(*self.warnings, text))


def compile_program(request: Request) -> tuple[Program, Making]:
    """Capture, plan and partition a step with its loss alone, on rank 0, for every rank."""

    def make() -> tuple[Program, Making]:
        if request.program is not None:
            return _given_program(request.program, request)
        start_s = time.perf_counter()
        program = capture_request(request)
        captured_s = time.perf_counter()
        plan = choose_plan(program, request)
        inputs = taken_apart(request.args, request.kwargs)[1]
        local, notes, joined = _in_micro_batches(program, plan, request, inputs)
        planned = () if plan is None else plan.notes
        making = Making(
            capture_s=captured_s - start_s,
            passes_s=time.perf_counter() - captured_s,
            num_captured_ops=sum(1 for _ in program.ops),
            notes=(
                *planned,
                *joined,
                *idle_axes(local, planned),
                *undivided(local, plan),
                *without_rules(program, local),
                *notes_on_padding(local),
                *notes,
            ),
            predicted=None if plan is None else plan.predicted,
        )
        return local, making

    return _from_rank_0(request, make)


def compile_call(request: Request, call: StepCall, given: Given | None) -> Lowered:
    """The program of a call in the modes that the model is in, compiled on rank 0 for every rank.

    given: what a step follows already, None for the first program. Collective; for the backend
    "reference" each process is on its own.
    """

    def make() -> tuple[Program, Lowered]:
        # What passes have to say is said of the program of the example.
        with unheard() if given is not None else nullcontext():
            # Cast anew each time: what is set on the model is to be seen in its copy.
            model = in_precision(request.model, request.precision)
            lowered = _lowered(replace(request, model=model), call, given)
        return lowered.program, lowered

    program, lowered = _from_rank_0(request, make)
    return replace(lowered, program=program)


def _from_rank_0(request: Request, make: Callable[[], tuple[Program, Any]]) -> tuple[Program, Any]:
    """A program and what else is made of it on rank 0, on every rank.

    So all ranks run the same program, whatever differs between their machines.
    """
    if request.backend == "reference":
        return make()
    own: list[Program] = []

    def made() -> tuple[str, Any]:
        program, rest = make()
        own.append(program)
        if isinstance(rest, Lowered):
            rest = replace(rest, program=_EMPTY)
        # Not the program itself: pickle would recurse along the chain of its ops.
        return print_module(program.module, locations=True), rest

    text, rest = world.from_rank_0(made)
    return own[0] if own else Program.parse(text, "<the program of rank 0>"), rest


_EMPTY: Any = None
"""In place of a program that travels as text."""


def _lowered(request: Request, call: StepCall, given: Given | None) -> Lowered:
    if request.program is not None:
        program, _ = _given_program(request.program, request)
        return Lowered(program, None)
    tensors = [_example_of(tensor, request.model) for tensor in call.inputs.values()]
    captured = _captured(request, call, tensors)
    program = captured.program
    buffers: dict[str, Sharding] = {}
    warnings = unread(program)
    notes: list[str] = []
    if given is None:
        plan = choose_plan(program, request)
        if plan is not None:
            notes += plan.notes
            request = request.with_plan(plan)
        # Who gives a plan, or its file, knows what it leaves whole.
        is_made_here = request.plan in (None, *PLANNERS) or isinstance(request.plan, Mapping)
        warnings += plan.undone if plan is not None and is_made_here else []
    else:
        plan, stored, batch_axes = given
        buffers = {name: s for (kind, name), s in stored.items() if kind == "buffer"}
        if plan is not None:
            fitted = fit_plan(plan, program, request.mesh.refined(plan.mesh), stored, batch_axes)
            plan = fitted.plan
            warnings += fitted.notes
    inputs = dict(zip(call.form.names, tensors, strict=True))
    local, validated, joined = _in_micro_batches(program, plan, request, inputs, buffers)
    warnings += joined
    if given is None:
        warnings += [*idle_axes(local, notes), *undivided(local, plan)]
    warnings += without_rules(program, local)
    everything = dict.fromkeys((*notes, *warnings, *notes_on_padding(local), *validated))
    return Lowered(local, plan, tuple(everything), tuple(warnings), captured.returned)


def _captured(request: Request, call: StepCall, tensors: Sequence[torch.Tensor]) -> Captured:
    """The global program of a call."""
    # Takes a second to import, which the ranks other than 0 need not spend.
    from shardweave.ir.capture.capture import capture_step
    from shardweave.ir.capture.trace import Kind

    device = device_of(request.model).type
    # Models on the meta device are traced as on the CPU.
    autocast = call.autocast and ("cpu" if device == "meta" else device, call.autocast)
    kind = Kind(
        grad=call.grad,
        loss=request.loss,
        all_outputs=True,
        only_loss=request.only_loss,
        autocast=autocast,
    )
    return capture_step(request.model, call.form, tensors, kind)


def _example_of(tensor: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """A tensor of the global shape of an input, where the model is."""
    device = device_of(model)
    if type(tensor) is torch.Tensor and device in (tensor.device, torch.device("meta")):
        return tensor
    example = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return example.requires_grad_(tensor.requires_grad)


def _in_micro_batches(
    program: Program,
    plan: Plan | None,
    request: Request,
    inputs: Mapping[str, torch.Tensor],
    buffers: Mapping[str, Sharding] | None = None,
) -> tuple[Program, tuple[str, ...], tuple[str, ...]]:
    """As `_partitioned`, and a warning if the plan's micro-batches cannot run one by one.

    The program then has one of all rows. The plan stays as it is, for inputs that divide.
    """
    try:
        return *_partitioned(program, plan, request, inputs, buffers), ()
    except PassError as error:
        joined = error.__cause__
        if plan is None or not isinstance(joined, JoinedMicroBatches):
            raise
        warning = f"these inputs run as one micro-batch: {joined.reason}"
        shortened = in_one_micro_batch(plan, request.mesh.refined(plan.mesh))
        return *_partitioned(program, shortened, request, inputs, buffers), (warning,)


def _partitioned(
    program: Program,
    plan: Plan | None,
    request: Request,
    inputs: Mapping[str, torch.Tensor],
    buffers: Mapping[str, Sharding] | None = None,
) -> tuple[Program, tuple[str, ...]]:
    """The local program, and notes on what of the plan had no effect and how it was validated."""
    observer = None
    notes: list[str] = []
    if request.validate:
        observer, note = _validator(program, request, inputs)
        notes.append(note)
    local = partition(
        program, request.mesh, plan, request.passes, observer, buffers, tell=notes.append
    )
    if request.backend == "triton" and not has_regions(local):
        with unheard():
            local = run_passes(local, "preset:kernels")
    if request.prove:
        notes.append(_proof_of(local, program))
    return local, tuple(notes)


def _proof_of(local: Program, program: Program) -> str:
    """A note that a local program is proved to compute a captured one. Raises ProofError."""
    from shardweave.ir.proof.prove import prove

    proof = prove(local, against=program)
    return f"the {proof.num_ops} ops of each rank are proved to compute the model's results"


def _validator(
    program: Program, request: Request, inputs: Mapping[str, torch.Tensor]
) -> tuple[Observer | None, str]:
    """What validates the passes of a request, None if a twin did, and a note that says it."""
    from shardweave.driver.checking.validate import LIMIT, Validator, work_of

    limit = request.validate_limit or LIMIT
    if request.twin is None or work_of(program) <= limit:
        return Validator(inputs=inputs, limit=limit), "every pass was validated on this model"
    name, example = request.twin()
    small = replace(request, model=example.module, args=(), kwargs=example.kwargs)
    twin = capture_request(small)
    validator = Validator(inputs=example.kwargs, limit=limit)
    with unheard():  # what there is to say is said of the model itself
        partition(twin, small.mesh, choose_plan(twin, small), small.passes, validator)
    return None, f"every pass was validated on a smaller model of the same structure, {name}"


def capture_request(request: Request) -> Program:
    """The global program of a request's model, with its loss alone."""
    # Takes a second to import, which the ranks other than 0 need not spend.
    from shardweave.ir.capture.capture import capture

    return capture(request.model, request.args, request.kwargs, train=request.train is not False)


def _given_program(program: Program, request: Request) -> tuple[Program, Making]:
    """A program that is to be run as it is. Raises ValueError for one that cannot be."""
    check(program)
    mesh = program.mesh or Mesh()
    if mesh != request.mesh:
        raise ValueError(
            f"the program is for mesh {mesh}, not {request.mesh}; leave the mesh out, or "
            "partition the program for that one."
        )
    if mesh.num_devices > 1 and not program.is_local:
        raise ValueError(
            f"the program is not partitioned for its mesh {mesh}; run 'preset:partition' on it "
            "first, and edit what comes out."
        )
    if request.plan is not None or request.passes:
        raise ValueError("a given program runs as it is; leave plan and passes out.")
    return program, Making(0.0, 0.0, sum(1 for _ in program.ops), ())
