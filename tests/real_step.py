"""A small GPT for tests of tools: captured, planned, and compared with eager PyTorch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from shardweave.driver.check import compare, run_eager
from shardweave.driver.measure import gather
from shardweave.driver.models import Example, build_example
from shardweave.driver.virtual_step import VirtualStep
from shardweave.ir.capture import capture
from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program
from shardweave.passes.apply_plan import ApplyPlanPass
from shardweave.passes.pipeline import PassPipeline
from shardweave.planners.megatron import plan_megatron

MODEL = "gpt:layers=2,hidden=16,heads=2,vocab=32,seq=8,batch=4"
MESH = Mesh(data=2, tensor=2)


@cache
def example() -> Example:
    """The model and its batch, in float64."""
    return build_example(MODEL, dtype=torch.float64)


@cache
def captured() -> Program:
    """The global program. Not to be changed; passes work on a copy."""
    return capture(example().module, kwargs=example().kwargs)


@cache
def annotated() -> Program:
    """The global program on a mesh of four devices with the shardings of Megatron's plan."""
    program = captured().clone()
    program.set_mesh(MESH)
    return PassPipeline([ApplyPlanPass.of(plan_megatron(program, MESH))]).run(program)


@cache
def local(passes: str = "preset:partition") -> Program:
    """The program of each device after these passes."""
    return PassPipeline(passes).run(annotated())


def save(program: Program, folder: Path, name: str = "step.mlir") -> Path:
    """Write a program and return where it is."""
    path = folder / name
    program.save(path)
    return path


def assert_equals_eager(program: Program) -> None:
    """Assert that loss and gradients on the virtual mesh are those of eager PyTorch."""
    model, batch = example().module, example().kwargs
    step = VirtualStep(program, model)
    result = compare(gather(step, step(**batch)), run_eager(model, batch), torch.float64)
    assert result.loss_error <= result.bound
    assert result.max_rel_grad_error <= result.bound
