"""Plans of planners run as they are: none is refused, and all equal eager on the virtual mesh."""

from __future__ import annotations

from typing import Any

import pytest

from shardweave.driver.plans import partition
from shardweave.driver.plans import plan as plan_program
from shardweave.ir.mesh import Mesh
from shardweave.planners.plan import Plan
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured

GPT = "gpt:layers=4,hidden=16,heads=4,vocab=32,seq=8,batch=8"
CLUSTER = "testbed:nodes=4"
NODE = "dgx-a100:nodes=1"


def check(spec: str, planner: str, mesh: str, cluster: str, **options: Any) -> Plan:
    """Plan, write the plan down and read it again, and run it. mesh: empty: the planner's."""
    found = captured(spec)
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
        ("exhaustive", "", CLUSTER, {"simulate": 4}),
        ("exhaustive", "data=2,tensor=2", CLUSTER, {"simulate": 4, "zero": 2}),
        ("oppa", "", CLUSTER, {"trials": 6}),
        ("oppa", "", NODE, {"trials": 6}),
    ],
)
@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama", "bert", "t5"])
def test_plans_of_all_planners_run_as_planned(
    name: str, planner: str, mesh: str, cluster: str, options: dict[str, Any]
) -> None:
    check({**SPECS, "gpt": GPT}[name], planner, mesh, cluster, **options)
