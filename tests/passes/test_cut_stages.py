"""Cutting into stages: equal to eager by every schedule, and no schedule that hangs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from shardweave.backends.reference.reference import ReplicaMismatchError, run_reference
from shardweave.ir.dialects.annotations import layer_of, set_phase
from shardweave.ir.dialects.dist import RecvOp, RunOp, SendOp
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import StagePlaces, functions_of, num_ops_on_a_rank
from shardweave.ir.verify.program import verify
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.lowering.partition import partition
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import PIPELINE_SCHEDULES, Pipeline
from shardweave.planners.schedules.schedules import find_schedule
from shardweave.tests.compiled import compile_copy
from shardweave.tests.marks import slow
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured, megatron, partitioned

GPT = "gpt:layers=4,hidden=16,heads=4,vocab=32,seq=8,batch=8"
UNTIED = f"{GPT},tie=false"
ODD = "gpt:layers=2,hidden=12,heads=3,vocab=33,seq=6,batch=8,ffn=21"
EXPERTS = "gpt:layers=2,hidden=16,heads=4,vocab=32,seq=4,batch=8,experts=4,capacity=1"


@cache
def plan_of(spec: str, mesh: str, schedule: str, micro_batches: int, chunks: int = 0) -> Plan:
    program, devices = captured(spec).program, Mesh.parse(mesh)
    count = devices.num_stages * (chunks or find_schedule(schedule).chunks)
    stages = balanced_stages(program, count)
    pipeline = Pipeline(stages, micro_batches, schedule=schedule)
    return replace(plan_megatron(program, devices), pipeline=pipeline)


_cut: dict[tuple[str, str], Program] = {}


def cut(spec: str, plan: Plan) -> Program:
    """The staged program, verified behind every pass, and equal to its text: a copy of one that is
    made once."""
    key = spec, repr(plan)
    if key not in _cut:
        program = partition(captured(spec).program, Mesh(**plan.mesh), plan)
        assert Program.parse(str(program)) == program
        _cut[key] = program
    return _cut[key].clone()


def check(spec: str, plan: Plan) -> Program:
    program = cut(spec, plan)
    assert_equals_eager(program, captured(spec))
    return program


@pytest.mark.parametrize(
    ("mesh", "schedule", "micro_batches", "chunks"),
    [
        ("stage=2", "1f1b", 4, 1),
        ("stage=2,data=2", "gpipe", 2, 1),
        ("stage=2,tensor=2", "interleaved-1f1b", 4, 2),
        ("stage=4", "zero-bubble", 8, 1),
        ("data=2,stage=2", "zero-bubble-v", 4, 2),
        ("stage=2,data=2", "dualpipe-v", 4, 2),
        slow("stage=2", "gpipe", 1, 1),
        ("data=2", "1f1b", 4, 1),
        slow("stage=4", "list", 8, 1),
        ("stage=2", "list", 4, 2),
    ],
)
def test_every_schedule_equals_eager(
    mesh: str, schedule: str, micro_batches: int, chunks: int
) -> None:
    check(GPT, plan_of(GPT, mesh, schedule, micro_batches, chunks))


@pytest.mark.parametrize(
    ("order", "number", "layers", "other"),
    [((1, 0), 0, r"h\.2\S* \.\. \S+", 1), ((0, 2, 1, 3), 1, r"h\.2\S* \.\. h\.2\S*", 2)],
)
def test_stage_behind_a_later_one_is_refused(
    order: tuple[int, ...], number: int, layers: str, other: int
) -> None:
    plan = plan_of(GPT, f"stage={len(order)}", "1f1b", 4)
    assert plan.pipeline is not None
    stages = tuple(plan.pipeline.stages[index] for index in order)
    wrong = replace(plan, pipeline=replace(plan.pipeline, stages=stages))
    text = f"stage {number} has layers {layers}, but all .* in stage {other}, .* order of the model"
    with pytest.raises(PassError, match=text):
        cut(GPT, wrong)


@pytest.mark.parametrize("name", [pytest.param("t5", marks=pytest.mark.slow), "unet"])
def test_skip_connections_and_shared_embeddings_equal_eager(name: str) -> None:
    check(SPECS[name], plan_of(SPECS[name], "stage=2", "zero-bubble", 2))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
@pytest.mark.parametrize("name", ["gpt", "untied", "gpt2", "llama", "bert", "t5", "unet"])
def test_models_equal_eager_by_every_schedule(name: str, schedule: str) -> None:
    spec = {**SPECS, "gpt": GPT, "untied": UNTIED}[name]
    for mesh in ("stage=2", "stage=2,data=2", "stage=2,tensor=2", "stage=2,data=2,tensor=2"):
        for micro_batches in (4, 8) if "data" not in mesh else (4,):
            plan = plan_of(spec, mesh, schedule, micro_batches)
            if len(plan.pipeline.stages) > 4:  # pyright: ignore[reportOptionalMemberAccess]
                continue
            check(spec, plan)


@pytest.mark.parametrize(
    ("mesh", "schedule", "zero"),
    [
        ("stage=2,tensor=2", "1f1b", 0),
        pytest.param("stage=2,data=2,tensor=2", "zero-bubble", 0, marks=pytest.mark.slow),
        pytest.param("stage=2,data=2", "1f1b", 3, marks=pytest.mark.slow),
    ],
)
def test_parts_that_do_not_divide_equal_eager(mesh: str, schedule: str, zero: int) -> None:
    plan = replace(plan_of(ODD, mesh, schedule, 2), zero=zero)
    if "tensor" in mesh:
        assert plan.used["h.0.attn.q.weight"] == '[{"tensor":8}, {}]'  # two heads, and one
    check(ODD, plan)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["stage=2,expert=2", "stage=2,data=2,expert=2"])
def test_experts_in_stages_equal_eager(mesh: str) -> None:
    check(EXPERTS, plan_of(EXPERTS, mesh, "1f1b", 2))


DEEPER = {
    "layers=4": "layers=6", "n_layer=2": "n_layer=6", "num_hidden_layers=2": "num_hidden_layers=6",
    "num_layers=2": "num_layers=4",
}  # fmt: skip
"""Of models that have blocks for eight stages."""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama", "bert", "t5", "unet"])
def test_models_on_four_ranks_of_the_stage_axis_equal_eager(name: str, schedule: str) -> None:
    spec = {**SPECS, "gpt": GPT}[name]
    for shallow, deep in DEEPER.items():
        spec = spec.replace(shallow, deep)
    for mesh, micro_batches in (("stage=4", 8), ("stage=4,tensor=2", 4), ("stage=4,data=2", 4)):
        if schedule == "dualpipe-v" and micro_batches < 8:  # it needs two for each rank
            continue
        check(spec, plan_of(spec, mesh, schedule, micro_batches))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama", "bert", "t5", "unet"])
def test_models_stored_in_shards_equal_eager_in_stages(name: str, zero: int) -> None:
    spec = {**SPECS, "gpt": GPT}[name]
    for mesh, schedule in (("stage=2,data=2,tensor=2", "zero-bubble"), ("stage=2,data=2", "1f1b")):
        check(spec, replace(plan_of(spec, mesh, schedule, 4), zero=zero))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_parameters_stored_in_shards_equal_eager(zero: int) -> None:
    plan = replace(plan_of(GPT, "stage=2,data=2", "1f1b", 4), zero=zero)
    program = check(GPT, plan)
    gathers = {
        name: sum(op.name.endswith("all_gather") for op in function.ops)
        for name, function in functions_of(program).items()
    }
    scatters = {
        name: sum(op.name.endswith("reduce_scatter") for op in function.ops)
        for name, function in functions_of(program).items()
    }
    assert bool(gathers.get("before_0")) is (zero < 3)
    assert bool(gathers["forward_0"]) is (zero == 3)
    # A message for each of two blocks and the embeddings, not for each parameter.
    assert scatters["backward_0"] == (3 if zero > 1 else 0)


def uneven_plan(
    spec: str, mesh: str, shares: tuple[tuple[int, ...], ...], schedule: str = "1f1b"
) -> Plan:
    program = captured(spec).program
    stages = balanced_stages(program, len(shares) * find_schedule(schedule).chunks)
    pipeline = Pipeline(stages, sum(shares[0]), schedule=schedule, shares=shares)
    return replace(plan_megatron(program, Mesh.parse(mesh)), pipeline=pipeline)


@pytest.mark.parametrize(
    ("mesh", "shares", "more"),
    [
        ("stage=3", ((4,), (3, 1)), {}),
        ("stage=2,data=2", ((3, 1),), {"zero": 2}),
        ("stage=3,tensor=2", ((1, 3), (4,)), {"recompute": "layer"}),
    ],
)
def test_stages_at_several_coordinates_equal_eager(
    mesh: str, shares: tuple[tuple[int, ...], ...], more: dict[str, Any]
) -> None:
    program = check(GPT, replace(uneven_plan(GPT, mesh, shares), **more))
    places = StagePlaces.of(program)
    assert [len(at) for at in places.of_stage.values()] == [len(own) for own in shares]


@pytest.mark.parametrize(
    ("schedule", "mesh", "shares"),
    [
        ("zero-bubble", "stage=3", ((4,), (3, 1))),
        ("zero-bubble-v", "stage=3", ((3, 1), (4,))),
        ("list", "stage=3", ((4,), (3, 1))),
        *(
            pytest.param(schedule, mesh, shares, marks=pytest.mark.slow)
            for schedule, mesh, shares in (
                ("gpipe", "stage=3,data=2", ((2, 2), (4,))),
                ("interleaved-1f1b", "stage=3", ((1, 3), (4,))),
                ("interleaved-1f1b", "stage=2,tensor=2", ((3, 1),)),
                ("zero-bubble", "stage=2,data=2", ((3, 1),)),
                ("zero-bubble-v", "stage=4,data=2", ((3, 1), (2, 2))),
                ("dualpipe-v", "stage=3", ((5, 3), (8,))),
                ("list", "stage=4,data=2", ((3, 1), (2, 2))),
            )
        ),
    ],
)
def test_every_schedule_takes_stages_at_several_coordinates(
    schedule: str, mesh: str, shares: tuple[tuple[int, ...], ...]
) -> None:
    program = check(GPT, uneven_plan(GPT, mesh, shares, schedule))
    found = StagePlaces.of(program)
    for stage, places in found.of_stage.items():
        own = shares[find_schedule(schedule).place(stage, len(shares))]
        runs = Counter(at for (other, _), at in found.of_batch.items() if other == stage)
        assert [runs[place] for place in places] == list(own)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "unet"])
def test_models_with_stages_at_several_coordinates_equal_eager(name: str) -> None:
    for mesh, shares in (("stage=4", ((3, 1), (2, 2))), ("stage=3,data=2", ((2, 2), (4,)))):
        check(SPECS[name], uneven_plan(SPECS[name], mesh, shares))


@pytest.mark.parametrize(
    ("function", "change", "says"),
    [
        ("after_1", "drop", "@after_1 runs 0 times at 2, expected once"),
        ("before_1", "drop", "@before_1 runs 0 times at 2, expected once"),
        ("backward_1", "move", "micro-batch 2 of stage 1 is at 2, not at 1"),
        ("after_1", "apart", "put it behind the other runs of the function"),
    ],
)
def test_stage_at_two_coordinates_that_does_not_hold_together_is_found(
    function: str, change: str, says: str
) -> None:
    program = cut(GPT, uneven_plan(GPT, "stage=3", ((4,), (3, 1))))
    runs = [op for op in program.ops if isinstance(op, RunOp) and op.function == function]
    if change == "drop":
        assert runs[-1].at == 2
        runs[-1].detach()
    elif change == "move":
        (moved,) = (op for op in runs if op.at == 2)
        moved.properties["at"] = runs[0].properties["at"]
    else:
        order = list(program.ops)
        order.remove(runs[-1])
        order.insert(order.index(runs[0]) - 1, runs[-1])
        program.reorder(order)
    assert any(says in problem for problem in verify(program))


@pytest.mark.parametrize(
    ("recompute", "batch_split", "schedule"),
    [
        ("layer", 1, ""),
        ("after-communication", 2, "cross-pass"),
        slow("after-products", 1, "cross-pass"),
        slow("layer", 2, "sub-batch"),
    ],
)
def test_recomputation_and_sub_batches_work_within_each_function(
    recompute: str, batch_split: int, schedule: str
) -> None:
    plan = plan_of(GPT, "stage=2,tensor=2", "zero-bubble", 4)
    plan = replace(plan, recompute=recompute, batch_split=batch_split, schedule=schedule)
    program = check(GPT, plan)
    names = {op.name for function in functions_of(program).values() for op in function.ops}
    assert "dist.start_all_reduce" in names


def test_only_what_the_next_stage_reads_is_sent() -> None:
    program = cut(UNTIED, plan_of(UNTIED, "stage=4", "1f1b", 4))
    sends = {
        name: [op.to for op in function.ops if isinstance(op, SendOp)]
        for name, function in functions_of(program).items()
    }
    assert [sends[f"forward_{stage}"] for stage in range(4)] == [[1], [2], [3], []]
    assert [sends[f"backward_{stage}"] for stage in range(4)] == [[], [0], [1], [2]]
    ops = [op for function in functions_of(program).values() for op in function.ops]
    layers = {op.message: layer_of(op) for op in ops if isinstance(op, SendOp)}
    assert {layer_of(op) == layers[op.message] for op in ops if isinstance(op, RecvOp)} == {True}


def test_tied_embedding_is_in_both_stages_and_its_gradients_are_added_once() -> None:
    program = cut(GPT, plan_of(GPT, "stage=2", "1f1b", 4))
    functions = functions_of(program)
    for name in ("forward_0", "forward_1"):
        assert "wte.weight" in {slot.name for slot in functions[name].arguments}
    shared = [op for op in functions["share_0"].ops if isinstance(op, SendOp)]
    assert len(shared) == 1
    for name in ("after_0", "after_1"):
        assert ("grad", "wte.weight") in {(s.kind, s.name) for s in functions[name].results}


def test_loss_is_sent_once_to_each_rank() -> None:
    program = cut(UNTIED, plan_of(UNTIED, "stage=2", "interleaved-1f1b", 2))
    shared = [op for op in functions_of(program)["share_3"].ops if isinstance(op, SendOp)]
    assert len(shared) == 1


def test_skip_connections_go_straight_to_the_stage_that_reads_them() -> None:
    spec = SPECS["unet"]
    program = cut(spec, plan_of(spec, "stage=4", "1f1b", 2))
    ways = {
        (function.stage, op.to)
        for function in functions_of(program).values()
        for op in function.ops
        if isinstance(op, SendOp) and function.direction == "forward"
    }
    assert any(to > source + 1 for source, to in ways)


def test_micro_batches_add_runs_to_the_text_and_no_bodies() -> None:
    few, many = (len(str(cut(GPT, plan_of(GPT, "stage=2", "1f1b", n)))) for n in (2, 8))
    assert (many - few) / 6 < 0.02 * few


def test_ops_on_a_rank_are_those_of_all_functions_of_its_stage() -> None:
    program = cut(UNTIED, plan_of(UNTIED, "stage=2", "1f1b", 4))
    sizes: Counter[int] = Counter()
    for one in functions_of(program).values():
        sizes[one.stage] += len(list(one.ops))
    assert num_ops_on_a_rank(program) == max(sizes.values()) > 100


def test_batch_norm_in_training_is_refused_with_its_layer() -> None:
    plan = plan_of(SPECS["cnn"], "stage=2", "1f1b", 4)
    with pytest.raises(
        PassError, match=r"sums over all micro-batches, .* the sum depends on param"
    ):
        cut(SPECS["cnn"], plan)


def test_forward_pass_that_reads_the_backward_pass_is_refused() -> None:
    local = partitioned(GPT, "data=2", megatron(GPT, "data=2"))
    maker = next(op for op in local.ops if op.name == "aten.mm" and layer_of(op))
    set_phase(maker, "backward")
    with pytest.raises(
        PassError, match=r"aten.mm \(%\w+\) in layer '.+' belongs to the backward pass"
    ):
        run_passes(local, "cut-stages")


def test_stages_that_do_not_fit_the_mesh_are_refused() -> None:
    plan = plan_of(GPT, "stage=2", "1f1b", 4)
    assert plan.pipeline is not None
    odd = replace(plan.pipeline, stages=balanced_stages(captured(GPT).program, 3))
    with pytest.raises(PassError, match="3 stages cannot be placed on 2 ranks of the stage axis"):
        cut(GPT, replace(plan, pipeline=odd))
    with pytest.raises(ValueError, match=r"99 stages are more than the \d+ layers"):
        balanced_stages(captured(GPT).program, 99)


@pytest.mark.slow
def test_smaller_batches_run_in_fewer_micro_batches() -> None:
    example = captured(GPT).example
    plan = plan_of(GPT, "stage=2", "dualpipe-v", 4)
    step = compile_copy(example.module, kwargs=example.kwargs, plan=plan, backend="reference")
    for rows in (6, 1):
        batch = {name: tensor[:rows] for name, tensor in example.kwargs.items()}
        torch.testing.assert_close(step(**batch), example.module(**batch).detach())
    step.eval()
    with torch.no_grad():
        batch = {name: tensor[:2] for name, tensor in example.kwargs.items()}
        torch.testing.assert_close(step(**batch), example.module(**batch))


# Verification


def mutated(program: Program, seed: int) -> Program:
    """A staged program with one change of its schedule, or of a message."""
    chance, copy = random.Random(seed), program.clone()
    runs = [op for op in copy.ops if isinstance(op, RunOp) and not op.results]
    one, other = chance.sample(runs, 2)
    kind = seed % 6
    if kind == 0:
        order = list(copy.ops)
        first, second = order.index(one), order.index(other)
        order[first], order[second] = other, one
        copy.reorder(order)
    elif kind == 1:
        one.detach()
    elif kind == 2:
        copy.function.body.block.insert_op_after(one.clone(), other)
    elif kind == 3:
        one.properties["micro_batch"] = other.properties.get("micro_batch", one.at_attr)
    elif kind == 4:
        one.properties["at"] = other.properties["at"]
    else:
        functions = list(functions_of(copy).values())
        messages = [
            op for function in functions for op in function.ops if isinstance(op, SendOp | RecvOp)
        ]
        message = chance.choice(messages)
        message.properties["name"] = chance.choice(messages).properties["name"]
    return copy


def is_harmless(program: Program) -> bool:
    found = captured(GPT)
    results = run_reference(program, found.values)
    return all(
        torch.allclose(results["grad", name], gradient, rtol=0, atol=1e-9)
        for name, gradient in found.gradients.items()
    )


def check_mutations(count: int, plan: Plan | None = None) -> None:
    base = Plan(pipeline=plan_of(GPT, "stage=2", "zero-bubble", 4).pipeline, mesh={"stage": 2})
    program = local_program(captured(GPT).program, plan or base)
    assert verify(program) == []
    found = 0
    for seed in range(count):
        mutation = mutated(program, seed)
        if verify(mutation):
            found += 1
        else:
            assert is_harmless(mutation), f"mutation {seed} is neither found nor harmless"
    assert found > count / 2


def test_mutated_schedules_are_found_or_harmless() -> None:
    check_mutations(30)


@pytest.mark.slow
def test_many_mutated_schedules_are_found_or_harmless() -> None:
    check_mutations(500)


@pytest.mark.slow
def test_mutated_schedules_of_uneven_stages_are_found_or_harmless() -> None:
    check_mutations(200, uneven_plan(GPT, "stage=3", ((4,), (3, 1))))


def test_message_that_nobody_sends_is_named() -> None:
    program = cut(UNTIED, plan_of(UNTIED, "stage=2", "1f1b", 2))
    send = next(op for op in functions_of(program)["forward_0"].ops if isinstance(op, SendOp))
    send.detach()
    (problem,) = verify(program)
    assert problem.startswith("@forward_1: nobody sends '")
    assert "from stage 0 to 1; add a dist.send" in problem


def test_run_that_comes_too_early_is_named() -> None:
    program = cut(UNTIED, plan_of(UNTIED, "stage=2", "1f1b", 2))
    order = list(program.ops)
    runs = [(op.function, op.micro_batch) for op in order if isinstance(op, RunOp)]
    first, second = runs.index(("forward_0", 0)), runs.index(("forward_1", 0))
    order[first], order[second] = order[second], order[first]
    program.reorder(order)
    problem = verify(program)[0]
    assert problem.startswith("stage function @forward_1 on micro-batch 0 reads message '")
    assert "before it is computed; run its sender @forward_0 earlier" in problem


def test_results_that_differ_between_ranks_are_found() -> None:
    program = cut(GPT, plan_of(GPT, "stage=2,data=2", "1f1b", 2))
    after = functions_of(program)["after_0"]
    start = next(op for op in after.ops if op.name == "dist.start_all_reduce")
    wait = next(iter(start.results[0].uses)).operation
    for result, operand in zip(wait.results, start.operands, strict=True):
        result.replace_all_uses_with(operand)
    wait.detach()
    start.detach()
    with pytest.raises(ReplicaMismatchError, match="should hold the same shard"):
        run_reference(program, captured(GPT).values)
