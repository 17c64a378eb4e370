"""shardweave compiles a PyTorch training step for a device mesh."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardweave.backends.distributed.gradient_norm import clip_grad_norm_
    from shardweave.backends.state.saved_state import CheckpointError
    from shardweave.backends.step.compiled_module import CompiledModule
    from shardweave.backends.step.grad_scaler import GradScaler
    from shardweave.backends.step.step import Step
    from shardweave.backends.step.whole import full_tensor
    from shardweave.driver.checking.validate import ValidationError
    from shardweave.driver.checking.validate import run_and_validate as run_passes
    from shardweave.driver.diff import diff
    from shardweave.driver.explore import Exploration, explore, explore_plans
    from shardweave.driver.models.hf_experts import choose_experts
    from shardweave.driver.step.compile import compile
    from shardweave.driver.training.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
    from shardweave.driver.training.progress import Progress
    from shardweave.ir.capture.capture import CaptureError, capture
    from shardweave.ir.capture.seeded import SeededRandom as random
    from shardweave.ir.mesh.mesh import Axis, Mesh
    from shardweave.ir.mesh.placement import Sharding
    from shardweave.ir.ops.registry import register_op
    from shardweave.ir.ops.spec import OpSpec
    from shardweave.ir.program.program import Program
    from shardweave.ir.program.text import ProgramTextError
    from shardweave.ir.proof.ops import ProofError
    from shardweave.ir.proof.prove import Proof, prove
    from shardweave.ir.verify.program import VerifyError, check, verify
    from shardweave.passes.notes import PlanNote
    from shardweave.passes.pipeline import PassError, PassPipeline
    from shardweave.passes.registry import register_pass
    from shardweave.planners.cost.cluster import Cluster
    from shardweave.planners.plan.plan import Plan
    from shardweave.planners.planning import plan, simulate_plan
    from shardweave.planners.predict.pipeline.simulation import PipelineSimulation
    from shardweave.planners.predict.predict import simulate_step as simulate
    from shardweave.planners.registry import register_planner
    from shardweave.planners.simulate.simulation import Simulation

    parse = Program.parse
    load = Program.load

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "CaptureError",
    "Checkpoint",
    "CheckpointError",
    "Cluster",
    "CompiledModule",
    "Exploration",
    "GradScaler",
    "Mesh",
    "OpSpec",
    "PassError",
    "PassPipeline",
    "PipelineSimulation",
    "Plan",
    "PlanNote",
    "Program",
    "ProgramTextError",
    "Progress",
    "Proof",
    "ProofError",
    "Sharding",
    "Simulation",
    "Step",
    "ValidationError",
    "VerifyError",
    "capture",
    "check",
    "choose_experts",
    "clip_grad_norm_",
    "compile",
    "diff",
    "explore",
    "explore_plans",
    "full_tensor",
    "load",
    "load_checkpoint",
    "parse",
    "plan",
    "prove",
    "random",
    "register_op",
    "register_pass",
    "register_planner",
    "run_passes",
    "save_checkpoint",
    "simulate",
    "simulate_plan",
    "verify",
]

_HOMES = {
    "clip_grad_norm_": "backends.distributed.gradient_norm:clip_grad_norm_",
    "Axis": "ir.mesh.mesh:Axis",
    "CaptureError": "ir.capture.capture:CaptureError",
    "Checkpoint": "driver.training.checkpoints:Checkpoint",
    "CheckpointError": "backends.state.saved_state:CheckpointError",
    "Cluster": "planners.cost.cluster:Cluster",
    "Exploration": "driver.explore:Exploration",
    "GradScaler": "backends.step.grad_scaler:GradScaler",
    "Mesh": "ir.mesh.mesh:Mesh",
    "OpSpec": "ir.ops.spec:OpSpec",
    "PassError": "passes.pipeline:PassError",
    "PassPipeline": "passes.pipeline:PassPipeline",
    "PipelineSimulation": "planners.predict.pipeline.simulation:PipelineSimulation",
    "Plan": "planners.plan.plan:Plan",
    "PlanNote": "passes.notes:PlanNote",
    "Program": "ir.program.program:Program",
    "Progress": "driver.training.progress:Progress",
    "Proof": "ir.proof.prove:Proof",
    "ProofError": "ir.proof.ops:ProofError",
    "ProgramTextError": "ir.program.text:ProgramTextError",
    "Sharding": "ir.mesh.placement:Sharding",
    "Simulation": "planners.simulate.simulation:Simulation",
    "CompiledModule": "backends.step.compiled_module:CompiledModule",
    "Step": "backends.step.step:Step",
    "ValidationError": "driver.checking.validate:ValidationError",
    "VerifyError": "ir.verify.program:VerifyError",
    "capture": "ir.capture.capture:capture",
    "check": "ir.verify.program:check",
    "choose_experts": "driver.models.hf_experts:choose_experts",
    "compile": "driver.step.compile:compile",
    "diff": "driver.diff:diff",
    "explore": "driver.explore:explore",
    "explore_plans": "driver.explore:explore_plans",
    "full_tensor": "backends.step.whole:full_tensor",
    "load": "ir.program.program:Program.load",
    "load_checkpoint": "driver.training.checkpoints:load_checkpoint",
    "parse": "ir.program.program:Program.parse",
    "plan": "planners.planning:plan",
    "prove": "ir.proof.prove:prove",
    "random": "ir.capture.seeded:SeededRandom",
    "register_op": "ir.ops.registry:register_op",
    "register_pass": "passes.registry:register_pass",
    "register_planner": "planners.registry:register_planner",
    "run_passes": "driver.checking.validate:run_and_validate",
    "save_checkpoint": "driver.training.checkpoints:save_checkpoint",
    "simulate": "planners.predict.predict:simulate_step",
    "simulate_plan": "planners.planning:simulate_plan",
    "verify": "ir.verify.program:verify",
}


import_module("shardweave.planners.registry")  # registers the passes that stand in planners


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch alone takes seconds to import."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'shardweave' has no attribute '{name}'")
    module, _, path = home.partition(":")
    value = attrgetter(path)(import_module(f"shardweave.{module}"))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
