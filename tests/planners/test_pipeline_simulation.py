"""Plans with stages and ZeRO, simulated on programs: what they take, keep and send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from shardweave.ir.dialects.dist import SendOp
from shardweave.ir.dialects.types import num_bytes, tensor_type_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import functions_of
from shardweave.planners.amp import plan_amp
from shardweave.planners.cost.cluster import Cluster, NodeType, on_devices
from shardweave.planners.cost.links import nics_of, transfer_of
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import Lowerings
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline, PlanError
from shardweave.planners.predict.pipeline.micro_batch import micro_batch_plan
from shardweave.planners.predict.pipeline.simulation import (
    PipelineSimulation,
    played_stages,
    simulate_stages,
)
from shardweave.planners.predict.pipeline.stages import stages_of
from shardweave.planners.predict.predict import simulation_of
from shardweave.planners.simulate.simulation import Simulation
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


def simulated(plan: Plan, on: Cluster = UNIT) -> PipelineSimulation:
    return simulate_stages(lowerings(), plan, on, optimizer_multiplier=2.0)


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


def test_one_stage_of_one_micro_batch_is_the_program_itself() -> None:
    # The gradients' sum is one collective here and several in the program, which without latency
    # take as long together.
    for mesh in ("data=4", "data=2,tensor=2"):
        plan = plan_megatron(program(), Mesh.parse(mesh))
        step = simulation_of(lowerings(), replace(plan, schedule="blocking"), UNIT)
        assert isinstance(step, Simulation)
        found = simulated(plan)
        assert found.stages[0].compute_s == pytest.approx(step.compute_s)
        assert found.time_s == pytest.approx(step.time_s, rel=0.01)
        assert found.stages[0].bubble_s == 0
        parts = found.stages[0].memory_parts
        assert parts["parameters"] == step.memory.parts["parameters"]
        assert parts["optimizer"] == step.memory.parts["optimizer"]


def test_overlap_slows_both_simulators_down_alike() -> None:
    plan = replace(
        plan_megatron(program(), Mesh(data=2, tensor=4)), batch_split=2, schedule="sub-batch"
    )
    for factor in (1.0, 1.5, 3.0):
        on = replace(UNIT, overlap_slowdown=factor)
        step = simulation_of(lowerings(), plan, on)
        assert isinstance(step, Simulation)
        (found,) = simulated(plan, on).stages
        assert found.compute_s == pytest.approx(step.compute_s)
        assert (found.slowdown_s > 0) == (step.slowdown_s > 0) == (factor > 1)
        assert simulated(plan, on).time_s == pytest.approx(step.time_s, rel=0.25)


def interleaved() -> Plan:
    """Four stages of a block each on two places."""
    stages = (("wte", "wpe", "h.0"), ("h.1",), ("h.2",), ("h.3", "ln_f", "head"))
    plan = staged("pipeline=2,data=2", stages)
    assert plan.pipeline is not None
    return replace(plan, pipeline=replace(plan.pipeline, schedule="interleaved-1f1b"))


def test_chunks_take_by_block_what_they_take_run_by_run() -> None:
    plan = interleaved()
    whole, found = simulation_of(lowerings(), plan, UNIT), simulated(plan)
    assert isinstance(whole, PipelineSimulation)
    assert len(found.stages) == len(whole.stages) == 2
    assert found.time_s == pytest.approx(whole.time_s, rel=0.02)
    for block, run in zip(found.stages, whole.stages, strict=True):
        assert block.compute_s == pytest.approx(run.compute_s, rel=0.01)
        assert block.memory_parts["parameters"] == run.memory_parts["parameters"]
        parts = block.exposed_communication_s + block.compute_s + block.bubble_s
        assert parts + block.slowdown_s == pytest.approx(found.time_s)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_stages_hand_on_by_block_what_the_program_sends(sequence_parallel: bool) -> None:
    """Tensor ranks that have the residual stream whole each send it whole; of a cut one, shares."""
    plan = staged(sequence_parallel=sequence_parallel)
    on = replace(UNIT, network_latency_s=0.0)
    way = transfer_of(on, [(0, 4), (1, 5), (2, 6), (3, 7)])
    functions = functions_of(lowerings().local(plan))
    for name, stage in zip(("backward_1", "forward_0"), simulated(plan, on).stages, strict=True):
        sends = [op for op in functions[name].ops if isinstance(op, SendOp)]
        (sent,) = (num_bytes(tensor_type_of(op.operands[0])) for op in sends)
        assert sent == program_crossing() / 4 / 2 / (1 + sequence_parallel)
        received = stage.communication_s["pipeline"] * way.bandwidth_bytes_s / 4
        # And the number of tokens, which the program sends once.
        assert sent <= round(received, 6) <= sent + 8


def test_chunks_of_other_orders_are_refused() -> None:
    plan = interleaved()
    assert plan.pipeline is not None
    with pytest.raises(PlanError, match=r"has 4 stages, but its mesh .* has places for 2"):
        simulated(replace(plan, pipeline=replace(plan.pipeline, schedule="1f1b")))


def test_precision_of_a_plan_is_in_both_simulators_memory() -> None:
    plan = plan_megatron(program(), Mesh(data=4))
    parts: list[dict[str, float]] = []
    for precision in ("", "fp32", "bf16-mixed"):
        one = replace(plan, precision=precision)
        step = simulation_of(lowerings(), one, UNIT)
        assert isinstance(step, Simulation)
        (stage,) = simulate_stages(lowerings(), one, UNIT).stages
        assert stage.memory_parts.get("optimizer", 0) == step.memory.parts["optimizer"]
        parts.append(dict(stage.memory_parts))
    # The tests' parameters are of 8 bytes, so that a mixed 16 leaves nothing to the optimizer.
    assert [part.get("optimizer", 0) for part in parts] == [2 * parts[0]["parameters"]] * 2 + [0]


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
    stages = stages_of(lowerings(), plan, on)
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


def test_transfers_share_nics_and_know_which_way_they_go() -> None:
    found = cluster(nodes=2, devices=4)  # 100 MB/s inside, 10 MB/s between
    assert transfer_of(found, [(0, 1)]).bandwidth_bytes_s == 1e8
    assert transfer_of(found, [(0, 4)]).nics == (("out", 0), ("in", 1))
    assert transfer_of(found, [(0, 4), (1, 5)]).bandwidth_bytes_s == 5e6
    assert transfer_of(found, [(0, 4), (5, 1)]).bandwidth_bytes_s == 1e7
    assert nics_of(found, range(4)) == ()
    assert set(nics_of(found, range(8))) == {(way, n) for way in ("in", "out") for n in (0, 1)}


def test_some_devices_of_a_cluster_keep_their_nodes_and_types() -> None:
    found = on_devices(HET, (12, 3, 4))
    assert [found.place(rank) for rank in range(3)] == [(3, 0), (0, 3), (1, 0)]
    assert [one.name for one in found.device_types(1)] == ["T4"]
    assert [one.name for one in found.device_types(3)] == ["T4", "V100-16GB"]
    with pytest.raises(ValueError, match="has only 16"):
        on_devices(HET, (16,))


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


def test_summary_record_trace_and_picture_tell_of_each_stage(tmp_path: Path) -> None:
    found = simulated(staged())
    assert "2 stages, 4 micro-batches, 1f1b" in found.summary()
    assert found.summary().count("in flight") == 2
    record = found.record()
    assert [one["in_flight"] for one in record["stages"]] == [2, 1]
    found.save_trace(tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert '"stage 00"' in text
    assert '"stage 00 to 01"' in text
    found.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


ESTIMATES_WITHIN = 0.01
"""How far AMP's estimates of steps with stages may be from the simulation, without latency."""


