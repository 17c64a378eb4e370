"""The static proof: what it accepts, what it refuses, and what it says then."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from xdsl.context import Context

import shardweave as sw
from shardweave.ir.dialects.literals import to_attribute
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.prove import prove
from shardweave.passes.pipeline import PassPipeline
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.lowering.partition import partition
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.tests.driver.defects import DEFECTS, Defect, broken
from shardweave.tests.driver.test_validate_mutations import PIPELINES, pipeline, program_before
from shardweave.tests.ir.proof.cases import Case, refused_slips
from shardweave.tests.ir.proof.mutants import mutant
from shardweave.tests.ir.proof.slips import SLIPS
from shardweave.tests.ir.proof.stage_slips import STAGE_SLIPS
from shardweave.tests.ir_text import step
from shardweave.tests.zoo import SPECS, captured, megatron, random_plan

GLOBAL = """
    param %up : tensor<8x16xf64>
    param %down : tensor<16x8xf64>
    input %x : tensor<4x8xf64>
    %wide = aten.mm(%x, %up) {layer = "up", phase = forward} : tensor<4x16xf64>
    %relu = aten.relu(%wide) {layer = "act", phase = forward} : tensor<4x16xf64>
    %narrow = aten.mm(%relu, %down) {layer = "down", phase = forward} : tensor<4x8xf64>
    %out = aten.gelu(%narrow) {layer = "act", phase = forward} : tensor<4x8xf64>
    output %out
"""
LOCAL = """
    param %up : tensor<8x8xf64> [{}, {"tensor"}]
    param %down : tensor<8x8xf64> [{"tensor"}, {}]
    input %x : tensor<2x8xf64> [{"data"}, {}]
    %wide = aten.mm(%x, %up) {layer = "up", phase = forward} : tensor<2x8xf64>
    %relu = aten.relu(%wide) {layer = "act", phase = forward} : tensor<2x8xf64>
    %narrow = aten.mm(%relu, %down) {layer = "down", phase = forward} : tensor<2x8xf64>
    %total = dist.all_reduce(%narrow, axes = ["tensor"]) {layer = "down", phase = forward} : tensor<2x8xf64>
    %out = aten.gelu(%total) {layer = "act", phase = forward} : tensor<2x8xf64>
    output %out [{"data"}, {}]
