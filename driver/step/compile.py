"""compile: from a model to a step that runs on a mesh."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from shardweave.backends.registry import BACKENDS
from shardweave.backends.state.files import values_in_files
from shardweave.backends.state.initial import initial_values
from shardweave.backends.step.bound import BoundProgram, device_of
from shardweave.backends.step.compiled_module import CompiledModule
from shardweave.backends.step.step_call import AUTOGRAD, StepCall
from shardweave.backends.watch import watchdog
from shardweave.backends.watch.agreement import describe_model, require_same
from shardweave.driver.artifact.artifact import Artifact
from shardweave.driver.artifact.precompile import start_from
from shardweave.driver.processes import world
from shardweave.driver.signature import taking
from shardweave.driver.step.binding import example_call
from shardweave.driver.step.checks import check_request
from shardweave.driver.step.lowering import Lowered, lowered_step, made_here, on_rank_0
from shardweave.driver.step.precision import cast_parameters, dtype_named
from shardweave.driver.step.programs import CompiledPrograms, seed_of
from shardweave.driver.step.request import Request
from shardweave.driver.step.request_text import describe_request
from shardweave.driver.step.step import Step
from shardweave.ir.capture.observed.loose_tensors import register_constants


@taking(Request)
def compile(request: Request) -> CompiledModule:
    """Capture a training step of `model`, shard it over `mesh`, and make it ready to run.

    Returns the model itself, whose parameters and buffers are sharded in place, as `fully_shard`
    does it: on a mesh of several devices they become DTensors; pass an optimizer that was made
    before as `optimizers`. Calls of the model run compiled programs, see `Step`. `model.train()`,
    `model.eval()` and `torch.no_grad()` have their usual meaning. A call in another mode, with
    inputs of other shapes, or after a setting of the model was changed, compiles another program on
    the same parameters. All ranks must hold the same model. If compiling fails, the model is left
    as it was.

    args, kwargs: an example batch; the plan is made for its program.
    mesh: a torch DeviceMesh, whose dim names are the axes, an sw.Mesh, axis sizes by name, or text
    such as "data=2,tensor=2"; an axis of size -1 gets the number of processes divided by the other
    axes. None: the mesh that a given plan was made for, and without such a plan one device.
    plan: a planner's name ("megatron" is the default), a Plan, the path of a plan's JSON file, or
    shardings by parameter name or pattern, as in {"h.*.fc_in.weight": '[{"tensor"}, {}]'}. Warnings
    (PlanNote) name the axes that it does not use and what it leaves replicated.
    cluster: what to plan for: a Cluster, a preset's name or a file, as `shardweave profile` writes.
    With one the default planner is "auto", which chooses the mesh too if none is given; rank 0
    plans, on the program that it compiles, for all ranks.
    sequence_parallel: the planner shards activations between tensor-parallel layers by sequence.
    zero: the plan's ZeRO stage, over an axis "data": 1 stores optimizer states in shards, 2
    gradients too, 3 parameters too (as FSDP). Ranks along an axis "replica" beside it hold the
    same shards (as HSDP).
    passes: more passes, run after the default ones, or in their place if `insert-collectives` is
    among them.
    program: a partitioned step of this model, perhaps edited by hand, or its file; it is verified
    and run unchanged, on its own mesh, without a plan and passes, in every call.

    artifact: a file that `precompile` or `shardweave compile` wrote for this model and mesh, from
    which every rank starts with no capture and no planning; options with which it was made, such as
    the plan, may be left out; options that differ from these raise an ArtifactError.

    backend: "distributed" runs one process per device, started by torchrun, and initialises
    torch.distributed if nobody has; "triton" also runs fused kernels; "inductor" also compiles the
    ops between collectives with PyTorch's compiler; "reference" runs all ranks in this process, on
    the CPU. `sw.register_backend` adds others.
    device: of this rank; by default the model's own. "cuda" is the GPU with the rank's local index.
    cuda_graph: capture the step on the GPU and replay it.

    train: whether the step starts in training mode; None: each module keeps its own mode.
    loss: the key or index of the loss in the model's output; None: the only scalar, an entry
    `loss`, or the first of a tuple. Or a function that computes the loss from the output; the step
    then returns (loss, output).
    only_loss: calls that compute gradients return the loss alone, and keep nothing else for it.
    backward: "autograd": gradients of any outputs are computed at `backward()`, so that a criterion
    may be outside the model, and several calls may precede one backward pass. "in_call" computes
    the gradients of the model's own loss in the call, for loops without `loss.backward()`.
    outputs: with "autograd", "full" gathers the model's output on every rank (the default if the
    model returns no loss); "sharded" does not.
    precision: "bf16" or "fp16" computes as under torch.autocast in that dtype; parameters and
    gradients keep their dtypes. "bf16-true" casts the parameters too.
    reduce_dtype: the dtype in which ranks add up gradients, and other sums of a less precise dtype.
    batch: "local": each rank passes rows of its own, along the axes `data`, `replica`, and others
    over which the plan shards rows; ranks with equal coordinates on these pass the same rows.
    Inputs of different ranks may differ in shape only by their number of rows. The global batch is
    all rows together; a loss that the model returns is that of the global batch, on every rank. Of
    outputs with a row for each row of the batch, a rank gets its own rows and differentiates its
    own loss of them, as in DDP: gradients are means, weighted by rows. "global": all ranks pass the
    whole batch, as always on the reference backend. None: "global", and the first call says so.
    Unless "local", the first calls compare the ranks' inputs and raise an error if they differ.
    seed: of the model's random numbers; by default torch's own (`torch.manual_seed`). They are the
    same on every mesh, and the same as eager PyTorch's under `sw.seeded(seed)`.

    dynamic: False refuses inputs of shapes that were not compiled ahead.
    max_programs: number of compiled programs to keep, the last used ones.
    validate: run every program before and after each pass, in float64 on a virtual mesh, and
    compare; for models that take a few seconds at most.
    validate_limit: the FLOPs of one run up to which a program is validated. twin: makes a smaller
    model of the same structure, with its name, on which passes are validated beyond that limit.
    prove: show, without running anything, that what each rank runs after the last pass computes the
    captured program's results (docs/proof.md); raises ProofError if that cannot be shown.
    sync: the parameters and buffers start with the values of rank 0's model; False sends none, and
    raises AgreementError if the models of the ranks hold other values.
    weights: safetensors, a file or a folder of them, or a checkpoint of
    torch.distributed.checkpoint, with the values of parameters and buffers by the model's names;
    each rank reads its part. A model on the meta device (`with torch.device("meta"): Model()`)
    needs no memory but its shards; without weights its own `reset_parameters` and `init_weights`
    fill them, with the numbers of `sw.seeded(seed)` on every mesh.
    optimizers: one or more that hold the model's parameters already; they are moved to the sharded
    parameters, with their states. An optimizer that is not passed raises an error when it steps.
    timeout: seconds that a rank may wait for others in one collective (default: SHARDWEAVE_TIMEOUT,
    else 25 minutes; 0: for ever); it then ends, and says which rank is late, and where. A dead rank
    is noticed in seconds (`backends.watch.watchdog`).

    Raises AgreementError, on every rank, if the ranks compile different models, meshes, plans or
    options; ValueError if the processes are not as many as the mesh's devices, CaptureError,
    PlanError or PassError (all ValueErrors) for what cannot be captured or sharded.
    """
    request = check_request(request)
    device = join_mesh(request)
    request = replace(request, device=device)
    agree(request)
    call = example_call(request)
    if isinstance(request.artifact, Artifact):
        lowered = start_from(request.artifact, request, call)
    else:
        make = partial(lowered_step, call=call)
        lowered = on_rank_0(request, call, lambda: made_here(request, call, make, is_first=True))
    register_constants(request.model, lowered.constants)
    return bind(request, call, lowered, load(request, lowered, device))


def join_mesh(request: Request) -> torch.device:
    """Join the processes of the mesh; returns this process's device. Collective."""
    own = device_of(request.model)
    if own.type == "meta":
        own = world.local_device(request.devices.num_devices)
    device = world.with_index(torch.device(request.device or own))
    if request.has_processes:
        world.join(request.devices, device, request.timeout)
        watchdog.meet("sw.compile", "a model")  # before the first message that would cross others
    return device


