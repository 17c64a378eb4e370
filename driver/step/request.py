"""The options of `compile`: its signature, what ranks agree on, and the flags of `shardweave run`.

Nothing heavy is imported: the command line reads options before it starts processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shardweave.backends.registry import BACKENDS
from shardweave.driver.commands.arguments import positive
from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.registry import PLANNERS

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from shardweave.driver.artifact.artifact import Artifact
    from shardweave.driver.models.models import Example
    from shardweave.ir.capture.outputs import LossChoice
    from shardweave.ir.program.program import Program
    from shardweave.passes.pipeline import MeshLike
    from shardweave.planners.call import ClusterLike
    from shardweave.planners.lowering.partition import Passes
    from shardweave.planners.plan.plan import Plan
    from shardweave.planners.planning import PlanLike

DEFAULT_PLAN = "megatron"
"""The default planner. It accepts every option, so no planner is imported to check options."""

PRECISIONS = ("bf16", "fp16", "bf16-true")

OUTPUTS = ("full", "sharded")

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes in which gradients can be added up."""

MAX_PROGRAMS = 16
"""Default for how many programs a step keeps: for its modes, and for a few shapes of each."""


def _key(text: str) -> str | int:
    return int(text) if text.lstrip("-").isdigit() else text


def _flag(default: Any, text: str, **arguments: Any) -> Any:
    """A field with a flag: its help, and more arguments of argparse's `add_argument`."""
    return field(default=default, metadata={"help": text, **arguments})


@dataclass(frozen=True, kw_only=True, eq=False)
class CompileOptions:
    """Options of `compile`, which explains them; fields with metadata are flags of `run`."""

    mesh: MeshLike | DeviceMesh | None = _flag(
        None, "such as data=2,tensor=2; default: the plan's, else one device", metavar="MESH"
    )
    plan: PlanLike | None = _flag(
        None, f"a planner that needs no cluster, or a plan's JSON file (default: {DEFAULT_PLAN})"
    )
    cluster: ClusterLike | None = None
    sequence_parallel: bool = _flag(
        False, "between tensor-parallel layers, shard activations over the sequence"
    )
    zero: int = _flag(
        0,
        "store optimizer states (1), gradients (2) and parameters (3) in shards over 'data'",
        type=int,
        choices=range(4),
    )
    passes: Passes = _flag(
        (),
        "passes to run after the default ones, or in their place if they have insert-collectives",
        metavar="SPEC",
    )
    program: Program | Path | str | None = _flag(
        None, "run this partitioned program of the model, as it is, without a plan", metavar="FILE"
    )
    artifact: Artifact | Path | str | None = _flag(
        None,
        "start from this file, which `shardweave compile` wrote, with no capture and no planning",
        metavar="FILE",
    )
    backend: str = _flag(
        "distributed",
        "real processes, or all ranks of a virtual mesh in this one (default: distributed)",
        choices=BACKENDS,
    )
    device: torch.device | str | None = _flag(
        None, "cpu or cuda (default: cuda where each rank has a GPU of its own)"
    )
    cuda_graph: bool = _flag(False, "capture the step on the GPU and replay it")
    train: bool | None = None
    loss: LossChoice = _flag(
        None, "key or index of the loss in the model's output", type=_key, metavar="KEY"
    )
    only_loss: bool = _flag(False, "return the loss alone, and keep nothing else for it")
    precision: str | None = _flag(
        None, "compute in this dtype under autocast; -true casts parameters too", choices=PRECISIONS
    )
    backward: str = "autograd"
    batch: str | None = None
    outputs: str | None = None
    reduce_dtype: torch.dtype | str | None = _flag(
        None, "dtype in which ranks add up gradients", choices=DTYPES
    )
    seed: int | None = None
    dynamic: bool = True
    max_programs: int = MAX_PROGRAMS
    validate: bool = _flag(
        False, "run the program before and after each pass, and fail if a result differs"
    )
    validate_limit: float | None = _flag(
        None,
        "validate programs of up to this much work a run (default: 2e10, some seconds)",
        type=positive("a number of FLOPs, such as 1e11"),
        metavar="FLOPS",
    )
    prove: bool = _flag(
        False, "prove, without running it, that what each rank runs equals the captured program"
    )
    sync: bool = True
    weights: Path | str | None = None
    optimizers: Optimizer | Sequence[Optimizer] = ()
    timeout: float | None = None
    twin: Callable[[], tuple[str, Example]] | None = None

    @property
    def has_processes(self) -> bool:
        """True if each device has a process of its own; else this process runs all of them."""
        return BACKENDS[self.backend].has_processes


