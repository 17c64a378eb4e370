"""megatron with an axis `context`: where sequences are cut, and that every step equals eager's."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from shardweave.backends.emit.emit import emit
from shardweave.driver.checking.check import scalar_loss
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.dist import STARTS, AllGatherOp, SliceOp, WaitOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.ops.registry import is_attention
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import parts_of
from shardweave.ir.program.storage import kept_bytes
from shardweave.passes.pipeline import as_mesh
from shardweave.planners.lowering.lower import local_program, lowered
from shardweave.planners.lowering.plan_passes import PlanPasses
from shardweave.planners.megatron.input_cuts import sequence_cut
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.planners.simulate.simulate import simulate
from shardweave.planners.simulate.simulation import Simulation
from shardweave.tests.compiled import compile_copy
from shardweave.tests.spawn import run_ranks
from shardweave.tests.zoo import (
    SPECS,
    TEXT_SPECS,
    assert_equals_eager,
    captured,
    gradient_errors,
)

STRIPED, PLAIN = '[{}, {"context":1}]', '[{}, {"context"}]'
GROUPED = (
    "hf:llama:num_hidden_layers=1,hidden_size=16,num_attention_heads=4,num_key_value_heads=2,"
    "intermediate_size=32,vocab_size=32,batch=4,seq=8"
)


def plan_of(spec: str, mesh: str, **options: Any) -> Plan:
    return plan_megatron(captured(spec).program, as_mesh(mesh), **options)


def step_of(spec: str, mesh: str, **options: Any) -> Program:
    return local_program(captured(spec).program, plan_of(spec, mesh, **options))


def check(spec: str, mesh: str, **options: Any) -> None:
    assert_equals_eager(step_of(spec, mesh, **options), captured(spec))


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("gpt", STRIPED),
        ("llama", STRIPED),
        ("bert", PLAIN),
        pytest.param("t5", PLAIN, marks=pytest.mark.slow),
    ],
)
def test_inputs_are_cut_in_stripes_where_attention_is_causal(name: str, cut: str) -> None:
    plan = plan_of(SPECS[name], "context=2")
    inputs = [s.name for s in captured(SPECS[name]).program.arguments if s.kind == "input"]
    assert plan.inputs == dict.fromkeys(inputs, cut)
    assert (plan.parameters, plan.notes) == ({}, ())


def test_parts_of_attention_are_of_stripes() -> None:
    plan = plan_of(SPECS["bert"], "context=2", attention_parts=2)
    assert (set(plan.inputs.values()), plan.attention_parts) == ({STRIPED}, 2)


def test_axes_join() -> None:
    plan = plan_of(SPECS["gpt"], "data=2,context=2,tensor=2", sequence_parallel=True)
    assert set(plan.inputs.values()) == {'[{"data"}, {"context":1}]'}
    # The stripe's are the last digits of a position, and each has the tensor axis' shards.
    assert plan.activations == {"wte": '[{"data"}, {"tensor":8, "context":1}, {}]'}
    plan = plan_of(SPECS["bert"], "context=2,tensor=2", sequence_parallel=True)
    assert set(plan.activations.values()) == {'[{}, {"context", "tensor"}, {}]'}


@pytest.mark.parametrize(
    ("spec", "options", "note"),
    [
        (
            "gpt:layers=1,hidden=16,heads=4,vocab=32,seq=7,batch=4",
            {},
            "sequences of 7 stay whole: they do not divide by context=2",
        ),
        (
            "gpt:layers=1,hidden=16,heads=4,vocab=32,seq=8,batch=4",
            {"attention_parts": 8},
            "sequences of 8 stay whole: they do not divide by context=2 in 8 parts of attention",
        ),
        (
            SPECS["cnn"],
            {},
            "axis 'context' of the mesh is idle: no sequence was found, for no embedding is looked "
            "up by an input, and there is no fused attention",
        ),
    ],
)
def test_what_is_not_cut_is_noted(spec: str, options: dict[str, Any], note: str) -> None:
    plan = plan_of(spec, "context=2", **options)
    assert plan.inputs == {}
    assert note in plan.notes


def test_parts_of_attention_where_no_axis_cuts_the_sequence_are_noted() -> None:
    for mesh in ("data=2", "data=2,context=1"):
        plan = plan_of(SPECS["gpt"], mesh, attention_parts=4)
        assert any(
            "attention_parts=4 has no effect: no axis shards" in note for note in plan.undone
        )
        assert plan.attention_parts == 1
    assert plan_of(SPECS["gpt"], "data=2").undone == []


def test_fewer_than_one_part_is_refused() -> None:
    with pytest.raises(
        ValueError, match="attention_parts=0, expected a whole number of at least 1"
    ):
        sequence_cut(captured(SPECS["gpt"]).program, as_mesh("context=2"), "context", 0)


@pytest.mark.parametrize(
    ("spec", "mesh", "options"),
    [
        (SPECS["gpt"], "context=2", {}),
        (GROUPED, "data=2,context=2", {"attention_parts": 2}),
    ],
)
def test_step_equals_eager(spec: str, mesh: str, options: dict[str, Any]) -> None:
    check(spec, mesh, **options)


MESHES = ("context=2", "context=4", "data=2,context=2", "context=2,tensor=2")


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("spec", [*TEXT_SPECS.values(), GROUPED])
def test_every_step_equals_eager(spec: str, mesh: str, parts: int) -> None:
    check(spec, mesh, attention_parts=parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama", "bert"])
def test_context_joins_sequence_parallelism(name: str) -> None:
    mesh = "data=2,context=2,tensor=2"
    check(SPECS[name], mesh, sequence_parallel=True)
    check(SPECS[name], mesh, sequence_parallel=True, attention_parts=2)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("recompute", ["layer", "after-communication", "after-products"])
def test_context_joins_sub_batches_and_recomputation(recompute: str, parts: int) -> None:
    plan = plan_of(SPECS["gpt"], "data=2,context=2", attention_parts=parts)
    plan = replace(plan, batch_split=2, recompute=recompute)
    program = local_program(captured(SPECS["gpt"]).program, plan)
    assert_equals_eager(program, captured(SPECS["gpt"]))


LONG = "gpt:layers=2,hidden=32,heads=4,ffn=48,vocab=16,seq=128,batch=2"


def partitioned(spec: str, mesh: str, **options: Any) -> Program:
    """The program of each rank, in the order in which it was written."""
    plan = plan_of(spec, mesh, **options)
    return lowered(captured(spec).program, plan, PlanPasses.of(plan).partitioning)


@pytest.mark.parametrize("parts", [1, 4])
def test_kept_activations_are_divided(parts: int) -> None:
    whole = kept_bytes(partitioned(LONG, "data=1"))
    for size in (2, 4):
        kept = kept_bytes(partitioned(LONG, f"context={size}", attention_parts=parts))
        assert 1 <= kept / (whole / size) < 1.1


def test_keys_and_values_are_gathered_for_each_pass_and_nothing_else_is() -> None:
    program = partitioned(LONG, "context=2")
    gathers = [op for op in program.ops if isinstance(op, AllGatherOp)]
    # Two layers, keys and values, and labels or masks none: the loss is computed on the shards.
    assert [shape_of(op.results[0]) for op in gathers] == [(2, 4, 128, 8)] * 8
    assert [phase_of(op) for op in gathers] == ["forward"] * 4 + ["recompute"] * 4
    scattered = {(one.kind, one.phase): one.count for one in program.stats().collectives}
    assert scattered["reduce_scatter", "backward"] == 4


def test_gradients_of_rotated_keys_are_scattered_before_the_rotation() -> None:
    """So that what follows, the products of `k_proj` too, is of a device's keys alone."""
    program = partitioned(GROUPED, "context=2")
    messages = {(one.kind, one.phase): one.count for one in program.stats().collectives}
    assert messages["reduce_scatter", "backward"] == 2
    assert not any(isinstance(op, SliceOp) and phase_of(op) != "forward" for op in program.ops)


