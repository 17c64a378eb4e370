"""overlap-communication{schedule=in-order}: when messages start and are waited for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from xdsl.ir import Operation

from shardweave.ir.dialects.annotations import layer_of, phase_of
from shardweave.ir.dialects.dist import ReduceScatterOp, StartedOp, WaitOp
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.blocks import blocks_of
from shardweave.ir.program.program import Program
from shardweave.passes.messages.bucket_collectives import BucketCollectivesPass
from shardweave.planners.lowering.lower import local_program, lowered
from shardweave.planners.lowering.plan_passes import PlanPasses
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.simulate.simulate import simulate
from shardweave.tests.ir_text import assert_passes_to
from shardweave.tests.passes.test_weight_buckets import SPEC, gathers, stored_plan
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured

PASSES = "start-collectives,overlap-communication{schedule=in-order}"


def ordered(text: str, expected: str, mesh: str = "data=2") -> Program:
    return assert_passes_to(PASSES, text, expected, mesh, local=True)


def places(program: Program, wanted: type[Operation] | tuple[type[Operation], ...]) -> list[int]:
    return [index for index, op in enumerate(program.ops) if isinstance(op, wanted)]


def test_message_is_started_where_it_is_made_and_waited_for_where_it_is_read() -> None:
    ordered(
        """
        input %x : tensor<4xf64>
        %a = aten.exp(%x) : tensor<4xf64>
        %s = dist.all_reduce(%a, axes = ["data"]) : tensor<4xf64>
        %b = aten.sin(%x) : tensor<4xf64>
        %c = aten.mul.Tensor(%b, %s) : tensor<4xf64>
        output %c
        """,
        """
        %a = aten.exp(%x) : tensor<4xf64>
        %started = dist.start_all_reduce(%a, axes = ["data"]) : tensor<4xf64>
        %b = aten.sin(%x) : tensor<4xf64>
        %s = dist.wait(%started) : tensor<4xf64>
        %c = aten.mul.Tensor(%b, %s) : tensor<4xf64>
        """,
    )


def test_gradients_are_waited_for_at_the_end() -> None:
    ordered(
        """
        input %x : tensor<4xf64>
        %a = aten.exp(%x) : tensor<4xf64>
        %ra = dist.all_reduce(%a, axes = ["data"]) : tensor<4xf64>
        %va = aten.view(%ra) : tensor<2x2xf64>
        %b = aten.sin(%x) : tensor<4xf64>
        grad a = %va
        grad b = %b
        """,
        """
        %a = aten.exp(%x) : tensor<4xf64>
        %started = dist.start_all_reduce(%a, axes = ["data"]) : tensor<4xf64>
        %b = aten.sin(%x) : tensor<4xf64>
        %ra = dist.wait(%started) : tensor<4xf64>
        %va = aten.view(%ra) : tensor<2x2xf64>
        """,
    )


def test_weight_gradients_are_computed_while_the_input_gradient_of_the_block_is_reduced() -> None:
    back = 'layer = "h.0.fc", phase = backward'
    ordered(
        f"""
        input %x : tensor<4xf64>
        %dx = aten.exp(%x) {{{back}}} : tensor<4xf64>
        %dw = aten.sin(%x) {{{back}}} : tensor<4xf64>
        %more = aten.cos(%dx) {{{back}}} : tensor<4xf64>
        %s = dist.all_reduce(%more, axes = ["data"]) {{{back}}} : tensor<4xf64>
        %next = aten.exp(%s) {{{back}}} : tensor<4xf64>
        grad w = %dw
        grad x = %next
        """,
        """
        %dx = aten.exp(%x) : tensor<4xf64>
        %more = aten.cos(%dx) : tensor<4xf64>
        %started = dist.start_all_reduce(%more, axes = ["data"]) : tensor<4xf64>
        %dw = aten.sin(%x) : tensor<4xf64>
        %s = dist.wait(%started) : tensor<4xf64>
        %next = aten.exp(%s) : tensor<4xf64>
        """,
    )


def test_weights_of_a_block_are_on_their_way_while_the_block_before_it_computes() -> None:
    program = local_program(captured(SPEC).program, stored_plan(SPEC))
    ops = list(program.ops)
    for start, after in zip(gathers(program), gathers(program)[1:], strict=False):
        landed = next(i for i, op in enumerate(ops) if op.operands and start in producers(op))
        # One block ahead, never two: the next is started once this one is there.
        assert ops.index(start) < landed < ops.index(after)


def producers(op: Operation) -> list[Operation]:
    if not isinstance(op, WaitOp):
        return []
    return [v.owner for v in op.operands if isinstance(v.owner, Operation)]


def test_scattered_gradients_of_one_block_at_most_are_in_flight() -> None:
    program = local_program(captured(SPEC).program, stored_plan(SPEC))
    in_flight: set[Operation] = set()
    for op in program.ops:
        if isinstance(op, StartedOp) and isinstance(op, ReduceScatterOp):
            in_flight.add(op)
        in_flight -= set(producers(op))
        assert len(in_flight) <= 1
    blocks = [layer_of(op) for op in program.ops if isinstance(op, ReduceScatterOp)]
    assert blocks == ["", "h.2", "h.1", "h.0", ""]


@pytest.mark.parametrize("model", ["gpt", "llama", "vit"])
@pytest.mark.parametrize("sizes", [{"alone_bytes": 1}, {"bytes": 2048}, {}], ids=str)
def test_gradients_of_one_block_at_most_are_being_scattered_whatever_their_size(
    model: str, sizes: dict[str, int]
) -> None:
    plan = stored_plan(SPECS[model])
    passes = [*PlanPasses.of(plan).partitioning, BucketCollectivesPass(**sizes)]
    finishing = ["start-collectives", 'overlap-communication{schedule="in-order"}']
    program = lowered(captured(SPECS[model]).program, plan, [*passes, *finishing])
    blocks, in_flight = blocks_of(program), set[Operation]()
    for op in program.ops:
        if isinstance(op, StartedOp) and isinstance(op, ReduceScatterOp):
            in_flight.add(op)
        in_flight -= set(producers(op))
        assert len({blocks.of_op(one) for one in in_flight}) <= 1


@pytest.mark.parametrize("mesh", ["data=2", "tensor=2", "data=2,tensor=2"])
def test_default_step_is_no_slower_than_one_that_waits_and_equals_eager(mesh: str) -> None:
    case = captured(SPEC)
    plan = plan_megatron(case.program, Mesh.parse(mesh))
    program = local_program(case.program, plan)
    blocking = local_program(case.program, replace(plan, schedule="blocking"))
    times = [simulate(one, "testbed:nodes=4").time_s for one in (program, blocking)]
    assert times[0] <= times[1]
    assert_equals_eager(program, case)


def test_views_of_weights_that_the_backward_pass_reads_stand_in_it() -> None:
    case = captured("gpt:layers=2,hidden=16,heads=2,vocab=16,seq=8,batch=8,experts=4,choices=2")
    plan = plan_megatron(case.program, Mesh(data=2))
    options = {"zero": 2, "recompute": "after-communication", "recompute_in": ("h.0",)}
    program = local_program(case.program, replace(plan, **options))
    first = next(op for op in program.ops if phase_of(op) != "forward")
    assert any(value.name_hint == "tangent" for value in first.operands)
