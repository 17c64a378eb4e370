"""shardweave compiles a PyTorch training step for a device mesh."""

from __future__ import annotations

import warnings
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from shardweave.ir.plugins import load_plugins

if TYPE_CHECKING:
    from shardweave.backends.optimizers.hook import OptimizerNote
    from shardweave.backends.reference.virtual_ranks import ReplicaMismatchError
    from shardweave.backends.registry import register_backend
    from shardweave.backends.state.mesh_tensor import full_tensor
    from shardweave.backends.state.saved_state import CheckpointError
    from shardweave.backends.step.compiled_module import CompiledModule
    from shardweave.backends.watch.agreement import AgreementError
    from shardweave.backends.watch.watch import LostRankError
    from shardweave.driver.artifact.artifact import ArtifactError
    from shardweave.driver.artifact.precompile import precompile
    from shardweave.driver.checking.validate import TooLargeError, ValidationError
    from shardweave.driver.checking.validate import run_and_validate as run_passes
    from shardweave.driver.diff import diff
    from shardweave.driver.explore import Exploration, explore
    from shardweave.driver.models.hf_experts import choose_experts
    from shardweave.driver.processes.launch import WorkerError
    from shardweave.driver.processes.world import RankZeroError
    from shardweave.driver.step.compile import compile
    from shardweave.driver.step.step import Step
    from shardweave.driver.training.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
    from shardweave.driver.training.progress import Progress
    from shardweave.ir.capture.capture import CaptureError, capture
    from shardweave.ir.capture.seeded import SeededRandom as seeded
    from shardweave.ir.mesh.mesh import Axis, Mesh
    from shardweave.ir.mesh.placement import Sharding
    from shardweave.ir.notes import CaptureNote, TorchNote
    from shardweave.ir.ops.registry import register_op
    from shardweave.ir.ops.spec import OpSpec
    from shardweave.ir.program.program import Program
    from shardweave.ir.program.text import ProgramTextError
    from shardweave.ir.proof.ops import ProofError
    from shardweave.ir.proof.prove import Proof, prove
    from shardweave.ir.verify.program import VerifyError, verify
    from shardweave.passes.notes import PassNote, PlanNote
    from shardweave.passes.pipeline import PassError, PassPipeline
    from shardweave.passes.registry import register_pass
    from shardweave.planners.cost.cluster import Cluster, ClusterError
    from shardweave.planners.plan.plan import Plan
    from shardweave.planners.plan.plan_parts import PlanError
    from shardweave.planners.planning import plan
    from shardweave.planners.predict.pipeline.simulation import PipelineSimulation
    from shardweave.planners.predict.predict import simulate_step as simulate
    from shardweave.planners.registry import register_planner
    from shardweave.planners.simulate.simulation import Simulation

    parse = Program.parse
    load = Program.load

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "ArtifactError",
    "Axis",
    "CaptureError",
    "CaptureNote",
    "Checkpoint",
    "CheckpointError",
    "Cluster",
    "ClusterError",
    "CompiledModule",
    "Exploration",
    "LostRankError",
    "Mesh",
    "OpSpec",
    "OptimizerNote",
    "PassError",
    "PassNote",
    "PassPipeline",
    "PipelineSimulation",
    "Plan",
    "PlanError",
    "PlanNote",
    "Program",
    "ProgramTextError",
    "Progress",
    "Proof",
    "ProofError",
    "RankZeroError",
    "ReplicaMismatchError",
    "Sharding",
    "Simulation",
    "Step",
    "TooLargeError",
    "TorchNote",
    "ValidationError",
    "VerifyError",
    "WorkerError",
    "capture",
    "choose_experts",
    "compile",
    "diff",
    "explore",
    "full_tensor",
    "load",
    "load_checkpoint",
    "parse",
    "plan",
    "precompile",
    "prove",
    "register_backend",
    "register_op",
    "register_pass",
    "register_planner",
    "run_passes",
    "save_checkpoint",
    "seeded",
    "simulate",
    "verify",
]

