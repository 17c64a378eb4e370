"""megatron with an axis `context`: where sequences are cut, and that every step equals eager's."""

from __future__ import annotations

from typing import Any

import pytest

from shardweave.ir.annotations import phase_of
from shardweave.ir.dist import AllGatherOp
from shardweave.ir.program import Program
from shardweave.ir.storage import kept_bytes
from shardweave.ir.types import shape_of
from shardweave.passes.pipeline import as_mesh
from shardweave.planners.lower import local_program, lowered, partitioning_of
from shardweave.planners.megatron import plan_megatron
from shardweave.planners.plan import Plan
from shardweave.planners.sequence_cut import sequence_cut
from shardweave.tests.zoo import SPECS, TEXT_SPECS, assert_equals_eager, captured

STRIPED, PLAIN = '[{}, {"context":1}]', '[{}, {"context"}]'
GROUPED = (
    "hf:llama:num_hidden_layers=2,hidden_size=16,num_attention_heads=4,num_key_value_heads=2,"
    "intermediate_size=32,vocab_size=32,batch=2,seq=8"
)


def plan_of(spec: str, mesh: str, **options: Any) -> Plan:
    return plan_megatron(captured(spec).program, as_mesh(mesh), **options)


def step_of(spec: str, mesh: str, **options: Any) -> Program:
    return local_program(captured(spec).program, plan_of(spec, mesh, **options))


def check(spec: str, mesh: str, **options: Any) -> None:
    assert_equals_eager(step_of(spec, mesh, **options), captured(spec))


@pytest.mark.parametrize(
    ("name", "cut"),
    [("gpt", STRIPED), ("llama", STRIPED), ("bert", PLAIN), ("t5", PLAIN)],
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


def test_fewer_than_one_part_is_refused() -> None:
    with pytest.raises(ValueError, match="attention_parts=0; give at least 1"):
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
def test_context_joins_sequence_parallelism_and_sub_batches(name: str) -> None:
    mesh = "data=2,context=2,tensor=2"
    check(SPECS[name], mesh, sequence_parallel=True)
    check(SPECS[name], mesh, sequence_parallel=True, attention_parts=2)


LONG = "gpt:layers=2,hidden=32,heads=4,ffn=48,vocab=16,seq=128,batch=2"


def partitioned(spec: str, mesh: str, **options: Any) -> Program:
    """The program of each rank, in the order in which it was written."""
    plan = plan_of(spec, mesh, **options)
    return lowered(captured(spec).program, plan, partitioning_of(plan))


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


def test_no_value_is_as_large_as_all_scores() -> None:
    program = partitioned(LONG, "context=2")
    sizes = {shape_of(value)[-2:] for op in program.ops for value in op.results}
    assert (64, 8) in sizes  # the queries of a device and of a head
    assert sizes.isdisjoint({(64, 128), (128, 128)})