"""


def local(text: str = LOCAL) -> Program:
    return step(text, "data=2,tensor=2", local=True)


def refusal(text: str, against: str = GLOBAL) -> str:
    with pytest.raises(ProofError) as error:
        prove(local(text), against=step(against))
    return str(error.value)


def test_pair_of_products_cut_over_tensor_is_proved_op_by_op() -> None:
    program = local()
    proof = prove(program, against=step(GLOBAL))
    relations = dict(proof.relations(program))
    assert 'unreduced = ["tensor"]' in relations["%narrow"]
    assert relations["%total"].endswith('#dist.sharding<[{"data"}, {}]>')
    assert str(proof).startswith("proved: 5 ops compute the 1 results")


def test_missing_reduction_is_named_with_its_cause() -> None:
    text = "\n".join(line for line in LOCAL.splitlines() if "all_reduce" not in line)
    said = refusal(text.replace("%total", "%narrow"))
    assert said.startswith(
        "aten.gelu (%out) in layer 'act': operand 0 (%narrow) is unreduced over "
    )
    assert "tensor: an all_reduce is missing before aten.gelu" in said


def test_reduction_over_another_axis_and_a_second_one_are_refused() -> None:
    assert "is to be reduced over data" in refusal(
        LOCAL.replace('axes = ["tensor"]', 'axes = ["data"]')
    )
    doubled = LOCAL.replace(
        "    %out =",
        '    %more = dist.all_reduce(%total, axes = ["tensor"]) : tensor<2x8xf64>\n    %out =',
    ).replace("gelu(%total)", "gelu(%more)")
    assert "is to be reduced over tensor" in refusal(doubled)


def test_another_op_and_other_operands_are_refused() -> None:
    assert "aten.tanh" in refusal(LOCAL.replace("aten.relu(", "aten.tanh("))
    other = GLOBAL.replace("aten.mm(%relu, %down)", "aten.mm(%wide, %down)")
    assert refusal(LOCAL, other).startswith("aten.mm (%narrow) in layer 'down': the model computes")


def test_op_that_is_called_as_another_is_named_by_its_place() -> None:
    whole = GLOBAL.replace("aten.gelu(", "aten.relu(")
    text = LOCAL.replace("aten.gelu(%total)", "aten.relu(%narrow)")
    program = local(text)
    for op in program.ops:
        op.results[0].name_hint = "value"
    with pytest.raises(
        ProofError, match=r"^aten\.relu \(%value\) in layer 'act', which is op 5 of"
    ):
        prove(program, against=step(whole))


def test_result_in_other_shards_than_declared_is_refused() -> None:
    said = refusal(LOCAL.replace('output %out [{"data"}, {}]', 'output %out [{"tensor"}, {}]'))
    assert "is declared" in said


def test_sums_may_be_regrouped_and_an_addmm_split() -> None:
    whole = """
        input %a : tensor<4x4xf64>
        input %b : tensor<4x4xf64>
        input %c : tensor<4xf64>
        %p = aten.addmm(%c, %a, %b) : tensor<4x4xf64>
        %s = aten.add.Tensor(%p, %a) : tensor<4x4xf64>
        output %s
    """
    parts = """
        input %a : tensor<4x4xf64>
        input %b : tensor<4x4xf64>
        input %c : tensor<4xf64>
        %d = aten.add.Tensor(%a, %c) : tensor<4x4xf64>
        %p = aten.mm(%a, %b) : tensor<4x4xf64>
        %s = aten.add.Tensor(%d, %p) : tensor<4x4xf64>
        output %s
    """
    prove(step(parts), against=step(whole))
    with pytest.raises(ProofError, match=r"computes no such aten\.add\.Tensor"):
        prove(step(parts.replace("(%d, %p)", "(%d, %d)")), against=step(whole))


def test_value_that_is_constant_stands_for_any_of_its_shards() -> None:
    text = """
        input %x : tensor<8x4xf64>{}
        tangent %t : tensor<f64>
        %e = aten.expand(%t) : tensor<{}x4xf64>
        %y = aten.mul.Tensor(%x, %e) : tensor<{}x4xf64>
        output %y{}
    """
    shards = ' [{"data"}, {}]'
    whole = step(text.format("", 8, 8, ""))
    program = step(
        text.replace("8x4xf64>{}", "4x4xf64>{}").format(shards, 4, 4, shards), "data=2", local=True
    )
    prove(program, against=whole)


HALVES = """
    input %x : tensor<4x8xf64>
    %first = aten.slice.Tensor(%x, start = 0) : tensor<2x8xf64>
    %second = aten.slice.Tensor(%x, start = 2) : tensor<2x8xf64>
    %a = aten.sum.dim_IntList(%first, dim = [0]) : tensor<8xf64>
    %b = aten.sum.dim_IntList(%second, dim = [0]) : tensor<8xf64>
    %s = aten.add.Tensor(%a, %b) : tensor<8xf64>
    output %s
