"""decompose-collectives: exact and proved, what becomes a ring, and what it gains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardweave.ir.dialects import dist
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import ops_of_parts
from shardweave.ir.proof.prove import prove
from shardweave.ir.verify.program import verify
from shardweave.passes.pipeline import as_mesh, run_passes
from shardweave.planners.lowering.plan_passes import plan_passes
from shardweave.planners.lowering.stages.choose import with_pipeline
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured, megatron


def decomposed(model: str, mesh: str, **options: Any) -> Program:
    spec = SPECS.get(model, model)
    plan = megatron(spec, mesh, sequence_parallel=True)
    plan = replace(plan, **{"decompose": ("*",), **options})
    plan = with_pipeline(plan, captured(spec).program, as_mesh(mesh))
    return run_passes(captured(spec).program, plan_passes(plan), mesh=mesh)


def kinds(program: Program) -> list[str]:
    return [op.kind() for op in ops_of_parts(program) if isinstance(op, dist.DistOp)]


MESHES: list[tuple[str, dict[str, Any]]] = [
    ("tensor=2", {}),
    ("tensor=4", {"recompute": "layer"}),
    ("tensor=8", {"schedule": "list", "cluster": "testbed:nodes=8"}),
    ("data=2,tensor=2", {"zero": 3, "recompute": "after-products"}),
    ("tensor=2,data=2", {"batch_split": 2, "schedule": "cross-pass", "recompute": "layer"}),
    ("tensor=2", {"batch_split": 2, "loss_chunks": 2, "offload": "all"}),
    ("stage=2,tensor=2", {"recompute": "layer"}),
    ("tensor=2", {"pipeline": Pipeline((("*",),), 2)}),
]


@pytest.mark.parametrize(("mesh", "options"), MESHES)
def test_decomposed_steps_are_eager_s(mesh: str, options: dict[str, Any]) -> None:
    program = decomposed("gpt", mesh, **options)
    assert "shift" in kinds(program)
    assert not verify(program)
    assert Program.parse(str(program)) == program
    assert_equals_eager(program, captured(SPECS["gpt"]))
    prove(program, against=captured(SPECS["gpt"]).program)


@pytest.mark.parametrize("model", ["gpt2", "llama", "bert", "t5"])
def test_models_are_eager_s(model: str) -> None:
    program = decomposed(model, "data=2,tensor=4")
    assert "shift" in kinds(program)
    assert_equals_eager(program, captured(SPECS[model]))
    prove(program, against=captured(SPECS[model]).program)
