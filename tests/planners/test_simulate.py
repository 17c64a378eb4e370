"""Simulated steps, against timelines worked out by hand and against brute force."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.dist import AllReduceOp, StartedOp
from shardweave.ir.dialects.types import num_bytes, tensor_type_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.memory import peak_memory
from shardweave.planners.cost.model import kind_of
from shardweave.planners.simulate.simulate import simulate
from shardweave.planners.simulate.simulation import Simulation
from shardweave.tests.ir_text import step
from shardweave.tests.planners.small_clusters import (
    DEVICE,
    Choice,
    choices,
    cluster,
    local,
    random_program,
)

BLOCKING = """
    input %x : @
    %a = aten.mm(%x, %x) : @
    %b = dist.all_reduce(%a, axes = ["tensor"]) : @
    %c = aten.mm(%b, %b) : @
    output %c
"""

OVERLAPPED = """
    input %x : @
    %a = aten.mm(%x, %x) : @
    %f = dist.start_all_reduce(%a, axes = ["tensor"]) : @
    %c = aten.mm(%x, %a) : @
    %b = dist.wait(%f) : @
    %d = aten.mm(%b, %c) : @
    output %d
"""

TWO_GROUPS = """
    input %x : @
    %f = dist.start_all_reduce(%x, axes = ["data"]) : @
    %g = dist.start_all_reduce(%x, axes = ["tensor"]) : @
    %a = dist.wait(%g) : @
    %b = dist.wait(%f) : @
    %c = aten.add.Tensor(%a, %b) : @
    output %c