"""


def test_slice_beyond_the_end_is_no_sub_batch() -> None:
    whole = "input %x : tensor<4x8xf64>\n%s = aten.sum.dim_IntList(%x, dim = [0]) : tensor<8xf64>"
    prove(local(HALVES), against=step(f"{whole}\noutput %s"))
    prove(local(HALVES.replace("start = 2", "start = -2")), against=step(f"{whole}\noutput %s"))
    for start in (3, 4, 6, -6):
        refusal(HALVES.replace("start = 2", f"start = {start}"), f"{whole}\noutput %s")


def test_shardings_of_a_global_program_are_wishes() -> None:
    wish = GLOBAL.replace("%x : tensor<4x8xf64>", '%x : tensor<4x8xf64> [{"data"}, {}]')
    prove(step(wish, "data=2"), against=step(GLOBAL))
    with pytest.raises(ProofError, match="computes no such"):
        prove(step(wish.replace("relu(", "tanh("), "data=2"), against=step(GLOBAL))


def test_two_local_programs_are_compared_op_by_op() -> None:
    prove(local(), against=local())
    with pytest.raises(ProofError):
        prove(local(LOCAL.replace("aten.relu(", "aten.tanh(")), against=local())


def test_value_in_flight_and_one_not_yet_made_are_refused() -> None:
    started = LOCAL.replace("dist.all_reduce(", "dist.start_all_reduce(")
    assert "before its collective has ended" in refusal(started)


CASES = [
    ("preset:default", False),
    ("preset:default", True),
    ("preset:oases", False),
]


@pytest.mark.parametrize(("passes", "sequence_parallel"), CASES)
def test_presets_of_a_gpt_are_proved(passes: str, sequence_parallel: bool) -> None:
    spec, mesh = SPECS["gpt"], "data=2,tensor=2"
    plan = megatron(spec, mesh, sequence_parallel=sequence_parallel)
    program = captured(spec).program
    made = sw.run_passes(program, [ApplyPlanPass.of(plan), passes], mesh=mesh)
    prove(made, against=program)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "tensor=4", "data=4"])
@pytest.mark.parametrize("name", SPECS)
def test_every_pass_is_proved_on_any_model(name: str, mesh: str) -> None:
    plan = ApplyPlanPass.of(megatron(SPECS[name], mesh))
    for preset in ("default", "megatron", "merak", "oases"):
        passes = [plan, f"preset:{preset}"]
        sw.run_passes(captured(SPECS[name]).program, passes, mesh=mesh, prove=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", SPECS)
def test_random_plans_are_proved(name: str, seed: int) -> None:
    program = captured(SPECS[name]).program
    plan, mesh = random_plan(program, seed)
    passes = [ApplyPlanPass.of(plan), "preset:sub-batches" if seed % 2 else "preset:default"]
    prove(sw.run_passes(program, passes, mesh=mesh), against=program)


@pytest.mark.slow
@pytest.mark.parametrize("one", DEFECTS, ids=lambda one: one.name)
def test_defect_of_a_pass_is_refused(one: Defect) -> None:
    passes = pipeline(one.case).passes
    (right,) = [p for p in passes if p.name == one.pass_name][:1]
    program = program_before(one.case, one.pass_name).clone()
    broken(str(right.spec()), one.mistake).apply(Context(), program.module)
    with pytest.raises(ProofError):
        prove(program, against=captured(SPECS[PIPELINES[one.case][0]]).program)


TINY = "gpt:layers=2,hidden=8,heads=2,vocab=8,seq=4,batch=4"


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["default", "merak", "oases", "stages"])
def test_program_with_a_slip_is_refused_or_computes_the_same(preset: str) -> None:
    if preset == "stages":
        case = staged("stage=2,data=2", "zero-bubble", zero=3)
    else:
        tiny, mesh = captured(TINY), "data=2,tensor=2"
        plan = ApplyPlanPass.of(megatron(TINY, mesh))
        program = PassPipeline([plan, f"preset:{preset}"]).run(tiny.program, mesh=Mesh.parse(mesh))
        case = Case.of(tiny.program, tiny.values, program)
    num_refused, num_named = refused_slips(case, SLIPS, 14)
    assert num_refused > 200
    assert num_named >= 0.9 * num_refused


# Programs of stages


def staged(mesh: str, schedule: str = "1f1b", *, zero: int = 0) -> Case:
    """The tiny model in two stages, and micro-batches of two samples in all."""
    case, devices = captured(TINY), Mesh.parse(mesh)
    pipeline = Pipeline(balanced_stages(case.program, 2), 2, schedule=schedule)
    plan = replace(plan_megatron(case.program, devices), pipeline=pipeline, zero=zero)
    return Case.of(case.program, case.values, partition(case.program, devices, plan))


SKIPS = """
    param %up : tensor<8x8xf64>
    param %down : tensor<8x8xf64>
    input %x : tensor<8x8xf64>
    %wide = aten.mm(%x, %up) {layer = "up", phase = forward} : tensor<8x8xf64>
    %relu = aten.relu(%wide) {layer = "up", phase = forward} : tensor<8x8xf64>
    %narrow = aten.mm(%relu, %down) {layer = "down", phase = forward} : tensor<8x8xf64>
    %out = aten.sub.Tensor(%narrow, %wide) {layer = "down", phase = forward} : tensor<8x8xf64>
    output %out
