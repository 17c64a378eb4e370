"""AMP on programs: what it reads is what the program says, and what it plans without stages runs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.blocks import blocks_of
from shardweave.planners.amp.costs import corrected_costs
from shardweave.planners.amp.model import Strategy
from shardweave.planners.amp.network import ClusterArrays
from shardweave.planners.amp.planner import plan_amp
from shardweave.planners.amp.profile import ProgramProfile, profile_program
from shardweave.planners.amp.search import Placed, best_cuts, shares_by_seconds, with_shares
from shardweave.planners.cost.cluster import Cluster, DeviceType, NodeType
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.cost.workload import batch_of, workload_of
from shardweave.planners.lowering.lower import Lowerings
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_check import check_plan
from shardweave.planners.plan.plan_parts import Pipeline, PlanError
from shardweave.planners.predict.predict import predict_plan
from shardweave.tests.ir_text import step
from shardweave.tests.zoo import assert_equals_eager, captured

HET = find_cluster("amp-het-cluster")  # 12 V100 and 4 T4, three link speeds
SPEC = "gpt:layers=4,hidden=32,heads=4,vocab=32,seq=8,batch=16"


@cache
def lowerings(spec: str) -> Lowerings:
    """The local programs of a model, each made once: most tests ask for the same."""
    return Lowerings(captured(spec).program)


def planned(spec: str = SPEC, cluster: Cluster = HET, mesh: str = "", **options: Any) -> Plan:
    goal = Mesh.parse(mesh) if mesh else None
    return plan_amp(lowerings(spec), goal, cluster=cluster, **options)


def with_dtype(cluster: Cluster) -> Cluster:
    """The cluster with devices that know float64, which the tests' programs compute in."""
    devices = {
        name: replace(one, flops={**one.flops, "float64": one.flops["float32"]})
        for name, one in cluster.devices.items()
    }
    return replace(cluster, devices=devices)


HET = with_dtype(HET)


def profile(degrees: tuple[int, ...] = (1, 2)) -> ProgramProfile:
    return profile_program(lowerings(SPEC), HET, degrees)


def test_layers_are_the_blocks_of_the_program_with_all_its_parameters() -> None:
    found = profile().model
    assert found.batch == 16
    assert found.num_layers == 6  # embeddings, four blocks, the head
    whole = captured(SPEC).program.stats().parameter_bytes
    # The tied table counts at both ends, and once where a stage has both.
    assert sum(found.stage_parameters((0, 6), 1)) * 8 == whole
    assert sum(found.parameters[1]) * 8 == whole + 32 * 32 * 8
    assert found.parameters[2][2] < 0.6 * found.parameters[1][2]