"""


def events(found: Simulation) -> list[tuple[str, str, float, float]]:
    """(op, stream, start, end), in milliseconds."""
    return [
        (e.name.split(".")[1], e.stream, round(e.start_s * 1e3, 6), round(e.end_s * 1e3, 6))
        for e in found.events
        if e.end_s - e.start_s > 1e-6
    ]


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 6)


def test_blocking_collective_stops_the_device() -> None:
    found = simulate(local(BLOCKING), cluster())
    assert events(found) == [
        ("mm", "compute", 0, 2),
        ("all_reduce", "tensor", 2, 6),
        ("mm", "compute", 6, 8),
    ]
    assert (ms(found.time_s), ms(found.compute_s), ms(found.exposed_communication_s)) == (8, 4, 4)
    assert ms(found.lower_bound_s) == 8  # the three need each other
    assert found.ratio == pytest.approx(1.0)


def test_started_collective_runs_beside_compute_until_its_wait() -> None:
    found = simulate(local(OVERLAPPED), cluster())
    assert events(found) == [
        ("mm", "compute", 0, 2),
        ("mm", "compute", 2, 4),
        ("start_all_reduce", "tensor", 2, 6),
        ("mm", "compute", 6, 8),
    ]
    assert ms(found.exposed_s["tensor",]) == 2
    assert ms(found.communication_s["tensor",]) == 4


def test_compute_beside_communication_is_slower_and_the_loss_is_told_apart() -> None:
    found = simulate(local(OVERLAPPED), cluster(overlap_slowdown=1.5))
    assert ms(found.time_s) == 8
    assert events(found)[1] == ("mm", "compute", 2, 5)
    assert (ms(found.slowdown_s), ms(found.exposed_communication_s)) == (1, 1)


def test_op_is_slower_only_for_as_long_as_communication_lasts() -> None:
    # The all-reduce of 1 ms ends when the product, at 2/3 of its speed, has done 2/3 ms of 2.
    found = simulate(local(OVERLAPPED), cluster(nic=4e7, overlap_slowdown=1.5))
    assert ms(found.time_s) == pytest.approx(2 + 2 + 1 / 3 + 2, abs=1e-5)


def test_op_begins_when_the_host_has_issued_it_and_messages_move_on_meanwhile() -> None:
    # The host issues at 3, 6, 9 and 12 ms; a product takes 2 and the all-reduce 4.
    unit = cluster()
    slow = replace(unit, devices={"unit": replace(DEVICE, issue_s=3e-3)})
    found = simulate(local(OVERLAPPED), slow)
    assert events(found) == [
        ("mm", "compute", 3, 5),
        ("start_all_reduce", "tensor", 6, 10),
        ("mm", "compute", 9, 11),
        ("mm", "compute", 12, 14),
    ]
    assert (ms(found.host_s), ms(found.exposed_communication_s), ms(found.compute_s)) == (8, 0, 6)
    assert found.time_s == pytest.approx(
        found.compute_s + found.slowdown_s + found.host_s + found.exposed_communication_s
    )


def test_communication_beside_compute_is_slower_where_the_cluster_says_so() -> None:
    # In 2 ms of compute the all-reduce gets 1 of its 4 ms done.
    found = simulate(local(OVERLAPPED), cluster(link_slowdown=2.0))
    assert events(found)[2] == ("start_all_reduce", "tensor", 2, 7)


def test_collectives_that_share_a_link_run_in_the_order_they_are_started() -> None:
    # Four nodes: over `data` and over `tensor`, one group per node crosses each NIC.
    found = simulate(local(TWO_GROUPS, "data=2,tensor=2"), cluster(nodes=4))
    assert events(found) == [
        ("start_all_reduce", "data", 0, 4),
        ("start_all_reduce", "tensor", 4, 8),
    ]
    assert ms(found.bound.link_s["network"]) == 8
    assert ms(found.exposed_communication_s) == 8


def test_collectives_on_different_links_run_at_once() -> None:
    # Two nodes of two: `tensor` stays inside (0.4 ms), two groups of `data` share a NIC (8 ms).
    found = simulate(local(TWO_GROUPS, "data=2,tensor=2"), cluster(nodes=2, devices=2))
    assert events(found) == [
        ("start_all_reduce", "data", 0, 8),
        ("start_all_reduce", "tensor", 0, 0.4),
    ]
    assert (ms(found.exposed_s["tensor",]), ms(found.exposed_s["data",])) == (0.4, 7.6)


def test_collective_waits_for_its_stream_even_if_its_link_is_free() -> None:
    text = """
        input %x : @
        %f = dist.start_all_reduce(%x, axes = ["data", "tensor"]) : @
        %g = dist.start_all_reduce(%x, axes = ["tensor"]) : @
        %h = dist.start_all_reduce(%x, axes = ["tensor"]) : @
        %a = dist.wait(%f) : @
        %b = dist.wait(%g) : @
        %c = dist.wait(%h) : @
        output %a
    """
    first, second, third = events(simulate(local(text, "data=2,tensor=2"), cluster(2, 2)))
    assert (first[2], second[2], third[2]) == (0, first[3], second[3])


def test_device_that_only_starts_pays_the_overhead_on_its_own_stream() -> None:
    found = simulate(local(OVERLAPPED), cluster(start_overhead_s=1e-3))
    assert events(found)[:4] == [
        ("mm", "compute", 0, 2),
        ("start_all_reduce", "compute", 2, 3),
        ("mm", "compute", 3, 5),
        ("start_all_reduce", "tensor", 3, 7),
    ]


def test_program_without_a_mesh_runs_on_one_device() -> None:
    found = simulate(
        step("input %x : tensor<8x8xf32>\n%y = aten.mm(%x, %x) : tensor<8x8xf32>\noutput %y"),
        cluster(),
    )
    assert found.mesh == Mesh()
    assert not found.communication_s


def test_program_that_is_not_partitioned_is_refused() -> None:
    program = step(
        "input %x : tensor<8xf32>\n%y = aten.relu(%x) : tensor<8xf32>\noutput %y", "tensor=2"
    )
    with pytest.raises(
        ValueError, match="not partitioned for its mesh tensor=2; first run the passes"
    ):
        simulate(program, cluster())


def test_mesh_other_than_the_programs_is_refused() -> None:
    with pytest.raises(ValueError, match="for mesh tensor=2, but mesh tensor=4 is given"):
        simulate(local(BLOCKING), cluster(), Mesh(tensor=4))


# Properties

CLUSTERS = st.builds(
    cluster,
    nodes=st.sampled_from([2, 4]),
    devices=st.just(2),
    nic=st.sampled_from([3e6, 1e7, 4e7]),
    network_latency_s=st.sampled_from([0.0, 1e-3]),
    overlap_slowdown=st.sampled_from([1.0, 1.3]),
    link_slowdown=st.sampled_from([1.0, 1.2]),
    start_overhead_s=st.sampled_from([0.0, 2e-4]),
)


@given(choices, CLUSTERS)
def test_time_is_never_below_the_bound_and_is_made_of_its_parts(
    chosen: Sequence[Choice], on: Cluster
) -> None:
    found = simulate(random_program(chosen), on)
    assert found.time_s >= found.lower_bound_s * (1 - 1e-9)
    assert found.lower_bound_s >= found.compute_s
    parts = found.compute_s + found.slowdown_s + found.exposed_communication_s
    assert parts == pytest.approx(found.time_s)


@given(choices, CLUSTERS)
def test_streams_run_one_op_at_a_time_and_links_too(chosen: Sequence[Choice], on: Cluster) -> None:
    found = simulate(random_program(chosen), on)
    for stream in {event.stream for event in found.events}:
        own = [event for event in found.events if event.stream == stream]
        for before, after in pairwise(own):
            assert after.start_s >= before.end_s - 1e-12
    assert max((e.end_s for e in found.events), default=0.0) <= found.time_s + 1e-12


@given(choices, CLUSTERS, st.sampled_from([1.01, 1.5, 4.0]))
def test_faster_links_never_make_a_step_slower(
    chosen: Sequence[Choice], on: Cluster, factor: float
) -> None:
    program = random_program(chosen)
    (node,) = on.nodes
    faster_nic = replace(node, nic_bandwidth_bytes_s=node.nic_bandwidth_bytes_s * factor)
    faster_node = replace(node, bandwidth_bytes_s=node.bandwidth_bytes_s * factor)
    slow_s = simulate(program, on).time_s
    for faster in (faster_nic, faster_node):
        assert simulate(program, replace(on, nodes=(faster,))).time_s <= slow_s * (1 + 1e-9)


@given(choices, CLUSTERS)
def test_starting_collectives_is_never_slower_than_blocking(
    chosen: Sequence[Choice], on: Cluster
) -> None:
    free = replace(on, overlap_slowdown=1.0, link_slowdown=1.0)
    started = [(5 if kind == 7 else kind, *rest) for kind, *rest in chosen]
    program = random_program([(a, b, c) for a, b, c in started])
    found = simulate(program, free)
    blocked_s = found.compute_s + sum(found.communication_s.values())
    assert found.time_s <= blocked_s * (1 + 1e-9)


# Memory


def root_of(value: SSAValue) -> SSAValue:
    """The value whose memory a value shares."""
    op = value.owner
    if isinstance(op, Operation) and (kind_of(op) in ("view", "wait") or is_in_place(op)):
        return root_of(op.operands[0])
    return value


def is_in_place(op: Operation) -> bool:
    """Whether an all-reduce is the only reader of what an op made, through views or not."""
    if not isinstance(op, AllReduceOp) or len(op.operands) != 1:
        return False
    value = op.operands[0]
    while value.has_one_use() and isinstance(value.owner, Operation):
        if kind_of(value.owner) != "view":
            return kind_of(value.owner) == "compute"
        value = value.owner.operands[0]
    return False


def brute_force_peak(program: Program) -> int:
    """Bytes alive around each op, from the definition: needed by an op from here on, or kept."""
    ops = list(program.ops)
    kept = {root_of(v) for v in (*program.function.body.block.args, *program.return_op.operands)}

    def needed_by(op: Operation) -> set[SSAValue]:
        values = [*op.operands, *op.results]
        if kind_of(op) == "wait":
            start = op.operands[0].owner
            assert isinstance(start, StartedOp)
        return {root_of(value) for value in values}

    peak = 0
    for index in range(len(ops)):
        born = {root_of(r) for op in ops[: index + 1] for r in op.results}
        born |= set(program.function.body.block.args)
        needed = set[SSAValue]().union(*(needed_by(op) for op in ops[index:]))
        alive = {value for value in born if value in kept or value in needed}
        peak = max(peak, sum(num_bytes(tensor_type_of(value)) for value in alive))
    return peak


@given(choices)
def test_peak_memory_is_that_of_brute_force(chosen: Sequence[Choice]) -> None:
    program = random_program(chosen)
    found = peak_memory(program)
    if chosen:
        assert found.peak_bytes == brute_force_peak(program)
    assert sum(found.parts.values()) == found.peak_bytes


def test_memory_is_told_apart_by_what_it_holds() -> None:
    text = """
        param %w : @
        input %x : @
        %f = dist.start_all_reduce(%x, axes = ["tensor"]) : @
        %a = aten.mm(%x, %w) : @
        %g = dist.wait(%f) : @
        output %a
        grad w = %g
    """
    found = peak_memory(local(text), optimizer_multiplier=2.0)
    assert {part: size // 40_000 for part, size in found.parts.items() if size} == {
        "parameters": 1, "optimizer": 2, "inputs": 1, "activations": 1, "communication": 1
    }  # fmt: skip


def test_gathered_shard_is_held_until_its_collective_has_arrived() -> None:
    text = """
        input %x : tensor<8xf32>
        %a = aten.relu(%x) : tensor<8xf32>
        %f = dist.start_all_gather(%a, axes = ["tensor"], dim = 0, block = 8) : tensor<16xf32>
        %b = aten.sum(%x) : tensor<f32>
        %g = dist.wait(%f) : tensor<16xf32>
        output %g
    """
    found = peak_memory(local(text))
    assert found.peak_bytes == 32 + 32 + 64 + 4


def test_recomputed_activations_are_freed_in_between() -> None:
    kept = """
        input %x : @
        %a = aten.relu(%x) : @
        %b = aten.relu(%a) : @
        %c = aten.relu(%b) : @
        %d = aten.mm(%b, %c) : @
        %e = aten.mm(%d, %a) : @
        output %e
    """
    again = kept.replace("%e =", "%a2 = aten.relu(%x) {phase = recompute} : @\n%e =").replace(
        "(%d, %a)", "(%d, %a2)"
    )
    assert peak_memory(local(kept)).peak_bytes - peak_memory(local(again)).peak_bytes == 40_000


# Output


def test_trace_is_json_with_an_event_for_each_op(tmp_path: Path) -> None:
    simulate(local(OVERLAPPED), cluster()).save_trace(tmp_path / "t.json")
    data: dict[str, Any] = json.loads((tmp_path / "t.json").read_text())
    spans = [e for e in data["traceEvents"] if e["ph"] == "X"]
    names = {e["tid"]: e["args"]["name"] for e in data["traceEvents"] if e["ph"] == "M"}
    assert [(names[e["tid"]], e["ts"], e["dur"]) for e in spans] == [
        ("compute", 0, pytest.approx(2000)),
        ("compute", pytest.approx(2000), pytest.approx(2000)),
        ("tensor", pytest.approx(2000), pytest.approx(4000)),
        ("compute", pytest.approx(6000), pytest.approx(2000)),
    ]


def test_plot_is_a_picture(tmp_path: Path) -> None:
    simulate(local(OVERLAPPED), cluster()).plot(tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_summary_says_time_exposure_bound_and_memory() -> None:
    text = simulate(local(OVERLAPPED), cluster()).summary()
    assert "iteration      8.00 ms on mesh tensor=2, 2 of 2 devices of unit" in text
    assert "4.00 ms over tensor, of which 2.00 ms exposed (25% of the step)" in text
    assert "critical path 8.00 ms" in text
    assert "ratio          1.000" in text
    assert "peak memory    " in text


def test_summary_warns_of_more_memory_than_the_device_has() -> None:
    tiny = replace(cluster(), devices={"unit": replace(DEVICE, memory_bytes=1000)})
    assert "MORE THAN THE DEVICE HAS" in simulate(local(BLOCKING), tiny).summary()


def test_fifty_thousand_ops_are_simulated_in_seconds() -> None:
    block = """
        %a{n} = aten.mm(%x, %x) : @
        %v{n} = aten.permute(%a{n}, dims = [1, 0]) : @
        %f{n} = dist.start_all_reduce(%a{n}, axes = ["tensor"]) : @
        %b{n} = aten.mm(%v{n}, %x) : @
        %w{n} = dist.wait(%f{n}) : @
    """
    program = local(
        "input %x : @" + "".join(block.replace("{n}", str(n)) for n in range(100)) + "output %x"
    )
    ops, end = list(program.ops), program.return_op
    for _ in range(99):
        copies: dict[SSAValue, SSAValue] = {}
        end.parent_block().insert_ops_before([op.clone(copies) for op in ops], end)  # pyright: ignore[reportOptionalMemberAccess]
    start_s = time.process_time()
    found = simulate(program, cluster())
    assert time.process_time() - start_s < 3
    assert len(found.events) == 30_000