"""
CUT = "split-batch{n=4 axis=micro},propagate-shardings,insert-collectives,cut-stages"


def skipping() -> Case:
    """A program in two stages, the second of which reads two values of the first."""
    program = step(SKIPS)
    program.module.attributes["dist.stages"] = to_attribute([["up"], ["down"]])
    values = {(slot.kind, slot.name): torch.randn(8, 8).double() for slot in program.arguments}
    made = sw.run_passes(program, CUT, mesh="stage=2")
    return Case.of(program, values, made)


@pytest.fixture(scope="module")
def pipelines() -> list[Case]:
    return [staged("stage=2"), skipping()]


def test_program_of_stages_is_proved(pipelines: list[Case]) -> None:
    for case in pipelines:
        proof = prove(case.local, against=case.program)
        assert any("micro" in text for _, text in proof.relations(case.local))
        with pytest.raises(ProofError, match="give the global program as `against`"):
            prove(case.local, against=case.local)


UNSEEN = ("run_is_at_another_stage", "gradients_are_exchanged")
"""Slips that processes trip over, and a virtual mesh does not: what another stage has is there, too,
and results have the names that the step gives them. Moving a run of a function that is alone in
its stage is right, so that the model with gradients is looked at alone."""


@pytest.mark.parametrize("kind", sorted(STAGE_SLIPS))
def test_slip_between_stages_is_refused(kind: str, pipelines: list[Case]) -> None:
    found = [
        (case, made)
        for seed, case in product(range(6), pipelines[:1] if kind in UNSEEN else pipelines)
        if (made := mutant(case.local, kind, seed))
    ]
    wrong = [
        (case, made.program)
        for case, made in found[:4]
        if kind in UNSEEN or not case.is_right(made.program)
    ]
    assert wrong
    for case, made in wrong:
        with pytest.raises(ProofError):
            prove(made, against=case.program)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "schedule", "zero"),
    [("stage=2", "gpipe", 0), ("stage=2,data=2", "zero-bubble", 0), ("stage=2,data=2", "1f1b", 1)],
)
def test_any_slip_between_stages_is_refused_or_computes_the_same(
    mesh: str, schedule: str, zero: int
) -> None:
    case = staged(mesh, schedule, zero=zero)
    num_refused, _ = refused_slips(case, STAGE_SLIPS, 12)
    assert num_refused > 100


def test_draws_of_a_sub_batch_that_come_before_all_its_inputs_are_proved() -> None:
    spec = "gpt:layers=1,hidden=8,heads=2,vocab=8,seq=4,batch=4,dropout=0.1"
    program = captured(spec).program
    plan = ApplyPlanPass.of(megatron(spec, "data=2"))
    rank = sw.run_passes(program, [plan, "preset:sub-batches"], mesh="data=2").clone()
    block, ops = rank.function.body.block, list(rank.ops)
    draw = next(op for op in ops if op.name == "dist.random")
    first = {draw}
    for op in reversed(ops[: ops.index(draw)]):
        if any(use.operation in first for result in op.results for use in result.uses):
            first.add(op)
    begin = next(op for op in ops if op not in first)
    for op in [op for op in ops if op in first]:
        op.detach()
        block.insert_op_before(op, begin)
    names = [op.name for op in rank.ops]
    assert names.index("dist.random") < names.index("aten.slice.Tensor")
    prove(rank, against=program)