@dataclass(frozen=True, eq=False)
class Request(CompileOptions):
    """A model to compile, its example batch, and the options.

    Once it is checked (`checks.check_request`), `mesh` is a Mesh, or None while a planner is to
    choose it, `program` a Program, and `artifact` an Artifact.
    """

    model: nn.Module
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None

    @property
    def devices(self) -> Mesh:
        """The mesh, or a placeholder of all the cluster's devices until the plan chooses one."""
        if self.mesh is None and self.cluster is not None:
            from shardweave.planners.cost.presets import find_cluster

            return Mesh(data=find_cluster(self.cluster).num_devices)
        assert isinstance(self.mesh, Mesh)
        return self.mesh

    def on_mesh_of(self, plan: Plan | None) -> Request:
        """Return the request with the plan's mesh, if the planner was to choose the mesh. Raises
        ValueError if there are processes, but not one for each of that mesh's devices."""
        if self.mesh is not None or plan is None:
            return self
        mesh, count = Mesh(**plan.mesh), self.devices.num_devices
        if self.has_processes and mesh.num_devices != count:
            raise ValueError(
                f"the planner's mesh uses {mesh.num_devices} of the cluster's {count} devices, "
                f"but a process runs for each device; give a mesh of {count} devices."
            )
        return replace(self, mesh=mesh)


def mesh_for(options: CompileOptions, num_processes: int | None = None) -> Mesh | None:
    """Return the given mesh, or the mesh of the program, the artifact (which is read) or the plan;
    None if a planner is to choose it.

    num_processes: determines an axis of size -1: the processes divided by the other axes. Raises
    ValueError for a mesh that differs from a given program's or artifact's.
    """
    mesh = options.mesh
    if mesh is not None and not isinstance(mesh, str):
        from shardweave.passes.pipeline import as_mesh

        mesh = as_mesh(mesh, num_processes)
    elif mesh is not None:
        mesh = Mesh.parse(mesh, num_processes)
    if options.program is not None:
        return _own_mesh("program", loaded(options.program).mesh or Mesh(), mesh)
    if options.artifact is not None:
        assert not isinstance(options.artifact, str)
        own = options.artifact.mesh  # pyright: ignore[reportAttributeAccessIssue]
        return _own_mesh("artifact", own, mesh)
    if mesh is not None or options.cluster is not None:
        return mesh
    if options.plan is None or (isinstance(options.plan, str) and options.plan in PLANNERS):
        return Mesh()
    from shardweave.planners.planning import mesh_of_plan

    return mesh_of_plan(options.plan) or Mesh()


def _own_mesh(kind: str, own: Mesh, mesh: Mesh | None) -> Mesh:
    """Return `own`, a program's or artifact's mesh. Raises ValueError if `mesh` is another; an axis
    of `mesh` may be split into parts in `own`."""
    if mesh is not None and mesh.on_parts_of(own) != own:
        raise ValueError(
            f"the {kind} is for mesh {own}, but mesh {mesh} is given; leave the mesh out, or "
            f"make the {kind} for that mesh."
        )
    return own


def loaded(program: Program | Path | str) -> Program:
    """Return a program; loads it if a path is given."""
    from shardweave.ir.program.program import Program

    return program if isinstance(program, Program) else Program.load(program)


MAKING = (
    "plan", "cluster", "sequence_parallel", "zero", "passes", "precision", "reduce_dtype",
    "validate", "prove",
)  # fmt: skip
"""Options that affect how a model becomes a program."""


def check_given_alone(options: CompileOptions) -> None:
    """Raise ValueError for options that have no effect beside a given program or artifact."""
    for given, names in (("program", (*MAKING, "artifact")), ("artifact", ("validate", "prove"))):
        useless = [name for name in names if getattr(options, name)]
        if getattr(options, given) is not None and useless:
            raise ValueError(
                f"a given {given} is run unchanged, so that {', '.join(useless)} would have no "
                f"effect; leave it out, or make the {given} with it."
            )