@pytest.mark.parametrize("mesh", ["pipeline=2,data=4,tensor=2", "pipeline=4,data=4"])
def test_amp_estimates_with_stages_are_near_the_simulation(mesh: str) -> None:
    on = with_dtype(find_cluster("amp-homogeneous"))
    nodes = tuple(replace(node, latency_s=0.0) for node in on.nodes)
    on = replace(on, nodes=nodes, network_latency_s=0.0)
    estimated, found = (
        {
            one.name: one.predicted
            for one in plan_amp(
                lowerings(), Mesh.parse(mesh), cluster=on, simulate=count, top=3
            ).candidates
        }
        for count in (0, 3)
    )
    assert estimated.keys() == found.keys()
    assert {one.source for one in found.values()} == {"simulated"}
    for name, one in estimated.items():
        assert one.time_s == pytest.approx(found[name].time_s, rel=ESTIMATES_WITHIN)


def test_amp_takes_the_fastest_of_the_best_estimates_and_says_so() -> None:
    plan = plan_amp(lowerings(), None, cluster=HET, simulate=3, top=5)
    assert plan.predicted is not None
    assert plan.predicted.source == "simulated"
    assert "the 3 best estimates were simulated, and of those this one" in plan.reasons[0]
    assert "number " in plan.reasons[0]
    sources = [one.predicted.source for one in plan.candidates]
    assert sources == ["simulated"] * 3 + ["estimated"] * 2
    times = [one.predicted.time_s for one in plan.candidates[:3]]
    assert times == sorted(times)
    assert all(one.reason.startswith("not simulated; by") for one in plan.candidates[3:])


def test_amp_with_zero_fits_where_it_did_not() -> None:
    def fullest(zero: int, on: Cluster) -> Plan:
        mesh = Mesh(pipeline=2, data=8)
        return plan_amp(lowerings(), mesh, cluster=on, zero=zero, simulate=1)

    plain, divided = fullest(0, HET), fullest(3, HET)
    assert plain.predicted is not None
    assert divided.predicted is not None
    assert divided.zero == 3
    assert divided.predicted.peak_bytes < plain.predicted.peak_bytes
    middle = int(plain.predicted.peak_bytes + divided.predicted.peak_bytes) // 2
    devices = {name: replace(one, memory_bytes=middle) for name, one in HET.devices.items()}
    small = replace(HET, devices=devices)
    assert fullest(3, small).zero == 3
    with pytest.raises(PlanError, match="GiB too many"):
        fullest(0, small)
    with pytest.raises(PlanError, match="zero is 4; use 0, 1, 2 or 3"):
        plan_amp(lowerings(), None, cluster=HET, zero=4)