def agree(request: Request) -> None:
    """Raise AgreementError on every rank unless all ranks compile the same. Collective."""
    if request.has_processes and request.devices.num_devices > 1:
        model = describe_model(request.model)
        require_same("the model", model, "build the same model on every rank")
        what = describe_request(request)
        require_same("what is compiled", what, "give every rank the same arguments")


def load(request: Request, lowered: Lowered, device: torch.device) -> BoundProgram:
    """Load a program on the backend of a request. Collective."""
    dtype = request.reduce_dtype
    backend = BACKENDS[request.backend].make(
        lowered.program,
        device,
        cuda_graph=request.cuda_graph,
        reduce_dtype=None if dtype is None else dtype_named(dtype),
    )
    return BoundProgram(
        lowered.program, backend, lowered.returned, is_split=request.backward == AUTOGRAD
    )


def bind(request: Request, call: StepCall, lowered: Lowered, first: BoundProgram) -> CompiledModule:
    """Shard the model in place, and let its calls run programs. Collective."""
    seed = world.from_rank_0(partial(seed_of, request.seed))
    model = request.model
    cast_parameters(model, request.precision)
    request = request.on_mesh_of(lowered.plan)
    weights = request.weights
    read = {} if weights is None else values_in_files(model, Path(weights))
    Step(
        model,
        first,
        lambda: CompiledPrograms(request, call, lowered, first, seed),
        sync=request.sync,
        sources=initial_values(model, seed, read),
        optimizers=request.optimizers,  # pyright: ignore[reportArgumentType]
        backward=request.backward,
    )
    if lowered.program.has_host_states:
        first.backend.keep_states_on_host(model.parameters())
    if request.train is not None:
        model.train(request.train)
    assert isinstance(model, CompiledModule)
    return model