def test_no_value_is_as_large_as_all_scores() -> None:
    program = partitioned(LONG, "context=2")
    sizes = {shape_of(value)[-2:] for op in program.ops for value in op.results}
    assert (64, 8) in sizes  # the queries of a device and of a head
    assert sizes.isdisjoint({(64, 128), (128, 128)})


@pytest.mark.parametrize("stages", [1, 2])
def test_each_rank_counts_the_positions_of_its_attention_on_the_host(stages: int) -> None:
    """So that on a GPU too it computes the pieces that queries see, and no mask."""
    plan = plan_of(SPECS["llama"], "context=2,tensor=2", sequence_parallel=True)
    if stages > 1:
        names = ("model.embed_tokens", "model.layers.0"), ("model.layers.1", "model.norm")
        plan = replace(plan, mesh={"pipeline": 2, **plan.mesh}, pipeline=Pipeline(names, 2))
    program = local_program(captured(SPECS["llama"]).program, plan)
    lines = [
        line.split("  #")[0]
        for part in parts_of(program)
        for line in emit(part).splitlines()
        if re.search(r"= positional_attention(_backward)?\(", line)
    ]
    assert len(lines) >= 4
    keys = 'aten.arange.start_step(0, 16, 1, dtype=torch.int64, device="cpu")'
    rows = f'rt.slice({keys}, axes=("context",), dim=0, block=1)'
    assert all(f"{rows}, {keys}" in line for line in lines)


