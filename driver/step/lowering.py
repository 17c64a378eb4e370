"""From a model and a call to the program of each rank: capture, plan, passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from shardweave.backends.programs import Key
from shardweave.backends.registry import BACKENDS
from shardweave.backends.state.places import in_modes
from shardweave.backends.step.bound import device_of
from shardweave.backends.step.compiled_module import as_plain
from shardweave.backends.step.step_call import IN_CALL, StepCall
from shardweave.backends.watch import watchdog
from shardweave.driver.processes import world
from shardweave.driver.step.binding import example_call
from shardweave.driver.step.lowering_notes import idle_axes, undivided, unread, without_rules
from shardweave.driver.step.precision import in_precision
from shardweave.driver.step.request import DEFAULT_PLAN, Request
from shardweave.ir.capture.outputs import Outputs
from shardweave.ir.dialects.types import form_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program
from shardweave.ir.program.text import print_module
from shardweave.ir.sharding.padding import notes_on_padding
from shardweave.ir.verify import program as verified
from shardweave.passes.kernels.unfuse_kernels import has_regions
from shardweave.passes.notes import unheard
from shardweave.passes.observers import Observer, Observers
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.passes.stages.batches import JoinedMicroBatches
from shardweave.planners.lowering.other_shapes import in_one_micro_batch
from shardweave.planners.lowering.partition import partition
from shardweave.planners.lowering.stages.choose import with_pipeline
from shardweave.planners.megatron.planner import EXPERT
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_check import check_recomputed, check_stages
from shardweave.planners.plan.zero import DATA_AXIS
from shardweave.planners.planning import plan as planned
from shardweave.planners.planning import resolve_plan
from shardweave.planners.registry import PLANNERS

if TYPE_CHECKING:
    from shardweave.driver.checking.validate import Prover
    from shardweave.ir.capture.capture import Captured

Stored = Mapping[Key, Sharding]
"""Shardings of a step's stored parameters and buffers, by kind and name."""


@dataclass(frozen=True)
class Lowered:
    """The program of each rank for a call, the plan that it follows, and notes on it.

    warnings: the notes on requests that were not met. returned: structure of the model's output,
    made up of the program's outputs. num_captured_ops: ops before the passes. capture_s,
    lowering_s: seconds of the capture, and of plan and passes. constants: tensors in the model's
    code that the capture turned into buffers.
    """

    program: Program
    plan: Plan | None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    returned: Outputs | None = None
    num_captured_ops: int = 0
    capture_s: float = 0.0
    lowering_s: float = 0.0
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    def with_warning(self, text: str) -> Lowered:
        """The same, with one more warning."""
        return replace(self, notes=(*self.notes, text), warnings=(*self.warnings, text))


def made_here(
    request: Request, call: StepCall, make: Callable[[Request], Lowered], *, is_first: bool = False
) -> Lowered:
    """Lower a call on this rank by calling `make`. make: takes the request, with its model cast as
    `precision` says. is_first: the call is the example; notes of passes are kept for its program
    only."""
    start_s = perf_counter()
    with (
        torch.inference_mode(False),
        nullcontext() if is_first else unheard(),
        _explaining_empty_inputs(call),
        as_plain(request.model, with_hooks=request.backward == IN_CALL),
    ):
        model = in_precision(request.model, request.precision)
        lowered = make(replace(request, model=model))
    lowered = replace(lowered, lowering_s=perf_counter() - start_s - lowered.capture_s)
    if is_first and not call.grad and request.train is None:
        lowered = lowered.with_warning(_EVALUATION)
    if call.grad and not any([*call.trained, *(t.requires_grad for t in call.inputs.values())]):
        lowered = lowered.with_warning(_FROZEN)
    return lowered


def on_rank_0(
    request: Request, call: StepCall, made: Callable[[], Lowered], why: str = ""
) -> Lowered:
    """Call `made` on rank 0 and return its result on every rank. Collective. So all ranks run the
    same program, even if their machines differ. On the backend "reference" each process
    calls `made` itself. why: reason for compiling, for waiting ranks."""
    own: list[Program] = []

    def sent() -> tuple[str, Lowered]:
        lowered = made()
        own.append(lowered.program)
        # Not the program itself: pickle would recurse along the chain of its ops.
        text = print_module(lowered.program.module, locations=True)
        return text, replace(lowered, program=_EMPTY)

    if not request.has_processes:
        return made()
    watchdog.meet("the call", f"{call}, compiled anew ({why})" if why else str(call))
    text, lowered = world.from_rank_0(sent)
    program = own[0] if own else Program.parse(text, "<the program of rank 0>")
    return replace(lowered, program=program)


_EMPTY: Any = None
"""Placeholder for a program that is sent as text."""

