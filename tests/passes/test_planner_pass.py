"""Any planner as a pass: the same shardings as its plan, with its own options."""

from __future__ import annotations

import pytest

from shardweave.ir.mesh.mesh import Mesh
from shardweave.passes.pipeline import PassPipeline, run_passes
from shardweave.passes.registry import find_pass
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.registry import PLANNERS
from shardweave.tests.ir_text import shardings
from shardweave.tests.zoo import SPECS, captured


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_is_a_pass_that_reads_back_from_its_text(planner: str) -> None:
    kind = find_pass(f"plan-{planner}")
    assert kind.name == f"plan-{planner}"
    [one] = PassPipeline(f'plan-{planner}{{cluster="testbed"}}').passes
    assert isinstance(one, kind)
    assert PassPipeline(str(one.spec())).passes == (one,)


def test_planner_pass_annotates_as_its_plan_does() -> None:
    program = captured(SPECS["gpt"]).program
    mesh = Mesh(data=2, tensor=2)
    by_pass = run_passes(program, "plan-megatron{sequence-parallel=true}", mesh=mesh)
    plan = plan_megatron(program, mesh, sequence_parallel=True)
    assert by_pass == run_passes(program, [ApplyPlanPass.of(plan)], mesh=mesh)


def test_program_without_a_mesh_takes_the_one_that_the_planner_chooses() -> None:
    program = captured(SPECS["gpt"]).program
    found = run_passes(program, 'plan-megatron{cluster="perlmutter:nodes=2"}')
    assert found.mesh == Mesh(data=2, tensor=4)
    assert shardings(found.arguments)["wte.weight"] == '[{"tensor"}, {}]'


def test_unknown_planner_and_unknown_option_are_told_with_what_exists() -> None:
    with pytest.raises(ValueError, match=r"no pass 'plan-x'.*plan-megatron"):
        find_pass("plan-x")
    with pytest.raises(ValueError, match=r"pass 'plan-megatron'.*its options are cluster, tensor"):
        PassPipeline("plan-megatron{size=2}")


def test_planner_without_its_cluster_says_where_to_give_one() -> None:
    with pytest.raises(ValueError, match=r"planner 'amp' needs a cluster; give"):
        run_passes(captured(SPECS["gpt"]).program, "plan-amp")


def test_plan_of_a_pass_partitions_like_the_plan() -> None:
    program = captured(SPECS["gpt"]).program
    mesh = Mesh(data=2, tensor=2)
    assert run_passes(program, "plan-megatron,preset:default", mesh=mesh) == local_program(
        program, plan_megatron(program, mesh)
    )