# Schedules

WIDE = "gpt:layers=1,hidden=256,heads=4,vocab=64,seq=4096,batch=2,tie=false"
LINK = "testbed:rate=500mbit"
"""So slow that what is hidden is worth more than the merges of four parts take."""


def simulated(parts: int, schedule: str) -> Simulation:
    """A step of a long sequence on two devices, which nobody runs."""
    plan = plan_megatron(wide(), as_mesh("context=2"), attention_parts=parts)
    plan = replace(plan, schedule=schedule, cluster=LINK if schedule else "")
    return simulate(local_program(wide(), plan), LINK)


@cache
def wide() -> Program:
    example = build_example(WIDE)
    return capture(example.module, kwargs=example.kwargs)


@pytest.mark.parametrize("schedule", ["", "list"])
def test_parts_travel_behind_compute(schedule: str) -> None:
    blocking, whole, parts = (
        simulated(1, "blocking"),
        simulated(1, schedule),
        simulated(4, schedule),
    )
    # In one part keys and values are waited for; in four, the first part of each pass is.
    assert parts.time_s < whole.time_s < blocking.time_s
    exposed = [one.exposed_communication_s for one in (parts, whole, blocking)]
    assert exposed[0] < 0.4 * exposed[1] < 0.4 * exposed[2]


def test_next_part_is_on_its_way_while_one_is_computed() -> None:
    plan = plan_of(LONG, "context=2", attention_parts=4)
    program = local_program(captured(LONG).program, plan)
    on_way: list[int] = []
    flying = 0
    for op in program.ops:
        if isinstance(op, STARTS[AllGatherOp]):
            flying += 1
        elif isinstance(op, WaitOp) and isinstance(op.operands[0].owner, STARTS[AllGatherOp]):
            flying -= 1
        elif is_attention(op):
            on_way.append(flying)
    # Keys and values of one part, but of the last: in two layers and both passes.
    assert on_way == [2, 2, 2, 0] * 4


# Processes


def step_on_rank(mesh: str, parts: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and whole gradients of a step."""
    example = build_example(GROUPED, dtype=torch.float64)
    program = capture(example.module, kwargs=example.kwargs)
    plan = plan_megatron(program, as_mesh(mesh), attention_parts=parts)
    step = compile_copy(example.module, kwargs=example.kwargs, mesh=mesh, plan=plan)
    loss = step(**example.kwargs)
    return scalar_loss(loss).detach(), {
        n: cast(Any, p.grad).full_tensor() for n, p in step.named_parameters()
    }


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_step_on_processes_equals_eager(parts: int) -> None:
    expected = captured(GROUPED)
    for loss, gradients in run_ranks(step_on_rank, 4, "data=2,context=2", parts):
        assert abs(loss.item() - expected.loss) <= 1e-12 * abs(expected.loss)
        assert max(gradient_errors(gradients, expected.gradients).values()) <= 1e-9