_HOMES = {
    "AgreementError": "backends.watch.agreement:AgreementError",
    "ArtifactError": "driver.artifact.artifact:ArtifactError",
    "Axis": "ir.mesh.mesh:Axis",
    "CaptureError": "ir.capture.capture:CaptureError",
    "CaptureNote": "ir.notes:CaptureNote",
    "Checkpoint": "driver.training.checkpoints:Checkpoint",
    "CheckpointError": "backends.state.saved_state:CheckpointError",
    "Cluster": "planners.cost.cluster:Cluster",
    "ClusterError": "planners.cost.cluster:ClusterError",
    "Exploration": "driver.explore:Exploration",
    "LostRankError": "backends.watch.watch:LostRankError",
    "Mesh": "ir.mesh.mesh:Mesh",
    "OpSpec": "ir.ops.spec:OpSpec",
    "OptimizerNote": "backends.optimizers.hook:OptimizerNote",
    "PassError": "passes.pipeline:PassError",
    "PassNote": "passes.notes:PassNote",
    "PassPipeline": "passes.pipeline:PassPipeline",
    "PipelineSimulation": "planners.predict.pipeline.simulation:PipelineSimulation",
    "Plan": "planners.plan.plan:Plan",
    "PlanError": "planners.plan.plan_parts:PlanError",
    "PlanNote": "passes.notes:PlanNote",
    "Program": "ir.program.program:Program",
    "ProgramTextError": "ir.program.text:ProgramTextError",
    "Progress": "driver.training.progress:Progress",
    "Proof": "ir.proof.prove:Proof",
    "ProofError": "ir.proof.ops:ProofError",
    "RankZeroError": "driver.processes.world:RankZeroError",
    "ReplicaMismatchError": "backends.reference.virtual_ranks:ReplicaMismatchError",
    "Sharding": "ir.mesh.placement:Sharding",
    "Simulation": "planners.simulate.simulation:Simulation",
    "CompiledModule": "backends.step.compiled_module:CompiledModule",
    "Step": "driver.step.step:Step",
    "TooLargeError": "driver.checking.validate:TooLargeError",
    "TorchNote": "ir.notes:TorchNote",
    "ValidationError": "driver.checking.validate:ValidationError",
    "VerifyError": "ir.verify.program:VerifyError",
    "WorkerError": "driver.processes.launch:WorkerError",
    "capture": "ir.capture.capture:capture",
    "choose_experts": "driver.models.hf_experts:choose_experts",
    "compile": "driver.step.compile:compile",
    "diff": "driver.diff:diff",
    "explore": "driver.explore:explore",
    "full_tensor": "backends.state.mesh_tensor:full_tensor",
    "integrations": "driver.integrations",
    "load": "ir.program.program:Program.load",
    "load_checkpoint": "driver.training.checkpoints:load_checkpoint",
    "parse": "ir.program.program:Program.parse",
    "precompile": "driver.artifact.precompile:precompile",
    "plan": "planners.planning:plan",
    "prove": "ir.proof.prove:prove",
    "register_op": "ir.ops.registry:register_op",
    "register_pass": "passes.registry:register_pass",
    "register_backend": "backends.registry:register_backend",
    "register_planner": "planners.registry:register_planner",
    "run_passes": "driver.checking.validate:run_and_validate",
    "save_checkpoint": "driver.training.checkpoints:save_checkpoint",
    "seeded": "ir.capture.seeded:SeededRandom",
    "simulate": "planners.predict.predict:simulate_step",
    "verify": "ir.verify.program:verify",
}


import_module("shardweave.planners.registry")  # registers the passes that stand in planners


_RENAMED = {"random": "seeded"}
"""New names by former name; the next version drops the former names."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch alone takes seconds to import."""
    if name in _RENAMED:
        new = _RENAMED[name]
        warnings.warn(f"sw.{name} is sw.{new} now", DeprecationWarning, stacklevel=2)
        return __getattr__(new)
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'shardweave' has no attribute '{name}'")
    load_plugins()
    module, _, path = home.partition(":")
    value = import_module(f"shardweave.{module}")
    value = attrgetter(path)(value) if path else value
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
