"""Stages of other frameworks, played by block: what they take, keep and send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest

from shardweave.benchmarks.stages.micro_batch import micro_batch_plan
from shardweave.benchmarks.stages.played import played_stages
from shardweave.benchmarks.stages.stages import Stage, placed_stages
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.cost.cluster import Cluster, NodeType, PlacedCluster
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.cost.workload import Workload, workload_of
from shardweave.planners.lowering.lower import Lowerings
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline, PlanError
from shardweave.planners.predict.pipeline.simulation import PipelineSimulation
from shardweave.tests.planners.small_clusters import cluster, with_dtype
from shardweave.tests.zoo import captured

SPEC = "gpt:layers=4,hidden=32,heads=4,vocab=32,seq=8,batch=16"
BLOCKS = ("h.0", "h.1", "h.2", "h.3")
HALVES = (("wte", "wpe", "h.0", "h.1"), ("h.2", "h.3", "ln_f", "head"))


def program() -> Program:
    return captured(SPEC).program


@cache
def lowerings() -> Lowerings:
    return Lowerings(program())


HET = with_dtype(find_cluster("amp-het-cluster"))  # 12 V100 and 4 T4
UNIT = with_dtype(cluster(nodes=4, devices=4))


def staged(
    mesh: str = "pipeline=2,data=2,tensor=2",
    stages: Sequence[Sequence[str]] = HALVES,
    micro_batches: int = 4,
    *,
    sequence_parallel: bool = False,
) -> Plan:
    sizes = {axis.name: axis.size for axis in Mesh.parse(mesh).axes}
    inside = {name: size for name, size in sizes.items() if name != "pipeline"}
    plan = plan_megatron(program(), Mesh(**inside), sequence_parallel=sequence_parallel)
    names = tuple(tuple(stage) for stage in stages)
    return replace(plan, mesh=sizes, pipeline=Pipeline(names, micro_batches))


def stages_of(plan: Plan, on: Cluster) -> list[Stage]:
    """The stages of a plan, whose blocks are those of the program of one micro-batch."""
    piece = micro_batch_plan(plan, program())

    def read(placed: PlacedCluster, mesh: Mesh) -> Workload:
        return workload_of(lowerings().blocking(piece), placed, mesh)

    return placed_stages(plan, on, read)


def simulated(plan: Plan, on: Cluster = UNIT) -> PipelineSimulation:
    return played_stages(stages_of(plan, on), plan, on, optimizer_multiplier=2.0)


def test_each_stage_takes_the_step_in_compute_exposed_communication_and_bubble() -> None:
    slowed = replace(HET, overlap_slowdown=1.3, link_slowdown=1.1)
    for on in (UNIT, HET, slowed, replace(UNIT, start_overhead_s=1e-4)):
        for mesh in ("pipeline=2,data=2,tensor=2", "pipeline=2,data=1,tensor=4"):
            for zero in range(4):
                found = simulated(replace(staged(mesh), zero=zero), on)
                assert found.time_s >= found.lower_bound_s > 0
                for one in found.stages:
                    parts = one.compute_s + one.slowdown_s
                    parts += one.exposed_communication_s + one.bubble_s
                    assert found.time_s == pytest.approx(parts)


def interleaved() -> Plan:
    """Four stages of a block each on two places."""
    stages = (("wte", "wpe", "h.0"), ("h.1",), ("h.2",), ("h.3", "ln_f", "head"))
    plan = staged("pipeline=2,data=2", stages)
    assert plan.pipeline is not None
    return replace(plan, pipeline=replace(plan.pipeline, schedule="interleaved-1f1b"))


def test_chunks_of_other_orders_are_refused() -> None:
    plan = interleaved()
    assert plan.pipeline is not None
    with pytest.raises(PlanError, match=r"has 4 stages, but its mesh .* has places for 2"):
        simulated(replace(plan, pipeline=replace(plan.pipeline, schedule="1f1b")))


def test_stages_run_on_the_devices_that_they_are_on() -> None:
    plan = staged("pipeline=4,data=2,tensor=2", [("wte", "h.0"), ("h.1",), ("h.2",), ("h.3",)])
    slow = replace(HET.devices["T4"], overhead_s=1e-4)
    on = replace(HET, devices={**HET.devices, "T4": slow})
    found = simulated(plan, on)
    assert found.stages[1].compute_s == pytest.approx(found.stages[2].compute_s)
    assert plan.pipeline is not None
    swapped = replace(
        plan.pipeline,
        ranks=(tuple(range(4)), tuple(range(12, 16)), tuple(range(8, 12)), tuple(range(4, 8))),
    )
    moved = simulated(replace(plan, pipeline=swapped), on)
    assert moved.stages[1].compute_s > 2 * moved.stages[2].compute_s
    assert moved.stages[2].compute_s == pytest.approx(found.stages[2].compute_s)


def test_memory_counts_the_micro_batches_in_flight() -> None:
    one, four = simulated(staged(micro_batches=1)), simulated(staged(micro_batches=4))
    assert [stage.in_flight for stage in four.stages] == [2, 1]
    gpipe = staged(micro_batches=4)
    assert gpipe.pipeline is not None
    gpipe = replace(gpipe, pipeline=replace(gpipe.pipeline, schedule="gpipe"))
    assert [stage.in_flight for stage in simulated(gpipe).stages] == [4, 4]
    kept = [stage.memory_parts["activations"] for stage in four.stages]
    everything = [stage.memory_parts["activations"] for stage in simulated(gpipe).stages]
    assert everything == pytest.approx([2 * kept[0], 4 * kept[1]])
    # A micro-batch of a quarter of the samples keeps a quarter, but for a few scalars.
    assert one.stages[1].memory_parts["activations"] == pytest.approx(4 * kept[1], rel=0.01)


def test_parameters_of_all_stages_are_those_of_the_program() -> None:
    plan = staged("pipeline=2,data=2,tensor=1")
    found = simulated(plan)
    whole = program().stats().parameter_bytes
    tied = 32 * 32 * 8  # the table of the first stage is the last one's output projection
    assert sum(one.memory_parts["parameters"] for one in found.stages) == whole + tied


def test_zero_divides_states_over_the_replicas_stage_by_stage() -> None:
    found = [simulated(replace(staged(), zero=zero)) for zero in range(4)]
    whole = found[0].stages[0].memory_parts
    for zero, parts in ((1, ("optimizer",)), (2, ("optimizer", "gradients"))):
        at = found[zero].stages[0].memory_parts
        for part in ("parameters", "gradients", "optimizer"):
            assert at[part] == whole[part] / (2 if part in parts else 1)
    assert found[3].stages[0].memory_parts["parameters"] == whole["parameters"] / 2
    assert "communication" not in found[1].stages[0].memory_parts
    block = found[2].stages[0].memory_parts["communication"]
    assert found[3].stages[0].memory_parts["communication"] == 2 * block
    without = simulated(replace(staged("pipeline=2,data=1,tensor=2"), zero=3))
    assert without.stages[0].memory_parts["parameters"] == whole["parameters"]


def test_zero_sends_what_the_paper_says_around_the_ring() -> None:
    def sent(zero: int, micro_batches: int) -> float:
        plan = replace(staged(micro_batches=micro_batches), zero=zero)
        return simulated(plan).stages[0].communication_s["data"]

    once = sent(0, 4) / 2  # an all-reduce goes around twice; there is no latency here
    assert [sent(zero, 4) / once for zero in range(4)] == pytest.approx([2, 2, 1 + 4, 3 * 4])
    assert sent(3, 1) / once == pytest.approx(3)  # 1.5 times the volume (Sec. 7.2)


def test_schedule_hides_what_sub_batches_and_zero_send() -> None:
    blocking = replace(staged("pipeline=2,data=2,tensor=2"), zero=3, batch_split=2)
    overlapped = replace(blocking, schedule="cross-pass")
    slow, fast = simulated(blocking), simulated(overlapped)
    assert fast.time_s < slow.time_s
    for before, after in zip(slow.stages, fast.stages, strict=True):
        assert after.exposed_s["tensor"] < before.exposed_s["tensor"]
        assert after.exposed_s["data"] < before.exposed_s["data"]
        assert before.communication_s == pytest.approx(after.communication_s)


def test_slower_networks_take_longer_and_free_ones_only_the_compute() -> None:
    plan, times = staged(), list[float]()
    for nic in (1e7, 1e8, 1e12):
        nodes = (NodeType("unit", 4, 4, bandwidth_bytes_s=1e15, nic_bandwidth_bytes_s=nic),)
        times.append(simulated(plan, replace(UNIT, nodes=nodes)).time_s)
    # Four ranks of one node each make a stage, so that only the boundary crosses nodes.
    assert times[0] > times[1] > times[2]
    nodes = (NodeType("unit", 4, 4, bandwidth_bytes_s=1e15, nic_bandwidth_bytes_s=1e15),)
    free = simulated(plan, replace(UNIT, nodes=nodes))
    assert free.time_s == pytest.approx(free.lower_bound_s, rel=0.02)


def test_devices_spend_time_on_messages_at_both_ends() -> None:
    """Two stages, which each take or send one message in a pass: of four micro-batches both ways."""
    plan = staged("pipeline=2,data=4")
    costly = replace(UNIT, message_overhead_s=1e-3, message_bandwidth_bytes_s=1e7)
    before, after = simulated(plan), simulated(plan, costly)
    size = program_crossing() / 4 / 4
    work_s = 1e-3 + size / 1e7
    for one, other in zip(before.stages, after.stages, strict=True):
        grown = other.exposed_s["pipeline"] - one.exposed_s.get("pipeline", 0.0)
        assert grown >= 0.999 * 2 * 4 * work_s
        assert other.compute_s == pytest.approx(one.compute_s)
    assert after.time_s >= before.time_s + 2 * 4 * work_s
    assert after.lower_bound_s == before.lower_bound_s


def test_ranks_that_gather_their_shares_wait_for_it_before_each_pass() -> None:
    """Two stages of two tensor ranks, and 4 micro-batches of which each hands on 4 samples to two
    replicas: the second gathers before each forward pass, the first before each backward one."""
    plan = staged("pipeline=2,data=2,tensor=2")
    nodes = (replace(UNIT.nodes[0], latency_s=0.0),)
    on = replace(UNIT, nodes=nodes, start_overhead_s=1e-3)
    stages = stages_of(plan, on)
    halves = [replace(stage, handed_bytes=stage.handed_bytes // 2) for stage in stages]
    before, after = played_stages(halves, plan, on), played_stages(stages, plan, on, gathers=True)
    share = program_crossing() / 4 / 2 / 2
    gather_s = 1e-3 + share / nodes[0].bandwidth_bytes_s
    for one, other in zip(before.stages, after.stages, strict=True):
        grown = other.exposed_s["pipeline"] - one.exposed_s.get("pipeline", 0.0)
        assert grown >= 0.999 * 4 * gather_s
    # The last micro-batch's gradient is gathered behind all else, the first's value before it.
    assert after.time_s - before.time_s >= 4 * gather_s
    assert after.time_s - before.time_s <= 2 * 4 * gather_s * 1.001


def program_crossing() -> float:
    """Bytes that the first half hands on: the residual stream of 64 bits."""
    return 16 * 8 * 32 * 8


def test_micro_batches_cut_what_the_plan_does_not_cut() -> None:
    plan = staged("pipeline=2,data=1,tensor=2", sequence_parallel=True)
    found = micro_batch_plan(plan, program())
    assert found.mesh == {"data": 4, "tensor": 2}
    assert found.inputs["input_ids"] == '[{"data"}, {}]'
    assert all('"data"' in text for text in found.activations.values())
    assert found.pipeline is None
    # It holds for what runs, too: half of the communication is the sequence's.
    assert simulated(plan).stages[0].communication_s["tensor"] > 0


def test_groups_of_replicas_run_the_program_of_as_many_replicas() -> None:
    grouped, plain = staged("pipeline=2,replica=2,data=2"), staged("pipeline=2,data=4")
    found = micro_batch_plan(grouped, program())
    assert found.to_json() == micro_batch_plan(plain, program()).to_json()
    # Gradients are summed over all of them, and are all that they send each other.
    sent = [
        [stage.communication_s for stage in simulated(plan).stages] for plan in (grouped, plain)
    ]
    assert sent[0] == sent[1]
    assert all(stage["data"] > 0 for stage in sent[0])
    # ZeRO gathers within a group, and sums what is left over the groups.
    divided = [simulated(replace(plan, zero=1)).time_s for plan in (grouped, plain)]
    assert divided[0] != divided[1]


@pytest.mark.parametrize("axis", ["replica", "data"])
def test_replicas_that_cut_something_alone_stay_an_axis(axis: str) -> None:
    plan = replace(
        staged("pipeline=2,replica=2,data=2"), activations={"h.0": f'[{{"{axis}"}}, {{}}, {{}}]'}
    )
    assert micro_batch_plan(plan, program()).mesh == {"data": 8, "replica": 2}


@pytest.mark.parametrize(
    ("make_plan", "says"),
    [
        (
            lambda: staged("pipeline=4,data=2,tensor=2"),
            r"has 2 stages, but its mesh .* has places for 4",
        ),
        (
            lambda: staged(micro_batches=16),
            "batch of 16 does not divide into 16 micro-batches on each of 2",
        ),
        (
            lambda: staged(stages=(HALVES[1], HALVES[0])),
            "block 'h.2' is in stage 0, but what runs before",
        ),
        (lambda: staged(stages=(("wte",), ("wpe",))), "stage 1 has no block of its own"),
        (
            lambda: replace(staged(), parameters={"h.0.ln_1.weight": '[{"data"}]'}),
            "says by 'zero': 3",
        ),
    ],
)
def test_plan_that_cannot_be_staged_is_refused(make_plan: Callable[[], Plan], says: str) -> None:
    plan = make_plan()
    with pytest.raises(PlanError, match=says):
        simulated(plan)


def test_ranks_of_stages_are_checked() -> None:
    for ranks, says in (
        (((0, 1, 2, 3), (4, 5, 6)), "stage 1 has 3 ranks, expected 4"),
        (((0, 1, 2, 3), (3, 4, 5, 6)), "use device 3 twice"),
    ):
        plan = staged()
        assert plan.pipeline is not None
        plan = replace(plan, pipeline=replace(plan.pipeline, ranks=ranks))
        with pytest.raises(PlanError, match=says):
            simulated(plan)
