"""The exhaustive planner against a loop that simulates everything itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from shardweave.benchmarks.baselines.exhaustive import plan_exhaustive
from shardweave.benchmarks.baselines.plain import PlainPlans
from shardweave.ir.mesh.mesh import Mesh
from shardweave.passes.pipeline import PassPipeline
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan_parts import PlanError
from shardweave.planners.simulate.simulate import simulate
from shardweave.planners.trials.space import Configuration
from shardweave.tests.marks import slow
from shardweave.tests.zoo import assert_equals_eager, captured

CLUSTER = find_cluster("perlmutter:nodes=1")  # 4 devices
SPEC = "gpt:layers=1,hidden=32,heads=4,vocab=32,seq=8,batch=8"
PARTITION = "split-addmm,add-pending-sums,propagate-shardings,insert-collectives,unroll-time-axes,cse,dce,merge-collectives"


def brute_force(spec: str, data: int, tensor: int) -> float:
    """The least seconds of all plans on one mesh, put together without the planner's code."""
    best = float("inf")
    program = captured(spec).program
    mesh = Mesh(data=data, tensor=tensor)
    for sequence, policy, split in product(
        (False, True), ("none", "layer", "after-communication", "after-products"), (1, 2, 4)
    ):
        plan = plan_megatron(program, mesh, sequence_parallel=sequence)
        passes = [
            ApplyPlanPass.of(plan),
            f"split-batch{{n={split}}}",
            PARTITION,
            f"rematerialize{{policy={policy}}}",
        ]
        if split == 1:
            passes.append("bucket-collectives,start-collectives")
            passes.append("overlap-communication{schedule=in-order}")
        else:
            passes.append("start-collectives,overlap-communication{schedule=cross-pass}")
        target = program.clone()
        target.set_mesh(mesh)
        try:
            local = PassPipeline(passes).run(target)
        except ValueError:
            continue
        best = min(best, simulate(local, CLUSTER).time_s)
    return best


def test_space_has_schedules_of_sub_batches_where_there_are_several() -> None:
    program = captured(SPEC.replace("batch=8", "batch=2")).program
    schedules: dict[object, list[str]] = {}
    for one in PlainPlans("exhaustive", program, CLUSTER, None).configurations():
        assert one.tensor > 1 or not one.sequence_parallel
        schedules.setdefault(replace(one, schedule="none"), []).append(one.schedule)
    assert {one.micro_batches for one in schedules if isinstance(one, Configuration)} == {1, 2}
    for one, names in schedules.items():
        assert isinstance(one, Configuration)
        several = ["none", "sub-batch", "cross-pass"]
        assert names == (["none"] if one.micro_batches == 1 else several)


@pytest.mark.parametrize(("batch", "count"), [(2, 8), slow(8, 24)])
def test_plan_is_the_fastest_of_all(batch: int, count: int) -> None:
    spec = SPEC.replace("batch=8", f"batch={batch}")
    program = captured(spec).program
    plan = plan_exhaustive(program, Mesh(data=2, tensor=2), cluster=CLUSTER, simulate=100)
    assert plan.predicted is not None
    assert plan.predicted.time_s == pytest.approx(brute_force(spec, 2, 2))
    assert plan.predicted.source == "simulated"
    assert plan.reasons[0] == f"all {count} plans were partitioned and simulated"
    assert_equals_eager(local_program(program, plan), captured(spec))


@pytest.mark.slow
def test_large_space_is_estimated_and_its_best_simulated() -> None:
    program = captured(SPEC).program
    plan = plan_exhaustive(program, None, cluster=CLUSTER, simulate=4, top=9)
    assert "were estimated by block; the best 4 were simulated" in plan.reasons[0]
    assert len(plan.candidates) == 4
    every = plan_exhaustive(program, None, cluster=CLUSTER, simulate=1000)
    assert plan.predicted is not None
    assert every.predicted is not None
    assert every.predicted.time_s <= plan.predicted.time_s <= 1.1 * every.predicted.time_s


def test_cluster_too_small_in_memory_tells_the_shortfall_in_gib_by_part() -> None:
    devices = {name: replace(one, memory_bytes=1000) for name, one in CLUSTER.devices.items()}
    small = replace(CLUSTER, devices=devices)
    with pytest.raises(PlanError, match=r"nearest is .*parameters .* GiB too many; use more"):
        plan_exhaustive(captured(SPEC).program, Mesh(data=2, tensor=2), cluster=small)


@pytest.mark.parametrize("options", [{"zero": 7}, {"simulate": 0}])
def test_stages_of_zero_that_there_are_not_and_no_simulations_are_refused(
    options: dict[str, Any],
) -> None:
    with pytest.raises(PlanError, match="give a stage of ZeRO, 0 to 3, and 1 plan or more"):
        plan_exhaustive(captured(SPEC).program, None, cluster=CLUSTER, **options)


def test_mesh_with_other_axes_is_refused() -> None:
    with pytest.raises(
        PlanError, match="axis 'x', but planner 'exhaustive' plans the axes data, tensor"
    ):
        plan_exhaustive(captured(SPEC).program, Mesh(x=4), cluster=CLUSTER)


def test_zero_divides_what_replicas_keep() -> None:
    program, mesh = captured(SPEC).program, Mesh(data=2, tensor=2)
    plans = [
        plan_exhaustive(program, mesh, cluster=CLUSTER, zero=zero, simulate=2) for zero in (0, 3)
    ]
    assert [plan.zero for plan in plans] == [0, 3]
    before, after = (plan.predicted for plan in plans)
    assert before is not None
    assert after is not None
    for part in ("parameters", "optimizer"):
        assert after.memory_bytes[part] == before.memory_bytes[part] / 2
    assert after.source == "simulated"
