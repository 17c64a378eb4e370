"""compile: from a model to a step that runs on a mesh."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardweave.backends.bound import BoundProgram, device_of, owned
from shardweave.backends.distributed import Step
from shardweave.backends.programs import Key
from shardweave.backends.reference import run_reference
from shardweave.backends.runtime import Runtime
from shardweave.driver import world
from shardweave.driver.models import Example
from shardweave.driver.plans import Passes, PlanLike, mesh_of_plan, partition, resolve_plan
from shardweave.driver.run_options import BACKENDS
from shardweave.ir.kernel import FusedOp
from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program
from shardweave.ir.text import print_module
from shardweave.ir.verify.program import check
from shardweave.passes.notes import unheard
from shardweave.passes.observers import Observer
from shardweave.passes.pipeline import MeshLike, as_mesh, run_passes
from shardweave.planners.plan import Plan


def compile(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: MeshLike | None = None,
    plan: PlanLike | None = None,
    passes: Passes = (),
    backend: str = "distributed",
    train: bool = True,
    sequence_parallel: bool = False,
    device: torch.device | str | None = None,
    validate: bool = False,
    program: Program | None = None,
    cuda_graph: bool = False,
) -> Step | VirtualStep:
    """Capture a training step of `model`, shard it over `mesh`, and make it ready to run.

    Calling the result with inputs of the same shapes as `args` and `kwargs` (global ones, the
    same on every rank) returns the loss and adds gradients to the `.grad` of its parameters,
    which are copies of the model's. All ranks must hold the same model.

    mesh: a Mesh, axis sizes by name, or text such as "data=2,tensor=2"; None is
    the one that a given plan was made for, and without such a plan one device.
    plan: a planner's name ("megatron" is the default), a Plan, the path
    of a plan's JSON file, or shardings by parameter name or pattern, as in
    {"h.*.fc_in.weight": '[{"tensor"}, {}]'}.
    sequence_parallel: an option for the planner. passes: more passes, run after the default
    ones, or in their place if `insert-collectives` is among them.
    backend: "distributed" runs one process per device, started by torchrun, and initialises
    torch.distributed if nobody has; "triton" does so with fused kernels; "reference" runs all
    ranks in this process, on the CPU. cuda_graph: capture the step on the GPU and replay it.
    train: False compiles the forward pass in evaluation mode. device: of this rank; by default
    the model's own, and for "cuda" the GPU of the rank's number on this machine.
    validate: run the program before and after each pass, in float64 on a virtual mesh, and
    compare (driver.validate); for models that take a few seconds at most.
    program: a step of this model that is partitioned already, perhaps edited by hand; it is
    verified and run as it is, on its own mesh, without a plan and passes.

    Raises ValueError if the processes are not as many as the mesh's devices, CaptureError,
    PlanError or PassError (all ValueErrors) for what cannot be captured or sharded.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend '{backend}' is unknown; use one of {', '.join(BACKENDS)}.")
    own = mesh_of_plan(plan) if program is None else program.mesh
    goal = own or Mesh() if mesh is None else as_mesh(mesh)
    place = world.with_index(torch.device(device or device_of(model)))
    if backend != "reference":
        world.join(goal, place)
    request = Request(
        model=model,
        args=args,
        kwargs=kwargs or {},
        mesh=goal,
        plan=plan,
        passes=passes,
        train=train,
        sequence_parallel=sequence_parallel,
        backend=backend,
        validate=validate,
        program=program,
        cuda_graph=cuda_graph,
    )
    made, _ = compile_program(request)
    return bind(made, request, place)


@dataclass(frozen=True)
class Request:
    """What to compile; the fields are as for `compile`."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    mesh: Mesh
    plan: PlanLike | None = None
    passes: Passes = ()
    train: bool = True
    sequence_parallel: bool = False
    backend: str = "distributed"
    validate: bool = False
    validate_limit: float | None = None
    twin: Callable[[], tuple[str, Example]] | None = None
    """Names and makes the model that passes are validated on where `model` is too large for it."""
    program: Program | None = None
    cuda_graph: bool = False


@dataclass(frozen=True)
class Making:
    """How a program was made: seconds, ops before the passes, and the plan's notes."""

    capture_s: float
    passes_s: float
    num_captured_ops: int
    notes: tuple[str, ...]