_EVALUATION = (
    "the model is in evaluation mode, so that the step computes no gradients and has no effect on "
    "parameters; call step.train() to train, or pass train=False to say that this is wanted"
)

_FROZEN = (
    "a call in training mode computes no gradients: no parameter of the step requires one, nor an "
    "input; call step.requires_grad_(), or step.eval() if this is wanted"
)


@contextmanager
def _explaining_empty_inputs(call: StepCall) -> Iterator[None]:
    """Turn errors into a ValueError that names an input without elements, if there is one."""
    try:
        yield
    except ValueError as error:
        empty = [name for name, tensor in call.inputs.items() if not tensor.numel()]
        if not empty:
            raise
        raise ValueError(
            f"input '{empty[0]}' of {form_of(call.inputs[empty[0]])} has no elements, and the "
            f"step cannot be compiled for an empty input; skip this batch ({error})"
        ) from error


def capture_call(request: Request, call: StepCall) -> Captured:
    """The global program of a call, in its modes."""
    # Takes a second to import, which the ranks other than 0 need not spend.
    from shardweave.ir.capture.capture import capture_step
    from shardweave.ir.capture.outputs import Kind

    model = request.model
    device = device_of(model).type
    # Models on the meta device are traced as on the CPU.
    autocast = call.autocast and ("cpu" if device == "meta" else device, call.autocast)
    kind = Kind(
        grad=call.grad,
        loss=request.loss,
        all_outputs=True,
        only_loss=request.only_loss,
        autocast=autocast,
        tangents=call.tangents if call.grad else None,
    )
    start_s = perf_counter()
    of_model = list(model.modules()), call.modes, list(model.parameters()), call.trained
    with in_modes(*of_model):
        captured = capture_step(model, call.form, _examples(request, call), kind)
    return replace(captured, seconds=perf_counter() - start_s)


def choose_plan(program: Program, request: Request) -> Plan | None:
    """Return the plan to follow; None if there is nothing to shard and no plan is given. For a
    cluster a planner (by default `auto`) makes the plan, and may choose the mesh."""
    given, is_sequential = request.plan, request.sequence_parallel
    if request.cluster is not None:
        planner = given if isinstance(given, str) else ""
        options: dict[str, Any] = {"sequence_parallel": True} if is_sequential else {}
        assert request.mesh is None or isinstance(request.mesh, Mesh)
        chosen = planned(program, request.mesh, planner, cluster=request.cluster, **options)
        return with_pipeline(chosen, program, Mesh(**chosen.mesh))
    if given is None and request.devices.num_devices == 1 and not (is_sequential or request.zero):
        return None
    resolved = resolve_plan(
        DEFAULT_PLAN if given is None else given,
        program,
        request.devices,
        sequence_parallel=is_sequential,
    )
    check_stages(resolved, program, (name for name, _ in request.model.named_modules() if name))
    check_recomputed(resolved, program)
    if request.zero:
        resolved = _in_shards(resolved, request)
    return with_pipeline(resolved, program, request.devices)


def _in_shards(plan: Plan, request: Request) -> Plan:
    """Add the requested ZeRO stage to a plan. Raises ValueError if the plan cannot have it."""
    if request.devices.num_devices > 1 and {DATA_AXIS, EXPERT}.isdisjoint(request.devices.names):
        raise ValueError(
            f"zero={request.zero} shards parameters over the axis '{DATA_AXIS}', which the mesh "
            f"{request.devices} does not have; add the axis to the mesh, or leave zero out."
        )
    if plan.zero not in (0, request.zero):
        raise ValueError(
            f"the plan has zero={plan.zero}, but zero={request.zero} is given; give one of them "
            "only."
        )
    return replace(plan, zero=request.zero)


def lowered_step(request: Request, call: StepCall) -> Lowered:
    """Return each rank's program for the example: captured, planned and lowered, or given."""
    if isinstance(request.program, Program):
        return as_given(request.program)
    captured = capture_call(request, call)
    plan = choose_plan(captured.program, request)
    return lower(request, call, captured, plan)


def lower(
    request: Request,
    call: StepCall,
    captured: Captured,
    plan: Plan | None,
    *,
    stored: Stored | None = None,
    warnings: Sequence[str] = (),
) -> Lowered:
    """Lower a captured program by a plan to the program of each rank, with notes. stored: the
    shardings of a step that has a program already; None for its first program, the only one with
    notes on the plan. warnings: further warnings to include."""
    program, is_first = captured.program, stored is None
    planned = () if plan is None or not is_first else plan.notes
    # Who gives a plan, or its file, knows what it leaves replicated.
    is_made_here = request.plan in (None, *PLANNERS) or isinstance(request.plan, Mapping)
    undone = plan.undone if plan is not None and is_first and is_made_here else ()
    request = request.on_mesh_of(plan)
    local, validated, joined = _in_micro_batches(program, plan, request, call, stored)
    told = [*captured.notes, *unread(program), *undone, *warnings, *joined]
    if is_first:
        told += [*idle_axes(local, planned), *undivided(local, plan)]
    told += without_rules(program, local)
    notes = dict.fromkeys((*planned, *told, *notes_on_padding(local), *validated))
    return Lowered(
        local,
        plan and plan.on_parts_of(local.mesh or Mesh()),
        tuple(notes),
        tuple(told),
        captured.returned,
        sum(1 for _ in program.ops),
        captured.seconds,
        constants=captured.constants,
    )


