"""One small GPT for tests of tools: captured, annotated, partitioned, compared with eager."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import PassPipeline, run_passes
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.tests import zoo

MODEL = "gpt:layers=2,hidden=16,heads=2,vocab=32,seq=8,batch=4"
MESH = Mesh(data=2, tensor=2)


@cache
def captured() -> Program:
    """The global program. Not to be changed; passes work on a copy."""
    return zoo.captured(MODEL).program


@cache
def annotated() -> Program:
    """The global program on a mesh of four devices with the shardings of Megatron's plan."""
    return run_passes(captured(), [ApplyPlanPass.of(zoo.megatron(MODEL, str(MESH)))], mesh=MESH)


@cache
def local(passes: str = "preset:partition") -> Program:
    """The program of each device after these passes."""
    return PassPipeline(passes).run(annotated())


PROPAGATION = "split-addmm,add-pending-sums,propagate-shardings"


def save(program: Program, folder: Path, name: str = "step.mlir") -> Path:
    """Write a program and return where it is."""
    path = folder / name
    program.save(path)
    return path


def assert_equals_eager(program: Program) -> None:
    """Assert that loss and gradients on the virtual mesh are those of eager PyTorch."""
    zoo.assert_equals_eager(program, zoo.captured(MODEL))