def test_time_of_a_block_is_that_of_the_program_at_both_micro_batches_read() -> None:
    model = profile().model
    for samples in (1, 4):
        mesh = Mesh(data=16 // samples, tensor=2)
        program = captured(SPEC).program
        local = lowerings(SPEC).local(plan_megatron(program, mesh))
        alone = replace(HET, nodes=HET.nodes[:1])
        work = workload_of(local, alone, Mesh(tensor=2)).blocks[1]
        device = HET.nodes[0].device
        seconds = work.forward_s[device] + work.backward_s[device]
        seconds += sum(work.communication_s.values())
        assert model.fixed is not None
        once, share = model.profile[device][2][1], model.fixed[device][2][1]
        assert 3 * once * (share + (1 - share) * samples) == pytest.approx(seconds)


def test_plan_without_stages_runs_and_equals_eager() -> None:
    plan = planned(max_stages=1, max_tensor=4)
    assert plan.num_stages == 1
    assert_equals_eager(lowerings(SPEC).local(plan), captured(SPEC))


def test_micro_batches_without_stages_are_sub_batches_that_equal_eager() -> None:
    plan = replace(planned(max_stages=1), batch_split=2)
    plan = replace(plan, mesh={"data": 2, "tensor": 2})
    assert_equals_eager(lowerings(SPEC).local(plan), captured(SPEC))


def test_stages_are_all_layers_in_order_each_with_its_device_type() -> None:
    plan = planned(mesh="pipeline=4,data=2,tensor=2")
    pipeline = plan.pipeline
    assert pipeline is not None
    assert plan.mesh == {"pipeline": 4, "data": 2, "tensor": 2}
    check_plan(plan, captured(SPEC).program)
    names = [name for stage in pipeline.stages for name in stage]
    repeated = blocks_of(captured(SPEC).program).names
    assert [name for name in names if name in repeated] == ["h.0", "h.1", "h.2", "h.3"]
    assert pipeline.devices == (*["V100-16GB"] * 3, "T4")
    assert_equals_eager(lowerings(SPEC).local(plan), captured(SPEC))
    assert Plan.from_json(plan.to_json()) == plan


def test_prediction_adds_up_to_the_step() -> None:
    for plan in (planned(simulate=0), planned(max_stages=1, simulate=0)):
        found = plan.predicted
        assert found is not None
        parts = found.compute_s + found.exposed_s + found.bubble_s
        assert found.time_s == pytest.approx(parts)
        assert sum(found.communication_s.values()) == pytest.approx(found.exposed_s)


def test_candidates_are_listed_the_fastest_first_with_why_each_lost() -> None:
    plan = planned(top=4, simulate=0)
    times = [one.predicted.time_s for one in plan.candidates]
    assert times == sorted(times)
    assert len(times) == 4
    assert plan.candidates[0].predicted == plan.predicted
    assert all("slower" in one.reason for one in plan.candidates[1:])


def test_estimate_without_stages_is_near_the_simulation_without_latency() -> None:
    cluster = with_dtype(find_cluster("amp-homogeneous"))
    nodes = tuple(replace(node, latency_s=0.0) for node in cluster.nodes)
    cluster = replace(cluster, nodes=nodes, network_latency_s=0.0)
    spec = "gpt:layers=4,hidden=128,heads=4,vocab=64,seq=64,batch=16"
    for mesh in ("data=16", "data=4,tensor=4"):
        plan = planned(spec, cluster, mesh, simulate=0)
        assert plan.predicted is not None
        blocking = replace(plan, schedule="blocking")
        simulated = predict_plan(lowerings(spec), blocking, cluster)
        assert plan.predicted.time_s == pytest.approx(simulated.time_s, rel=0.05)


def test_annealing_is_never_slower() -> None:
    plain, annealed = planned(simulate=0), planned(anneal=20, simulate=0)
    assert plain.predicted is not None
    assert annealed.predicted is not None
    assert annealed.predicted.time_s <= plain.predicted.time_s


def test_cluster_too_small_in_memory_tells_the_shortfall_in_gib_by_part() -> None:
    devices = {name: replace(one, memory_bytes=50_000) for name, one in HET.devices.items()}
    with pytest.raises(PlanError) as error:
        planned(cluster=replace(HET, devices=devices))
    message = str(error.value)
    for part in ("parameters", "gradients", "optimizer", "activations", "workspace"):
        assert part in message
    assert "GiB too many; use more devices, or devices with more memory." in message


def test_mesh_of_another_size_or_with_other_axes_is_refused() -> None:
    with pytest.raises(PlanError, match="does not suit planner 'amp'; give a mesh of all 16"):
        planned(mesh="data=2,tensor=2")
    with pytest.raises(
        PlanError, match="axis 'x', but planner 'amp' plans the axes pipeline, data, tensor"
    ):
        planned(mesh="x=16")


def test_batch_is_what_the_first_dims_of_all_inputs_have_in_common() -> None:
    assert batch_of(captured(SPEC).program) == 16
    with pytest.raises(PlanError, match="no input of the program has a batch dim"):
        batch_of(step("param %w : tensor<2xf32>\n%y = aten.neg(%w) : tensor<2xf32>\noutput %y"))


def two_speeds() -> Cluster:
    """Two devices, and two that are a third as fast, on fast links."""
    fast = DeviceType("fast", {"float64": 3e9}, 2**34, 3e12)
    slow = replace(fast, name="slow", flops={"float64": 1e9})
    nodes = tuple(
        NodeType(one, 2, bandwidth_bytes_s=1e12, nic_bandwidth_bytes_s=1e12)
        for one in ("fast", "slow")
    )
    return Cluster("two speeds", {"fast": fast, "slow": slow}, nodes)


@pytest.mark.parametrize("mesh", ["data=4", "data=2,tensor=2"])
def test_replicas_of_two_speeds_get_micro_batches_in_proportion(mesh: str) -> None:
    plan = planned(SPEC, two_speeds(), mesh)
    assert plan.pipeline is not None
    ((*fast, slow),) = plan.pipeline.shares
    assert slow * 3 == fast[0] == max(fast)
    assert plan.predicted is not None
    even = next(one for one in plan.candidates if "in proportion" not in one.name)
    assert plan.predicted.time_s < 0.7 * even.predicted.time_s
    assert_equals_eager(lowerings(SPEC).local(plan), captured(SPEC))


def test_stages_of_replicas_of_two_speeds_get_micro_batches_in_proportion() -> None:
    cluster = two_speeds()
    found = profile_program(lowerings(SPEC), cluster, (1,))
    links, strategy = ClusterArrays.of(cluster), Strategy(2, 2, 1, 1)
    # One fast and one slow replica of each stage.
    grid = np.array([[[0], [2]], [[3], [1]]])
    costs = corrected_costs(found.model, links, strategy, grid)
    estimate = best_cuts(found.model, strategy, costs)
    assert estimate is not None
    stages = (("wte", "wpe", "h.0", "h.1"), ("h.2", "h.3", "ln_f", "head"))
    pipeline = Pipeline(stages, 8, ranks=((0, 2), (3, 1)))
    even = Plan({"pipeline": 2, "data": 2}, pipeline=pipeline)
    plan = with_shares(even, captured(SPEC).program, Placed(estimate, grid), found.model, links)
    assert plan is not None
    assert plan.pipeline == replace(pipeline, micro_batches=16, shares=((12, 4), (4, 12)))
    assert_equals_eager(lowerings(SPEC).local(plan), captured(SPEC))
    others = captured(SPEC).program, Placed(estimate, grid), found.model, links
    assert with_shares(replace(even, zero=1), *others) is None


CNN = "cnn:depth=10,channels=8,size=8,batch=8,pool=true"  # with batch norm


def test_stages_of_a_model_with_batch_norm_have_one_micro_batch_and_equal_eager() -> None:
    plan = planned(CNN, two_speeds(), "pipeline=2,data=2")
    assert plan.pipeline is not None
    assert plan.pipeline.micro_batches == 1
    assert not plan.pipeline.shares
    assert_equals_eager(lowerings(CNN).local(plan), captured(CNN))


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_the_best_of_all(seed: int) -> None:
    chance = Random(seed)
    count, seconds = chance.randint(3, 9), [chance.randint(1, 9) for _ in range(3)]
    found = shares_by_seconds(seconds, count)
    assert sum(found) == count
    every = [(a, b, count - a - b) for a in range(1, count - 1) for b in range(1, count - a)]
    last = lambda shares: max(n * s for n, s in zip(shares, seconds, strict=True))  # noqa: E731
    assert last(found) == min(map(last, every))


def test_time_limit_ends_the_simulations() -> None:
    made = planned(simulate=3, time_limit_s=1e-9)
    assert "the 1 best estimate was simulated" in made.reasons[0]
