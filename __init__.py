"""shardweave compiles a PyTorch training step for a device mesh."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardweave.backends.grad_scaler import GradScaler
    from shardweave.backends.gradient_norm import clip_grad_norm_
    from shardweave.backends.saved_state import CheckpointError
    from shardweave.backends.step import Step
    from shardweave.backends.whole import full_tensor
    from shardweave.driver.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
    from shardweave.driver.compile import compile
    from shardweave.driver.diff import diff
    from shardweave.driver.explore import Exploration, explore, explore_plans
    from shardweave.driver.hf_experts import choose_experts
    from shardweave.driver.plans import plan, simulate_plan
    from shardweave.driver.progress import Progress
    from shardweave.driver.validate import ValidationError, run_passes
    from shardweave.ir.capture.capture import CaptureError, capture
    from shardweave.ir.capture.seeded import SeededRandom as random
    from shardweave.ir.mesh import Axis, Mesh
    from shardweave.ir.placement import Sharding
    from shardweave.ir.program import Program
    from shardweave.ir.proof.check import check_certificate
    from shardweave.ir.proof.ops import ProofError
    from shardweave.ir.proof.prove import Proof, prove
    from shardweave.ir.text import ProgramTextError
    from shardweave.ir.verify.program import VerifyError, check, verify
    from shardweave.passes.notes import PlanNote
    from shardweave.passes.pipeline import PassError, PassPipeline
    from shardweave.passes.registry import register_pass
    from shardweave.planners.cost.cluster import Cluster
    from shardweave.planners.cost.pipeline.simulation import PipelineSimulation
    from shardweave.planners.cost.simulation import Simulation
    from shardweave.planners.plan import Plan
    from shardweave.planners.predict import simulate_step as simulate

    parse = Program.parse
    load = Program.load

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "CaptureError",
    "Checkpoint",
    "CheckpointError",
    "Cluster",
    "Exploration",
    "GradScaler",
    "Mesh",
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
    "check_certificate",
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
    "register_pass",
    "run_passes",
    "save_checkpoint",
    "simulate",
    "simulate_plan",
    "verify",
]

_HOMES = {
    "clip_grad_norm_": "backends.gradient_norm:clip_grad_norm_",
    "Axis": "ir.mesh:Axis",
    "CaptureError": "ir.capture.capture:CaptureError",
    "Checkpoint": "driver.checkpoints:Checkpoint",
    "CheckpointError": "backends.saved_state:CheckpointError",
    "Cluster": "planners.cost.cluster:Cluster",
    "Exploration": "driver.explore:Exploration",
    "GradScaler": "backends.grad_scaler:GradScaler",
    "Mesh": "ir.mesh:Mesh",
    "PassError": "passes.pipeline:PassError",
    "PassPipeline": "passes.pipeline:PassPipeline",
    "PipelineSimulation": "planners.cost.pipeline.simulation:PipelineSimulation",
    "Plan": "planners.plan:Plan",
    "PlanNote": "passes.notes:PlanNote",
    "Program": "ir.program:Program",
    "Progress": "driver.progress:Progress",
    "Proof": "ir.proof.prove:Proof",
    "ProofError": "ir.proof.ops:ProofError",
    "ProgramTextError": "ir.text:ProgramTextError",
    "Sharding": "ir.placement:Sharding",
    "Simulation": "planners.cost.simulation:Simulation",
    "Step": "backends.step:Step",
    "ValidationError": "driver.validate:ValidationError",
    "VerifyError": "ir.verify.program:VerifyError",
    "capture": "ir.capture.capture:capture",
    "check": "ir.verify.program:check",
    "check_certificate": "ir.proof.check:check_certificate",
    "choose_experts": "driver.hf_experts:choose_experts",
    "compile": "driver.compile:compile",
    "diff": "driver.diff:diff",
    "explore": "driver.explore:explore",
    "explore_plans": "driver.explore:explore_plans",
    "full_tensor": "backends.whole:full_tensor",
    "load": "ir.program:Program.load",
    "load_checkpoint": "driver.checkpoints:load_checkpoint",
    "parse": "ir.program:Program.parse",
    "plan": "driver.plans:plan",
    "prove": "ir.proof.prove:prove",
    "random": "ir.capture.seeded:SeededRandom",
    "register_pass": "passes.registry:register_pass",
    "run_passes": "driver.validate:run_passes",
    "save_checkpoint": "driver.checkpoints:save_checkpoint",
    "simulate": "planners.predict:simulate_step",
    "simulate_plan": "driver.plans:simulate_plan",
    "verify": "ir.verify.program:verify",
}


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
