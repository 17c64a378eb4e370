"""Plans of planners run as they are: none is refused, and all equal eager on the virtual mesh."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from shardweave.backends.reference.reference import run_reference
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.lowering.partition import partition
from shardweave.planners.plan.plan import Plan
from shardweave.planners.planning import plan as plan_program
from shardweave.tests.zoo import SPECS, Captured, assert_equals_eager, captured

GPT = "gpt:layers=4,hidden=16,heads=4,vocab=32,seq=8,batch=8"
CLUSTER = "testbed:nodes=4"
NODE = "dgx-a100:nodes=1"


@cache
def in_float64(spec: str) -> Captured:
    """A captured model that computes no part of itself in float32.

    The RMS norms of llama and t5 do; a plan that cuts the hidden dim sums them in another order,
    and float32 has only seven digits. Where there is such a part, what is expected is the whole
    program in float64.
    """
    found = captured(spec)
    text = str(found.program)
    if "f32" not in text:
        return found
    program = Program.parse(text.replace("f32", "f64"))
    values = {
        key: value.double() if value.dtype == torch.float32 else value
        for key, value in found.values.items()
    }
    results = run_reference(program, values)
    loss = results["output", "0"].item()
    assert loss == pytest.approx(found.loss, rel=1e-6)
    gradients = {name: value for (kind, name), value in results.items() if kind == "grad"}
    return replace(found, program=program, values=values, loss=loss, gradients=gradients)


def check(spec: str, planner: str, mesh: str, cluster: str, **options: Any) -> Plan:
    """Plan, write the plan down and read it again, and run it. mesh: empty: the planner's."""
    found = in_float64(spec)
    goal = Mesh.parse(mesh) if mesh else None
    plan = plan_program(found.program, goal, planner, cluster=cluster, **options)
    plan = Plan.from_json(plan.to_json())
    assert_equals_eager(partition(found.program, Mesh(**plan.mesh), plan), found)
    return plan


def test_pipeline_of_a_planner_runs_as_planned() -> None:
    plan = check(GPT, "amp", "pipeline=2", "testbed:nodes=2", simulate=0)
    assert plan.pipeline is not None
    assert len(plan.pipeline.stages) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planner", "mesh", "cluster", "options"),
    [
        ("amp", "", CLUSTER, {}),
        ("amp", "pipeline=2,data=2", CLUSTER, {"zero": 2}),
        ("amp", "pipeline=2,tensor=2,data=2", NODE, {}),
        ("amp", "pipeline=2,data=8", "amp-het-cluster", {}),
        ("oases", "data=2,tensor=2", CLUSTER, {}),
        ("oases", "tensor=4", CLUSTER, {}),
        ("axonn", "", CLUSTER, {}),
        ("axonn", "", NODE, {}),
        ("oppa", "", CLUSTER, {"trials": 6}),
        ("oppa", "", NODE, {"trials": 6}),
    ],
)
@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama", "bert", "t5"])
def test_plans_of_all_planners_run_as_planned(
    name: str, planner: str, mesh: str, cluster: str, options: dict[str, Any]
) -> None:
    check({**SPECS, "gpt": GPT}[name], planner, mesh, cluster, **options)
