"""compile: from a model to a step that runs on a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardweave.backends.step.bound import BoundProgram, device_of
from shardweave.backends.step.step import Step
from shardweave.backends.step.step_programs import GivenProgram
from shardweave.backends.watch import watchdog
from shardweave.backends.watch.agreement import require_same, require_same_model
from shardweave.driver.processes import world
from shardweave.driver.step.model.original import Original
from shardweave.driver.step.plan_choice import check_planned
from shardweave.driver.step.precision import check_precision, in_precision, reducing_in
from shardweave.driver.step.programs import MAX_PROGRAMS, CompiledPrograms, backend_of, seed_of
from shardweave.driver.step.request import Request
from shardweave.driver.step.request_text import describe
from shardweave.driver.step.run_options import BACKENDS, DEFAULT_PLAN
from shardweave.ir.capture.arguments import check_batch, check_loss
from shardweave.ir.capture.outputs import LossChoice
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import MeshLike, as_mesh
from shardweave.planners.call import ClusterLike
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.partition import Passes
from shardweave.planners.planning import PlanLike, check_resolvable, mesh_of_plan
from shardweave.planners.registry import DEFAULT_PLANNER


def compile(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: MeshLike | None = None,
    plan: PlanLike | None = None,
    cluster: ClusterLike | None = None,
    sequence_parallel: bool = False,
    zero: int = 0,
    passes: Passes = (),
    program: Program | None = None,
    backend: str = "distributed",
    device: torch.device | str | None = None,
    cuda_graph: bool = False,
    train: bool | None = None,
    loss: LossChoice = None,
    only_loss: bool = False,
    precision: str | None = None,
    reduce_dtype: torch.dtype | None = None,
    seed: int | None = None,
    dynamic: bool = True,
    max_programs: int = MAX_PROGRAMS,
    validate: bool = False,
    prove: bool = False,
    sync: bool = True,
    timeout: float | None = None,
) -> Step:
    """Capture a training step of `model`, shard it over `mesh`, and make it ready to run.

    The result is an `nn.Module` with copies of the model's parameters and buffers, sharded, which
    is called as the model is and returns what it returns; gradients are added to the `.grad` of its
    parameters. `step.train()`, `step.eval()` and `torch.no_grad()` mean what they mean for the
    model. A call in another mode, or with inputs of other shapes, compiles another program on the
    same parameters. All ranks must hold the same model, which is kept for that; `model.to("meta")`
    frees the memory of its own weights.

    args, kwargs: an example batch, the global one, by whose program the plan is made.
    mesh: a Mesh, axis sizes by name, or text such as "data=2,tensor=2"; an axis of size -1 takes
    the processes that the others leave. None is the mesh that a given plan was made for, and
    without such a plan one device.
    plan: a planner's name ("megatron" is the default), a Plan, the path of a plan's JSON file, or
    shardings by parameter name or pattern, as in {"h.*.fc_in.weight": '[{"tensor"}, {}]'}. What it
    leaves whole or idle is a warning (PlanNote).
    cluster: what to plan for: a Cluster, a preset's name or a file, as `shardweave profile` writes.
    With one the default planner is "auto", which chooses the mesh too if none is given; rank 0
    plans, on the program that it compiles, for all ranks.
    sequence_parallel: an option for the planner.
    zero: the plan's ZeRO stage, over an axis "data": 1 stores optimizer states in shards, 2
    gradients too, 3 parameters too (as FSDP). Ranks along an axis "replica" beside it hold the
    same shards (as HSDP).
    passes: more passes, run after the default ones, or in their place if `insert-collectives` is
    among them.
    program: a step of this model that is partitioned already, perhaps edited by hand; it is
    verified and run as it is, on its own mesh, without a plan and passes, in every call.

    backend: "distributed" runs one process per device, started by torchrun, and initialises
    torch.distributed if nobody has; "triton" does so with fused kernels; "reference" runs all
    ranks in this process, on the CPU.
    device: of this rank; by default the model's own, and for "cuda" the GPU of the rank's number on
    this machine.
    cuda_graph: capture the step on the GPU and replay it.

    train: the mode that the step is in at first; None: each module is in that of the model's.
    loss: which of what the model returns is the loss, by key or index; None: the only scalar, an
    entry `loss`, or the first of a tuple. A function computes it from the output; the step then
    returns (loss, output).
    only_loss: calls that compute gradients return the loss alone, and keep nothing else for it.
    precision: "bf16" or "fp16" computes as under torch.autocast in that dtype, with parameters and
    gradients in their own; "bf16-true" casts the parameters too.
    reduce_dtype: in which ranks add up gradients, and what has fewer digits than it.
    seed: of the random numbers that the model draws, torch's own (`torch.manual_seed`) by default;
    they are the same on every mesh, and those that eager PyTorch draws under `sw.random(seed)`.

    dynamic: False refuses inputs of shapes that were not compiled ahead.
    max_programs: how many programs are kept.
    validate: run every program before and after each pass, in float64 on a virtual mesh, and
    compare (driver.validate); for models that take a few seconds at most.
    prove: show, without running anything, that what each rank runs after the last pass computes the
    captured program's results (docs/proof.md); raises ProofError if that cannot be shown.
    sync: the parameters and buffers start with the values of rank 0's model; False sends none, and
    raises AgreementError if the models of the ranks hold other values.
    timeout: seconds that a rank may wait for others in one collective (default: SHARDWEAVE_TIMEOUT,
    else 25 minutes; 0: for ever); it then ends, and says which rank is late, and where. A rank that
    is dead is noticed in seconds (backends.watchdog).

    Raises AgreementError, on every rank, if the ranks compile different models, meshes, plans or
    options; ValueError if the processes are not as many as the mesh's devices, CaptureError,
    PlanError or PassError (all ValueErrors) for what cannot be captured or sharded.
    """
    _check_model(model)
    check_batch(args)
    mesh_of_step = _mesh_for(mesh, plan, cluster, program, backend)
    if reduce_dtype is not None and mesh_of_step.num_devices > 1:
        passes = reducing_in(reduce_dtype, passes)
    request = Request(
        model=model,
        args=args,
        kwargs=kwargs or {},
        mesh=mesh_of_step,
        plan=plan,
        passes=passes,
        train=train,
        sequence_parallel=sequence_parallel,
        zero=zero,
        backend=backend,
        validate=validate,
        prove=prove,
        program=program,
        cuda_graph=cuda_graph,
        loss=loss,
        only_loss=only_loss,
        precision=precision or "",
        seed=seed,
        cluster=cluster,
        is_mesh_open=cluster is not None and mesh is None,
    )
    _check_options(request, max_programs)
    place = world.with_index(torch.device(device or device_of(model)))
    if backend != "reference":
        world.join(mesh_of_step, place, timeout)
        _meet(request, dynamic=dynamic, max_programs=max_programs, sync=sync)
    programs = CompiledPrograms(request, place, limit=max_programs, dynamic=dynamic)
    programs.backend.reduce_dtype = reduce_dtype
    step = Step(in_precision(model, request.precision), programs.backend, programs, sync=sync)
    step.stand_for(model)
    programs.original = Original(model, step)
    return step if train is None else step.train(train)


def _mesh_for(
    mesh: MeshLike | None,
    plan: PlanLike | None,
    cluster: ClusterLike | None,
    program: Program | None,
    backend: str,
) -> Mesh:
    """The mesh of a step: the given one, or that of what is given in its place."""
    if backend not in BACKENDS:
        raise ValueError(f"backend '{backend}' is unknown; use one of {', '.join(BACKENDS)}.")
    own = mesh_of_plan(plan) if program is None else program.mesh
    if cluster is not None:
        check_planned(plan, program)
        # Until the plan has chosen its mesh: what there is a process for.
        own = Mesh(data=find_cluster(cluster).num_devices)
    if mesh is None:
        return own or Mesh()
    return as_mesh(mesh, None if backend == "reference" else world.world_size())


def _check_options(request: Request, max_programs: int) -> None:
    """Raises ValueError for options that mean nothing, alone or together."""
    check_loss(request.loss)
    check_precision(request.precision, request.program)
    if max_programs < 1:
        raise ValueError(f"max_programs={max_programs} keeps no program; give 1 or more.")
    if request.zero not in range(4):
        raise ValueError(f"zero={request.zero!r} is no ZeRO stage; give 0, 1, 2 or 3.")
    if request.zero and (request.cluster is not None or request.program is not None):
        raise ValueError(
            f"zero={request.zero} has no effect: a program is given, or a planner chooses for the "
            "cluster (`shardweave plan --fix zero=..`); leave it out."
        )
    if request.program is None:
        default = DEFAULT_PLAN if request.cluster is None else DEFAULT_PLANNER
        plan = default if request.plan is None else request.plan
        check_resolvable(plan, request.cluster, sequence_parallel=request.sequence_parallel)


def _meet(request: Request, **options: Any) -> None:
    """Raises AgreementError, on every rank, unless all compile the same. Collective."""
    watchdog.meet("sw.compile", "a model")  # before the first message that would cross others
    if request.mesh.num_devices > 1:
        require_same_model(request.model)
        what = describe(request, **options)
        require_same("what is compiled", what, "call compile alike on every rank")


def _check_model(model: nn.Module) -> None:
    if isinstance(model, Step):
        raise ValueError("the model is a step of sw.compile already; pass the model that it is of.")
    if isinstance(model, DistributedDataParallel | nn.DataParallel):
        raise ValueError(
            f"the model is wrapped in {type(model).__name__}, whose work a step does itself; pass "
            "model.module."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("the model is one of TorchScript's; pass the one in Python that it is of.")
    if "_orig_mod" in model._modules:
        raise ValueError(
            "the model is one of torch.compile's, which a step does not run; pass the model that "
            "was compiled, model._orig_mod."
        )
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    if sharded:
        raise ValueError(
            f"'{sharded[0]}' of the model is a DTensor already, as fully_shard and "
            "parallelize_module make them; pass the plain model, and say by mesh= and plan= how it "
            "is sharded."
        )


def bind(program: Program, request: Request, device: torch.device) -> Step:
    """A step that runs the program of a request in every call, with copies of the model's
    parameters. Collective."""
    backend = backend_of(request, program, device)
    if backend.is_joint:
        require_same_model(request.model)
    programs = GivenProgram(
        BoundProgram(program, backend), world.from_rank_0(partial(seed_of, request.seed))
    )
    return Step(request.model, backend, programs)