def _examples(request: Request, call: StepCall) -> list[torch.Tensor]:
    """The inputs of a call, on the model's device."""
    return [_example_of(tensor, request.model) for tensor in call.inputs.values()]


def _example_of(tensor: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    """Return the input, if it is a plain tensor on the model's device, else zeros like it there."""
    device = device_of(model)
    if type(tensor) is torch.Tensor and device in (tensor.device, torch.device("meta")):
        return tensor
    example = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return example.requires_grad_(tensor.requires_grad)


def _in_micro_batches(
    program: Program, plan: Plan | None, request: Request, call: StepCall, stored: Stored | None
) -> tuple[Program, tuple[str, ...], tuple[str, ...]]:
    """Return `_partitioned`'s results, and a warning if micro-batches cannot run one by one. In
    that case the program has a single micro-batch. The plan stays as it is for other inputs."""
    try:
        return *_partitioned(program, plan, request, call, stored), ()
    except PassError as error:
        joined = error.__cause__
        if plan is None or not isinstance(joined, JoinedMicroBatches):
            raise
        warning = f"these inputs run as one micro-batch: {joined.reason}"
        shortened = in_one_micro_batch(plan, request.devices.refined(plan.mesh))
        return *_partitioned(program, shortened, request, call, stored), (warning,)


def _partitioned(
    program: Program, plan: Plan | None, request: Request, call: StepCall, stored: Stored | None
) -> tuple[Program, tuple[str, ...]]:
    """Return the local program, and notes: on the plan's unused parts, validation and proof."""
    observers: list[Observer] = []
    notes: list[str] = []
    if request.validate:
        validator, note = _validator(program, request, call)
        observers += [] if validator is None else [validator]
        notes.append(note)
    prover = _prover(program) if request.prove else None
    observers += [] if prover is None else [prover]
    observer = Observers(observers) if observers else None
    buffers: dict[str, Sharding] | None = None
    if stored is not None:
        buffers = {name: s for (kind, name), s in stored.items() if kind == "buffer"}
    local = partition(
        program, request.devices, plan, request.passes, observer, buffers, tell=notes.append
    )
    regions = BACKENDS[request.backend].passes
    if regions and not has_regions(local):
        with unheard():
            local = run_passes(local, regions)
    if prover is not None:
        proof, blocked = prover.proof_of(local), "as block-experts gives them, which is not proved"
        words = f"the {proof.num_ops} ops of each rank are proved to compute the model's results"
        notes.append(f"{words}, {blocked}" if prover.is_blocked else words)
    return local, tuple(notes)


def _prover(program: Program) -> Prover:
    from shardweave.driver.checking.validate import Prover

    return Prover(program, each=False)


def _validator(program: Program, request: Request, call: StepCall) -> tuple[Observer | None, str]:
    """Return the validator for the passes and a note; None if a twin has validated them here."""
    from shardweave.driver.checking.validate import LIMIT, Validator, work_of

    limit = request.validate_limit or LIMIT
    if request.twin is None or work_of(program) <= limit:
        inputs = dict(zip(call.form.names, _examples(request, call), strict=True))
        return Validator(inputs=inputs, limit=limit), "every pass was validated on this model"
    name, example = request.twin()
    model = in_precision(example.module, request.precision)
    small = replace(request, model=model, args=(), kwargs=example.kwargs)
    own = example_call(small)
    twin = capture_call(small, own).program
    validator = Validator(inputs=own.inputs, limit=limit)
    with unheard():  # notes are given on the model itself
        partition(twin, small.devices, choose_plan(twin, small), small.passes, validator)
    return None, f"every pass was validated on a smaller model of the same structure, {name}"


def as_given(program: Program) -> Lowered:
    """Wrap a program to be run unchanged. Raises ValueError if it is invalid or unpartitioned."""
    verified.check(program)
    mesh = program.mesh or Mesh()
    if mesh.num_devices > 1 and not program.is_local:
        raise ValueError(
            f"the program is not partitioned for its mesh {mesh}; run 'preset:partition' on it "
            "first, and edit the result."
        )
    return Lowered(program, None, num_captured_ops=sum(1 for _ in program.ops))
