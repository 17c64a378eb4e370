"""List scheduling: AxoNN's overlaps come out of it, and small steps take their least time."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from xdsl.ir import Operation

from shardweave.ir.dialects.annotations import copy_of, phase_of
from shardweave.ir.dialects.dist import WaitOp
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import run_passes
from shardweave.planners.cost.memory import peak_memory
from shardweave.planners.cost.model import CostModel
from shardweave.planners.overlap.graph import Graph, build_graph
from shardweave.planners.overlap.list_schedule import (
    MemoryBudget,
    list_schedule,
    liveness,
    recompute_gates,
)
from shardweave.planners.simulate.simulate import simulate
from shardweave.tests.ir_text import assert_same_values
from shardweave.tests.passes.steps import order, random_step
from shardweave.tests.planners.small_clusters import SQUARE, cluster, local

CLUSTER = cluster(4)
"""A product of two matrices of `local` takes 2 ms, an all-reduce of one 4 ms."""


def graph_of(program: Program) -> Graph:
    return build_graph(list(program.ops), CostModel(CLUSTER, program.mesh or Mesh()))


def by_longest_path(
    program: Program, cap_bytes: int | None = None, ahead: int | None = None
) -> Program:
    """The program in the order that the longest path to the end gives."""
    graph = graph_of(program)
    budget = None if cap_bytes is None else MemoryBudget(liveness(program, graph), cap_bytes)
    gates = {} if ahead is None else recompute_gates(graph, ahead)
    after = program.clone()
    places = {op: i for i, op in enumerate(program.ops)}
    ops = list(after.ops)
    found = list_schedule(graph, lambda i: (graph.tail_s[i], -float(i)), budget, gates)
    after.reorder([ops[places[op]] for op in found])
    return after


def listed(text: str, mesh: str = "tensor=2") -> tuple[Program, list[str]]:
    program = run_passes(local(text, mesh), "start-collectives")
    after = by_longest_path(program)
    return after, order(after)


def test_all_reduce_of_an_input_gradient_goes_behind_the_weights_gradient() -> None:
    # AxoNN A. In the program the weight's gradient comes first.
    _, names = listed("""
        param %w : @
        input %x : @
        input %g : @
        %dw = aten.mm(%x, %g) : @
        %dx = aten.mm(%g, %w) : @
        %r = dist.all_reduce(%dx, axes = ["tensor"]) : @
        %h = aten.mm(%r, %w) : @
        grad x = %h
        grad w = %dw
    """)
    assert names == ["dx", "start r", "dw", "wait r", "h"]


def test_reduce_scatters_of_gradients_are_waited_for_after_the_backward_pass() -> None:
    # AxoNN B.
    half = SQUARE.replace("100x", "50x", 1)
    _, names = listed(
        """
        param %w : @
        input %g : @
        %a = aten.mm(%g, %w) : @
        %ra = dist.reduce_scatter(%a, axes = ["tensor"], dim = 0, block = 50) : HALF
        %b = aten.mm(%a, %w) : @
        %rb = dist.reduce_scatter(%b, axes = ["tensor"], dim = 0, block = 50) : HALF
        %c = aten.mm(%b, %w) : @
        output %c
        grad a = %ra [{"tensor"}, {}]
        grad b = %rb [{"tensor"}, {}]
        """.replace("HALF", half)
    )
    assert names == ["a", "start ra", "b", "start rb", "c", "wait ra", "wait rb"]


GATHERS = """
    param %v : HALF [{"tensor"}, {}]
    param %w : HALF [{"tensor"}, {}]
    input %x : @
    %gv = dist.all_gather(%v, axes = ["tensor"], dim = 0, block = 50) : @
    %a = aten.mm(%x, %gv) : @
    %b = aten.mm(%a, %a) : @
    %gw = dist.all_gather(%w, axes = ["tensor"], dim = 0, block = 50) : @
    %c = aten.mm(%b, %gw) : @
    output %c