def compile_program(request: Request) -> tuple[Program, Making]:
    """Capture, plan and partition, on rank 0 alone; the other ranks get the program's text.

    So all ranks run the same program, whatever differs between their machines. Collective;
    for the backend "reference" each process is on its own.
    """
    if request.backend == "reference":
        return _compile_program(request)
    own: list[Program] = []

    def make() -> tuple[str, Making]:
        program, making = _compile_program(request)
        own.append(program)
        # Not the program itself: pickle would recurse along the chain of its ops.
        return print_module(program.module, locations=True), making

    text, making = world.from_rank_0(make)
    return own[0] if own else Program.parse(text, "<the program of rank 0>"), making


def _compile_program(request: Request) -> tuple[Program, Making]:
    if request.program is not None:
        return _given_program(request.program, request)
    start_s = time.perf_counter()
    program = capture_request(request)
    captured_s = time.perf_counter()
    plan = choose_plan(program, request)
    observer, notes = None, () if plan is None else plan.notes
    if request.validate:
        observer, note = _validator(program, request)
        notes = (*notes, note)
    local = partition(program, request.mesh, plan, request.passes, observer)
    if request.backend == "triton" and not any(isinstance(op, FusedOp) for op in local.ops):
        with unheard():
            local = run_passes(local, "fuse-kernels")
    making = Making(
        capture_s=captured_s - start_s,
        passes_s=time.perf_counter() - captured_s,
        num_captured_ops=sum(1 for _ in program.ops),
        notes=notes,
    )
    return local, making


def _validator(program: Program, request: Request) -> tuple[Observer | None, str]:
    """What validates the passes of a request, None if a twin did, and a note that says it."""
    from shardweave.driver.validate import LIMIT, Validator, work_of

    limit = request.validate_limit or LIMIT
    inputs = {k: v for k, v in request.kwargs.items() if isinstance(v, torch.Tensor)}
    inputs |= {f"arg{i}": v for i, v in enumerate(request.args) if isinstance(v, torch.Tensor)}
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
    """The global program of a request's model."""
    # Takes a second to import, which the ranks other than 0 need not spend.
    from shardweave.ir.capture.capture import capture

    return capture(request.model, request.args, request.kwargs, train=request.train)


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


def choose_plan(program: Program, request: Request) -> Plan | None:
    """The plan to follow; None, where there is nothing to shard and no plan is given."""
    plan, is_sequential = request.plan, request.sequence_parallel
    if plan is None and request.mesh.num_devices == 1 and not is_sequential:
        return None
    given = "megatron" if plan is None else plan
    return resolve_plan(given, program, request.mesh, sequence_parallel=is_sequential)


class VirtualStep(BoundProgram):
    """A program bound to whole parameters on the CPU; calling it runs every rank of its mesh."""

    def __init__(self, program: Program, model: nn.Module) -> None:
        super().__init__(program)
        self._mirror(model, lambda kind, name, tensor: tensor.detach().to("cpu", copy=True))

    def run(self, batch: Mapping[str, Any]) -> Mapping[Key, Tensor]:
        """The global results."""
        values = self._stored | {("input", name): tensor for name, tensor in batch.items()}
        return owned(run_reference(self.program, values), values.values())

    def full_state_dict(self) -> dict[str, Any]:
        """A copy of `state_dict`, whose tensors are whole already."""
        return {name: tensor.clone() for name, tensor in self.state_dict().items()}


def bind(program: Program, request: Request, device: torch.device) -> Step | VirtualStep:
    """A step of the program of a request, with copies of the model's parameters. Collective."""
    if request.backend == "reference":
        return VirtualStep(program, request.model)
    mesh = program.mesh if program.is_local else None
    return Step(
        program,
        request.model,
        Runtime(mesh, device),
        kernels=request.backend == "triton",
        cuda_graph=request.cuda_graph,
    )
