"""bucket-collectives on weights that are stored in shards: which are gathered together, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.dist import AllGatherOp, ReduceScatterOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import PassPipeline, run_passes
from shardweave.planners.cost.memory import peak_memory
from shardweave.planners.lowering.lower import local_program, lowered
from shardweave.planners.lowering.plan_passes import PlanPasses, plan_passes
from shardweave.planners.overlap.overlap_communication import OverlapCommunicationPass
from shardweave.planners.plan.plan import Plan
from shardweave.tests.ir_text import assert_passes_to, assert_same_values, step
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured

SPEC = "gpt:layers=3,hidden=16,heads=4,vocab=32,seq=8,batch=8,tie=false"
TWO = """
    param %v : tensor<2x6xf64> [{"data"}, {}]
    param %w : tensor<4x3xf64> [{}, {"data"}]
    input %x : tensor<4x4xf64>
    %v1 = dist.all_gather(%v, axes = ["data"], dim = 0, block = 2) {layer = "h.0.up", phase = forward} : tensor<4x6xf64>
    %up = aten.mm(%x, %v1) {layer = "h.0.up", phase = forward} : tensor<4x6xf64>
    %w1 = dist.all_gather(%w, axes = ["data"], dim = 1, block = 3) {layer = "h.0.down", phase = forward} : tensor<4x6xf64>
    %out = aten.mul.Tensor(%up, %w1) {layer = "h.0.down", phase = forward} : tensor<4x6xf64>
    output %out
"""


def stored_plan(spec: str, mesh: str = "data=2") -> Plan:
    """Every parameter stored in shards over the axis data, along the first dim that divides."""
    size = int(mesh.partition("=")[2])
    parameters: dict[str, str] = {}
    for slot in captured(spec).program.arguments:
        shape = shape_of(slot.value)
        dim = next((d for d, length in enumerate(shape) if length % size == 0), None)
        if slot.kind == "param" and dim is not None:
            cuts = ", ".join('{"data"}' if d == dim else "{}" for d in range(len(shape)))
            parameters[slot.name] = f"[{cuts}]"
    inputs = {s.name: s for s in captured(spec).program.arguments if s.kind == "input"}
    cut = {n: ", ".join(["{}"] * (len(shape_of(s.value)) - 1)) for n, s in inputs.items()}
    return Plan(
        mesh={"data": size},
        parameters=parameters,
        inputs={n: f'[{{"data"}}, {rest}]' if rest else '[{"data"}]' for n, rest in cut.items()},
    )


def gathers(program: Program) -> list[AllGatherOp]:
    return [op for op in program.ops if isinstance(op, AllGatherOp)]


def test_weights_of_a_block_are_rows_of_one_message_where_the_first_is_read() -> None:
    after = assert_passes_to(
        "bucket-collectives",
        TWO,
        """
        %part = aten.view(%v) : tensor<1x12xf64>
        %part_1 = aten.view(%w) : tensor<1x12xf64>
        %part_2 = aten.cat([%part, %part_1], dim = 1) : tensor<1x24xf64>
        %w1 = dist.all_gather(%part_2, axes = ["data"], dim = 0, block = 1) : tensor<2x24xf64>
        %part_3 = aten.slice.Tensor(%w1, dim = 1, start = 0) : tensor<2x12xf64>
        %v1 = aten.view(%part_3) : tensor<4x6xf64>
        %part_4 = aten.slice.Tensor(%w1, dim = 1, start = 12) : tensor<2x12xf64>
        %part_5 = aten.view(%part_4) : tensor<2x4x1x3xf64>
        %part_6 = aten.permute(%part_5, dims = [1, 2, 0, 3]) : tensor<4x1x2x3xf64>
        %w1_1 = aten.view(%part_6) : tensor<4x6xf64>
        %up = aten.mm(%x, %v1) : tensor<4x6xf64>
        %out = aten.mul.Tensor(%up, %w1_1) : tensor<4x6xf64>
        """,
        "data=2",
        local=True,
    )
    assert_same_values(step(TWO, "data=2", local=True), after)


def test_large_weight_travels_alone_and_keeps_its_place() -> None:
    before = step(TWO, "data=2", local=True)
    assert run_passes(before, "bucket-collectives{alone_bytes=192}") == before
    assert len(gathers(run_passes(before, "bucket-collectives{alone_bytes=193}"))) == 1


def test_bucket_holds_no_more_than_its_bytes() -> None:
    before = step(TWO, "data=2", local=True)
    assert len(gathers(run_passes(before, "bucket-collectives{bytes=383}"))) == 2
    assert len(gathers(run_passes(before, "bucket-collectives{bytes=384}"))) == 1


def test_step_gathers_once_for_each_block_and_pass_and_scatters_once_for_each_block() -> None:
    program = local_program(captured(SPEC).program, stored_plan(SPEC))
    forward = [op for op in gathers(program) if phase_of(op) == "forward"]
    again = [op for op in gathers(program) if phase_of(op) == "recompute"]
    scatters = [op for op in program.ops if isinstance(op, ReduceScatterOp)]
    # The embedding, three blocks, the head; the head's are kept, as the backward pass begins there.
    assert (len(forward), len(again), len(scatters)) == (5, 3, 5)


def test_gathered_bytes_do_not_grow() -> None:
    plan = stored_plan(SPEC)
    blocking = lowered(captured(SPEC).program, plan, PlanPasses.of(plan).partitioning)
    bucketed = local_program(captured(SPEC).program, plan)
    sent = [sum(s.sent_bytes for s in p.stats().collectives) for p in (blocking, bucketed)]
    assert sent[1] <= sent[0]


@pytest.mark.parametrize("mesh", ["data=2", "data=4"])
@pytest.mark.parametrize("spec", [SPEC, SPECS["gpt"]], ids=["untied", "tied"])
def test_default_step_on_stored_shards_equals_eager(spec: str, mesh: str) -> None:
    case = captured(spec)
    plan = stored_plan(spec, mesh)
    program = case.program.clone()
    program.set_mesh(Mesh(**plan.mesh))
    assert_equals_eager(PassPipeline(plan_passes(plan)).run(program), case)


def test_least_memory_is_taken_where_the_cap_asks_for_it() -> None:
    plan = stored_plan(SPEC)
    program = captured(SPEC).program
    ahead = peak_memory(local_program(program, plan)).peak_bytes
    passes = [*PlanPasses.of(plan).partitioning, "bucket-collectives", "start-collectives"]
    least = lowered(program, plan, [*passes, OverlapCommunicationPass("in-order", "", ahead - 1)])
    assert peak_memory(least).peak_bytes < ahead
    with pytest.raises(ValueError, match="schedule in-order needs"):
        lowered(program, plan, [*passes, OverlapCommunicationPass("in-order", "", 1)])


def test_kept_weights_are_an_option() -> None:
    plan = stored_plan(SPEC)
    program = captured(SPEC).program
    local = lowered(program, replace(plan, recompute="none"), PlanPasses.of(plan).partitioning)
    kept = run_passes(local, "delete-redundant-collectives,bucket-collectives")
    assert {phase_of(op) for op in gathers(kept)} == {"forward"}