""".replace("HALF", SQUARE.replace("100x", "50x", 1))


def test_gather_of_the_next_weight_is_sent_ahead() -> None:
    # AxoNN C.
    after, names = listed(GATHERS)
    assert names == ["start gv", "start gw", "wait gv", "a", "b", "wait gw", "c"]
    assert simulate(after, CLUSTER).time_s == pytest.approx(8e-3, rel=1e-3)


def test_gather_is_not_sent_ahead_where_memory_is_short() -> None:
    program = run_passes(local(GATHERS), "start-collectives")
    assert order(by_longest_path(program, 160_000)) == order(by_longest_path(program))
    assert order(by_longest_path(program, 120_000)) == [
        *["start gv", "wait gv", "a", "b", "start gw", "wait gw", "c"]
    ]


def test_cap_below_what_any_order_needs_still_gives_an_order() -> None:
    program = run_passes(random_step(5), "rematerialize,start-collectives")
    after = by_longest_path(program, cap_bytes=1)
    assert sorted(order(after)) == sorted(order(program))
    assert peak_memory(after).peak_bytes > 1


def test_backward_pass_of_one_sub_batch_runs_beside_the_forward_pass_of_another() -> None:
    # Forward all message, backward all compute: passes one after the other take 12 + 12 ms.
    text = """
        input %x : @
        input %y : @
        %f0 = dist.all_reduce(%x, axes = ["tensor"]) {layer = "h.0", phase = forward} : @
        %f1 = dist.all_reduce(%y, axes = ["tensor"]) {layer = "h.0", phase = forward} : @
        %b0 = aten.mm(%f0, %f0) {layer = "h.0", phase = backward} : @
        %b1 = aten.mm(%f1, %f1) {layer = "h.0", phase = backward} : @
        %c0 = aten.mm(%b0, %b0) {layer = "h.0", phase = backward} : @
        %c1 = aten.mm(%b1, %b1) {layer = "h.0", phase = backward} : @
        output c0 = %c0
        output c1 = %c1
    """
    after, names = listed(text)
    assert names == ["start f0", "start f1", "wait f0", "b0", "c0", "wait f1", "b1", "c1"]
    assert simulate(after, CLUSTER).time_s == pytest.approx(12e-3, rel=1e-3)


def test_graph_has_times_and_longest_paths() -> None:
    program = run_passes(
        local("""
            input %x : @
            %a = aten.mm(%x, %x) : @
            %r = dist.all_reduce(%a, axes = ["tensor"]) : @
            %b = aten.mm(%r, %a) : @
            %c = aten.relu(%a) : @
            output %b
            output %c
        """),
        "start-collectives",
    )
    graph = graph_of(program)
    assert [op.name for op in graph.ops] == [
        *["aten.mm", "dist.start_all_reduce", "aten.mm", "aten.relu"]
    ]
    assert [None if wait is None else type(wait) for wait in graph.waits] == [
        *[None, WaitOp, None, None]
    ]
    assert graph.streams == [None, ("tensor",), None, None]
    assert [sorted(after) for after in graph.successors] == [[1, 2, 3], [2], [], []]
    assert graph.num_producers == [0, 1, 2, 1]
    assert graph.compute_s[:3] == pytest.approx([2e-3, 0, 2e-3], abs=1e-6)
    assert graph.travel_s == pytest.approx([0, 4e-3, 0, 0])
    assert graph.tail_s[:3] == pytest.approx([8e-3, 6e-3, 2e-3], abs=1e-6)


def small_step(seed: int) -> Program:
    """Up to seven random ops, a third of them messages."""
    random = Random(seed)
    text, values = ["input %x : @"], ["x"]
    for i in range(random.randint(4, 7)):
        left, right = random.choice(values[-3:]), random.choice(values)
        form = random.choice(
            ["aten.mm(%{}, %{})"] * 2 + ['dist.all_reduce(%{}, axes = ["tensor"])']
        )
        text.append(f"%v{i} = {form.format(left, right)} : @")
        values.append(f"v{i}")
    text += [f"output {value} = %{value}" for value in values[1:]]
    return run_passes(local("\n".join(text)), "start-collectives")


def all_orders(graph: Graph) -> Iterator[list[Operation]]:
    """Every order of a graph, each wait before the first reader or at the end."""

    def extended(done: list[int], left: set[int]) -> Iterator[list[int]]:
        if not left:
            yield done
        for i in sorted(left):
            if not any(i in graph.successors[j] for j in left):
                yield from extended([*done, i], left - {i})

    for indices in extended([], set(range(len(graph.ops)))):
        ops: list[Operation] = []
        for i in indices:
            waits = {v.owner: None for v in graph.ops[i].operands if isinstance(v.owner, WaitOp)}
            ops += [wait for wait in waits if wait not in ops]
            ops.append(graph.ops[i])
        yield ops + [wait for wait in graph.waits if wait is not None and wait not in ops]


def test_small_steps_take_hardly_more_than_the_best_of_all_orders() -> None:
    total_s = best_total_s = 0.0
    for seed in range(20):
        program = small_step(seed)
        times = []
        for ops in all_orders(graph_of(program)):
            program.reorder(ops)
            times.append(simulate(program, CLUSTER).time_s)
        found = simulate(by_longest_path(program), CLUSTER)
        assert found.lower_bound_s <= min(times) * (1 + 1e-9)
        assert min(times) * (1 - 1e-9) <= found.time_s <= min(times) * 1.15
        total_s, best_total_s = total_s + found.time_s, best_total_s + min(times)
    assert total_s <= best_total_s * 1.05


def test_random_steps_keep_every_op_and_every_value() -> None:
    for seed in range(15):
        program = run_passes(random_step(seed), "rematerialize,start-collectives")
        cap = Random(seed).randint(1, peak_memory(program).peak_bytes)
        for options in ((None, None), (cap, None), (None, 1), (cap, 2)):
            after = by_longest_path(program, *options)
            assert sorted(order(after)) == sorted(order(program))
            assert_same_values(program, after)


@pytest.mark.parametrize("ahead", [1, 2])
def test_recomputation_runs_no_further_ahead_than_its_gate(ahead: int) -> None:
    program = run_passes(random_step(3), "rematerialize,start-collectives")
    graph = graph_of(program)
    gates = recompute_gates(graph, ahead)
    assert gates
    assert {phase_of(graph.ops[i]) for i in gates} == {"backward"}
    priority = lambda i: (graph.tail_s[i], -float(i))  # noqa: E731
    found = list_schedule(graph, priority, None, gates)
    place = {op: i for i, op in enumerate(found)}
    for gate, gated in gates.items():
        for i in gated:
            assert phase_of(graph.ops[i]) == "recompute"
            assert place[graph.ops[gate]] < place[graph.ops[i]]
            between = [
                j
                for j in range(gate + 1, i)
                if graph.streams[j] is not None
                and phase_of(graph.ops[j]) == "backward"
                and copy_of(graph.ops[j]) == copy_of(graph.ops[i])
            ]
            assert len(between) <= ahead - 1
