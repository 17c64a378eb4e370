"""AxoNN's overlaps as orders: each hides what it says, and `list` beats them."""

from __future__ import annotations

from functools import cache

import pytest
from xdsl.ir import Operation

from shardweave.benchmarks.axonn_overlap import KEPT_GATHERS, local_program, step_of
from shardweave.benchmarks.axonn_planner import captured as captured_stack
from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.dist import (
    STARTS,
    AllGatherOp,
    AllReduceOp,
    ReduceScatterOp,
    StartedOp,
    WaitOp,
)
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import as_mesh, run_passes
from shardweave.planners.axonn.planner import plan_axonn
from shardweave.planners.overlap.axonn_orders import AXONN_ORDERS
from shardweave.planners.overlap.graph import wait_of
from shardweave.planners.overlap.in_order import is_last
from shardweave.planners.simulate.simulate import simulate
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured, partitioned

GRID = "data=1,z=2,y=2,x=2"
CLUSTER = "perlmutter:nodes=2"


@cache
def started() -> Program:
    """A GPT on AxoNN's grid, recomputed."""
    program = captured(SPECS["gpt"]).program
    plan = plan_axonn(program, as_mesh(GRID))
    local = partitioned(SPECS["gpt"], GRID, plan)
    return run_passes(local, "cse,dce,rematerialize{policy=layer},start-collectives")


def ordered(schedule: str, memory_cap: int | None = None) -> Program:
    cap = "" if memory_cap is None else f" memory-cap={memory_cap}"
    return run_passes(
        started(), f'overlap-communication{{schedule={schedule} cluster="{CLUSTER}"{cap}}}'
    )


def between(program: Program, start: Operation) -> list[Operation]:
    """The ops from a start to its wait."""
    ops = list(program.ops)
    return ops[ops.index(start) + 1 : ops.index(wait_of(start))]


def products(ops: list[Operation]) -> list[Operation]:
    return [op for op in ops if op.name in ("aten.mm", "aten.bmm")]


@pytest.mark.parametrize("name", AXONN_ORDERS)
def test_order_of_axonn_equals_eager(name: str) -> None:
    assert_equals_eager(ordered(name), captured(SPECS["gpt"]))


def test_input_gradient_travels_while_weight_gradients_are_computed() -> None:
    for name, hides in (("blocking", False), ("axonn-a", True)):
        program = ordered(name)
        reductions = [
            op
            for op in program.ops
            if isinstance(op, STARTS[AllReduceOp])
            and phase_of(op) == "backward"
            and not is_last(op)
        ]
        assert reductions
        assert any(products(between(program, op)) for op in reductions) == hides


def test_reduce_scatters_are_waited_for_behind_the_backward_pass() -> None:
    for name, waits_late in (("axonn-a", False), ("axonn-ab", True)):
        program = ordered(name)
        ops = list(program.ops)
        last = max(ops.index(op) for op in products(ops))
        scatters = [op for op in ops if isinstance(op, STARTS[ReduceScatterOp]) and is_last(op)]
        assert scatters
        assert all(ops.index(wait_of(op)) > last for op in scatters) == waits_late


def test_next_weight_is_gathered_while_a_layer_computes() -> None:
    for name, is_ahead in (("axonn-ab", False), ("axonn-abc", True)):
        program = ordered(name)
        gathers = [
            op
            for op in program.ops
            if isinstance(op, STARTS[AllGatherOp]) and op.axes == ("z",)
            if phase_of(op) == "forward"
        ]
        hidden = sum(bool(products(between(program, op))) for op in gathers)
        # What the embedding and the first product read comes before any product.
        assert hidden == (len(gathers) - 2 if is_ahead else 0)


def test_other_messages_block() -> None:
    program = ordered("axonn-abc")
    for op in program.ops:
        if isinstance(op, STARTS[AllReduceOp]) and phase_of(op) == "forward":
            assert not between(program, op)


def test_list_beats_every_order_of_axonn_in_a_device_s_memory() -> None:
    local = local_program(captured_stack("GPT-5B", 1, 16), {"z": 4, "y": 2, "x": 2}, KEPT_GATHERS)
    times = [step_of(local, name, "perlmutter:nodes=4").time_s for name in (*AXONN_ORDERS, "list")]
    assert min(times[:-1]) > 1.1 * times[-1]


def test_list_is_not_slower_in_the_memory_that_an_order_needs() -> None:
    order = simulate(ordered("axonn-abc"), CLUSTER)
    found = simulate(ordered("list", order.peak_bytes), CLUSTER)
    assert found.peak_bytes <= order.peak_bytes
    assert found.time_s <= order.time_s


def test_every_overlap_makes_the_step_shorter() -> None:
    times = [simulate(ordered(name), CLUSTER).time_s for name in ("blocking", *AXONN_ORDERS)]
    assert times == sorted(times, reverse=True)


def test_orders_are_permutations_with_a_wait_for_each_start() -> None:
    names = sorted(op.name for op in started().ops)
    for name in AXONN_ORDERS:
        ops = list(ordered(name).ops)
        assert sorted(op.name for op in ops) == names
        starts = [op for op in ops if isinstance(op, StartedOp)]
        assert len(starts) == sum(isinstance(op, WaitOp) for op in ops)
