"""From a model and a call of it to the program of each rank: capture, plan, passes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardweave.backends.bound import device_of
from shardweave.backends.programs import Key
from shardweave.backends.step import StepCall
from shardweave.driver import world
from shardweave.driver.binding import Binding
from shardweave.driver.models import Example
from shardweave.driver.plans import Passes, PlanLike, partition, plan, resolve_plan
from shardweave.driver.precision import in_precision
from shardweave.ir.capture.arguments import taken_apart
from shardweave.ir.capture.outputs import LossChoice, Outputs
from shardweave.ir.mesh import Mesh
from shardweave.ir.placement import Sharding
from shardweave.ir.program import Program
from shardweave.ir.rewrite.stages.batches import JoinedMicroBatches
from shardweave.ir.sharding.padding import notes_on_padding
from shardweave.ir.sharding.rules import notes_on_rules
from shardweave.ir.staged import ops_of_parts
from shardweave.ir.suggest import did_you_mean
from shardweave.ir.text import print_module
from shardweave.ir.types import dtype_of_value, shape_of
from shardweave.ir.unfuse import has_regions
from shardweave.ir.verify.program import check
from shardweave.passes.notes import unheard
from shardweave.passes.observers import Observer
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.planners.call import ClusterLike
from shardweave.planners.cost.zero import DATA_AXIS
from shardweave.planners.other_shapes import fit_plan, in_one_micro_batch
from shardweave.planners.pipelines.choose import with_pipeline
from shardweave.planners.plan import Plan
from shardweave.planners.registry import PLANNERS

if TYPE_CHECKING:
    from shardweave.ir.capture.capture import Captured

Given = tuple[Plan | None, Mapping[Key, Sharding], Sequence[str]]
"""A plan that is followed already, how parameters and buffers are stored, and the batch's axes."""


@dataclass(frozen=True)
class Request:
    """What to compile; the fields are as for `compile`."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    mesh: Mesh
    plan: PlanLike | None = None
    passes: Passes = ()
    train: bool | None = True
    sequence_parallel: bool = False
    zero: int = 0
    backend: str = "distributed"
    validate: bool = False
    prove: bool = False
    validate_limit: float | None = None
    twin: Callable[[], tuple[str, Example]] | None = None
    """Names and makes the model that passes are validated on where `model` is too large for it."""
    program: Program | None = None
    cuda_graph: bool = False
    loss: LossChoice = None
    only_loss: bool = False
    precision: str = ""
    seed: int | None = None
    cluster: ClusterLike | None = None
    """What the plan is made for; the mesh is then the planner's to choose if `is_mesh_open`."""
    is_mesh_open: bool = False

    def with_plan(self, plan: Plan) -> Request:
        """The same, on the mesh that a plan chose, if it was to choose one.

        Raises ValueError for a mesh of other than all devices: there is a process for each.
        """
        if not self.is_mesh_open:
            return self
        mesh = Mesh(**plan.mesh)
        if self.backend != "reference" and mesh.num_devices != self.mesh.num_devices:
            raise ValueError(
                f"the plan is for {mesh.num_devices} of the cluster's {self.mesh.num_devices} "
                "devices, each of which has a process; give the mesh that is wanted."
            )
        return replace(self, mesh=mesh, is_mesh_open=False)


@dataclass(frozen=True)
class Making:
    """How a program was made: seconds, ops before the passes, and the plan's notes."""

    capture_s: float
    passes_s: float
    num_captured_ops: int
    notes: tuple[str, ...]


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
                *_idle_axes(local, planned),
                *_undivided(local, plan),
                *_without_rules(program, local),
                *notes_on_padding(local),
                *notes,
            ),
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
    warnings = _unread(program)
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
        warnings += [*_idle_axes(local, notes), *_undivided(local, plan)]
    warnings += _without_rules(program, local)
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


def _unread(program: Program) -> list[str]:
    """A note for each input that the model does not read."""
    return [
        f"input '{slot.name}' has no effect: the model does not read it"
        for slot in program.arguments
        if slot.kind == "input" and slot.value.first_use is None
    ]


def _idle_axes(program: Program, notes: Sequence[str]) -> list[str]:
    """A note for each axis of the mesh that nothing is cut over, unless the plan says so itself."""
    mesh = program.mesh
    if mesh is None or not program.is_local:
        return []
    used = {axis for op in ops_of_parts(program) for axis in getattr(op, "axes", ())}
    for slot in (*program.arguments, *program.results):
        used |= program.sharding_of_slot(slot).axes
    known = [*(name for name in ("data", "tensor") if name not in mesh.names), *used]
    said = [note for note in notes if note.startswith("axis ")]
    return [
        f"axis '{axis.name}' of the mesh is idle: nothing is cut over it, and its "
        f"{axis.size} ranks all compute the same; {did_you_mean(axis.name, known)}"
        "give its devices to another axis, or a plan that uses it"
        for axis in mesh.space_axes
        if axis.size > 1
        and axis.name not in used
        and not any(f"'{axis.name}'" in note for note in said)
    ]


_FEW = 0.01
"""Of parameters' bytes, those of norms as a rule: ZeRO may leave so many whole without a word."""


