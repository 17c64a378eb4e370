"""Calling planners: what each asks for, and what is said where it lacks."""

from __future__ import annotations

import pytest

import shardweave as sw
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.call import call_planner, chooses_mesh, planner_options
from shardweave.planners.plan.plan import Plan
from shardweave.planners.registry import PLANNERS, register_planner
from shardweave.tests.zoo import SPECS, captured


def plan_alone(program: Program, mesh: Mesh | None, *, note: str = "") -> Plan:
    """All on one device."""
    return Plan(mesh={"data": 1}, planner="alone", notes=(note,) if note else ())


def program() -> Program:
    return captured(SPECS["gpt"]).program


def test_options_are_what_a_user_may_set() -> None:
    axes = ["tensor", "data", "replica", "context", "expert", "space"]
    options = [*axes, "sequence_parallel", "attention_parts", "expert_load"]
    assert list(planner_options("megatron")) == options
    assert "localize" not in planner_options("amp")
    assert chooses_mesh("amp")
    assert not chooses_mesh("replicated")


def test_plan_keeps_the_cluster_that_it_was_made_for() -> None:
    plan = call_planner("megatron", program(), None, cluster="testbed")
    assert plan.cluster == "testbed"


@pytest.mark.parametrize("planner", ["megatron", "replicated", "auto"])
def test_plan_of_more_replicas_than_samples_says_so(planner: str) -> None:
    cluster, options = "h100-pod:nodes=500", {"simulate": 1} if planner == "auto" else {}
    mesh = Mesh(data=500) if planner == "replicated" else None
    plan = call_planner(planner, program(), mesh, cluster=cluster, options=options)
    assert sum("parts idle: dim 0 of input" in note for note in plan.undone) == 1


def test_missing_mesh_cluster_planner_and_option_are_told_in_one_line() -> None:
    with pytest.raises(
        ValueError, match="'replicated' does not choose a mesh; give a mesh, as data="
    ):
        call_planner("replicated", program(), None)
    with pytest.raises(ValueError, match="'megatron' needs a cluster; give"):
        call_planner("megatron", program(), None)
    with pytest.raises(ValueError, match="no planner 'x'; use one of amp"):
        call_planner("x", program(), None)
    with pytest.raises(ValueError, match="option 'simulate' is -3, expected 0 or more"):
        call_planner("auto", program(), None, options={"simulate": -3})
    with pytest.raises(ValueError, match="option 'time_limit_s' is nan, expected 0 or more"):
        call_planner("auto", program(), None, options={"time_limit_s": float("nan")})
    with pytest.raises(ValueError, match="no option 'x'; its options are data"):
        call_planner("replicated", program(), Mesh(data=2), options={"x": 1})


def test_planner_of_ones_own_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANNERS, "alone", f"{__name__}:plan_alone")
    assert register_planner("alone", plan_alone) is plan_alone
    assert sw.plan(program(), planner="alone", note="mine").notes == ("mine",)
    [made] = sw.PassPipeline('plan-alone{note="mine"}').passes
    assert made.name == "plan-alone"
    with pytest.raises(ValueError, match=r"a planner 'auto' already, shardweave\.planners\.auto"):
        register_planner("auto", plan_alone)
    with pytest.raises(ValueError, match="is nested in a function"):
        register_planner("other", lambda program, mesh: plan_alone(program, mesh))
