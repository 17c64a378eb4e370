"""What planners price is what runs: the same text, the same bytes, whatever the plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import pytest

from shardweave.ir.dialects.annotations import copy_of
from shardweave.ir.dialects.dist import CollectiveOp, DistOp, sent_bytes
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import PassPipeline
from shardweave.planners.axonn.planner import plan_axonn
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.lowering.plan_passes import plan_passes
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.oases.degree import Axes, plan_of_degrees
from shardweave.planners.oases.program import ChainOptions, ProgramChain, chain_of_program
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.replicated import plan_replicated
from shardweave.planners.predict.predict import simulate_plan, simulation_of
from shardweave.tests.zoo import captured

SPEC = "gpt:layers=2,hidden=16,heads=4,vocab=32,seq=8,batch=8"
CLUSTER = find_cluster("testbed")
PLANNERS = ("megatron", "replicated", "trials", "axonn", "oases")
"""`trials` has the space of the baselines exhaustive, random and boosted-trees; amp's stages are of
the programs of megatron's plans."""

FEW = 4
MANY = 50


@cache
def program() -> Program:
    return captured(SPEC).program


@cache
def chain() -> ProgramChain:
    options = ChainOptions("after-communication")
    return chain_of_program(
        program(), Axes.of(Mesh(tensor=4), "tensor", "data", 2), find_cluster("oases-3090"), options
    )


def random_plan(planner: str, random: Random) -> Plan:
    """A plan of a planner's space."""
    if planner == "oases":
        degrees = [
            random.choice(sorted(set(cuts) & set(chain().prices))) for cuts in chain().space.cuts
        ]
        plan = plan_of_degrees(program(), chain().space, degrees)
        return replace(
            plan,
            recompute=random.choice(("none", "layer", "after-communication")),
            schedule=random.choice(("", "cross-pass")),
        )
    data, tensor = random.choice(((1, 2), (2, 1), (2, 2), (1, 4), (4, 1)))
    mesh = Mesh(data=data, tensor=tensor)
    if planner == "replicated":
        return plan_replicated(program(), mesh)
    if planner == "axonn":
        sizes = random.choice(((1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 1, 4), (4, 1, 1)))
        return plan_axonn(program(), Mesh(**dict(zip("xyz", sizes, strict=True))), cluster=CLUSTER)
    plan = plan_megatron(program(), mesh, sequence_parallel=random.random() < 0.5)
    if planner == "trials":
        split = random.choice([n for n in (1, 2, 4) if 8 // data % n == 0])
        plan = replace(
            plan,
            recompute=random.choice(("none", "layer", "after-communication")),
            batch_split=split,
            schedule=random.choice(("", "blocking", "in-order", "sub-batch", "cross-pass")),
        )
    return plan


def what_runs(plan: Plan) -> Program:
    """As the driver makes it: by passes, each verified."""
    target = program().clone()
    target.set_mesh(Mesh(**plan.mesh))
    return PassPipeline(plan_passes(plan)).run(target)


def assert_priced_as_it_runs(planner: str, seeds: range) -> None:
    for seed in seeds:
        plan = random_plan(planner, Random(f"{planner} {seed}"))
        local = what_runs(plan)
        priced = local_program(program(), plan)
        assert str(priced) == str(local), f"{planner}, seed {seed}"
        assert priced.stats().collectives == local.stats().collectives


@pytest.mark.parametrize("planner", PLANNERS)
def test_priced_program_is_the_one_that_runs(planner: str) -> None:
    assert_priced_as_it_runs(planner, range(FEW))


@pytest.mark.slow
@pytest.mark.parametrize("planner", PLANNERS)
def test_priced_program_is_the_one_that_runs_for_fifty_plans(planner: str) -> None:
    assert_priced_as_it_runs(planner, range(FEW, FEW + MANY))


def messages_of(local: Program) -> dict[str, float]:
    """Bytes that a rank sends by kind of collective, merged messages taken as one."""
    assert local.mesh is not None
    found: dict[str, float] = {}
    for op in local.ops:
        if isinstance(op, CollectiveOp):
            assert isinstance(op, DistOp)
            kind = op.name.replace("start_", "")
            found[kind] = found.get(kind, 0.0) + sent_bytes(op, local.mesh)
    return found


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_degree_of_oases_is_priced_on_the_program_of_its_plan(degree: int) -> None:
    space = chain().space
    plan = plan_of_degrees(program(), space, [degree] * len(space.blocks))
    local = what_runs(replace(plan, schedule="blocking"))
    priced = chain().prices[degree].program
    assert messages_of(local) == messages_of(priced)
    shapes = [str(op.result_types) for op in local.ops if op.name.startswith("aten")]
    assert shapes == [str(op.result_types) for op in priced.ops if op.name.startswith("aten")]
    assert {copy_of(op) for op in priced.ops} == {None, (0,), (1,)}


def test_prediction_is_the_simulation_of_the_program_that_runs() -> None:
    plan = random_plan("trials", Random(0))
    predicted = simulate_plan(program(), plan, find_cluster("oases-3090"))
    step = simulation_of(program(), plan, find_cluster("oases-3090"))
    assert predicted.time_s == step.time_s