def _undivided(program: Program, plan: Plan | None) -> list[str]:
    """A note if ZeRO leaves much of a local program's parameters whole."""
    if plan is None or not plan.zero:
        return []
    sizes: dict[str, int] = {}
    whole: list[str] = []
    for slot in program.arguments:
        if slot.kind == "param":
            sharding = program.sharding_of_slot(slot)
            shape = sharding.global_shape(shape_of(slot.value))
            sizes[slot.name] = math.prod(shape) * dtype_of_value(slot.value).itemsize
            whole += [] if DATA_AXIS in sharding.axes else [slot.name]
    left, total = sum(sizes[name] for name in whole), sum(sizes.values())
    if left <= _FEW * total:
        return []
    return [
        f"zero={plan.zero} leaves {len(whole)} of {len(sizes)} parameters, {left / total:.0%} of "
        f"their bytes, whole on each rank, such as '{max(whole, key=sizes.__getitem__)}': none of "
        f"their dims divides by {DATA_AXIS}={program.needed_mesh().size(DATA_AXIS)}"
    ]


def _without_rules(program: Program, local: Program) -> list[str]:
    """A note for each kind of op of a global program that no device of the local one cuts."""
    mesh = local.mesh
    return [] if mesh is None or mesh.num_devices == 1 else notes_on_rules(program.ops)


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
    """The local program, and notes on how it was validated."""
    observer, notes = None, ()
    if request.validate:
        observer, note = _validator(program, request, inputs)
        notes = (note,)
    local = partition(program, request.mesh, plan, request.passes, observer, buffers)
    if request.backend == "triton" and not has_regions(local):
        with unheard():
            local = run_passes(local, "preset:kernels")
    if request.prove:
        notes = (*notes, _proof_of(local, program))
    return local, notes


def _proof_of(local: Program, program: Program) -> str:
    """A note that a local program is proved to compute a captured one. Raises ProofError."""
    from shardweave.ir.proof.prove import prove

    proof = prove(local, against=program)
    return f"the {proof.num_ops} ops of each rank are proved to compute the model's results"


def _validator(
    program: Program, request: Request, inputs: Mapping[str, torch.Tensor]
) -> tuple[Observer | None, str]:
    """What validates the passes of a request, None if a twin did, and a note that says it."""
    from shardweave.driver.validate import LIMIT, Validator, work_of

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


def check_planned(plan: PlanLike | None, program: Program | None) -> None:
    """Raises ValueError if there is nothing to plan for a cluster: a plan or a program is given."""
    if program is not None:
        raise ValueError("a given program runs as it is; leave the cluster to plan for out.")
    if plan is not None and not (isinstance(plan, str) and plan in PLANNERS):
        raise ValueError(
            "cluster is what a planner plans for, and the plan is given; leave the cluster out, or "
            f"name a planner ({', '.join(PLANNERS)})."
        )


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


def _with_names_of_forward(plan: Plan, program: Program, request: Request) -> Plan:
    """A plan for a program captured by positions (`arg0`), for one whose inputs have the names of
    forward's parameters."""
    known = {slot.name for slot in program.arguments if slot.kind == "input"}
    names = Binding(request.model, 0).names
    by_position = {f"arg{i}": name for i, name in enumerate(names) if name in known}
    renamed = {
        name if name in known else by_position.get(name, name): text
        for name, text in plan.inputs.items()
    }
    return replace(plan, inputs=renamed)


def _in_shards(plan: Plan, request: Request) -> Plan:
    """A plan with the ZeRO stage that is asked for. Raises ValueError where there is no room."""
    if "data" not in request.mesh.names:
        raise ValueError(
            f"zero={request.zero} stores parameters in shards over an axis 'data', which the mesh "
            f"{request.mesh} does not have; give it one, or leave zero out."
        )
    if plan.zero not in (0, request.zero):
        raise ValueError(
            f"the plan has zero={plan.zero}, and zero={request.zero} is asked for; leave one out."
        )
    return replace(plan, zero=request.zero)


def choose_plan(program: Program, request: Request) -> Plan | None:
    """The plan to follow; None, where there is nothing to shard and no plan is given.

    For a cluster it is that of a planner (by default `auto`), on a mesh that it may choose.
    """
    given, is_sequential = request.plan, request.sequence_parallel
    if request.cluster is not None:
        asked = None if request.is_mesh_open else request.mesh
        planner = given if isinstance(given, str) else ""
        options: dict[str, Any] = {"sequence_parallel": True} if is_sequential else {}
        found = plan(program, asked, planner, cluster=request.cluster, **options)
        return with_pipeline(found, program, Mesh(**found.mesh))
    if given is None and request.mesh.num_devices == 1 and not (is_sequential or request.zero):
        return None
    resolved = resolve_plan(
        "megatron" if given is None else given,
        program,
        request.mesh,
        sequence_parallel=is_sequential,
    )
    resolved = _with_names_of_forward(resolved, program, request)
    if request.zero:
        resolved = _in_shards(resolved, request)
    return with_pipeline(resolved, program, request.mesh)
