"""The proof finds defects: each of many planted mistakes is answered with the name of its pass.

And it has no false alarm: over all models and pipelines nothing is found in passes that are right.
"""

from __future__ import annotations

from functools import cache

import pytest

from shardweave.driver.checking.validate import Validator
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import PassError, PassPipeline, as_mesh
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.tests.driver.defects import DEFECTS, Defect, broken
from shardweave.tests.zoo import IMAGE_SPECS, SPECS, captured, megatron

LOCAL = (
    "split-addmm,add-pending-sums,propagate-shardings,insert-collectives,cse,dce,merge-collectives"
)
UNROLLED = "split-addmm,add-pending-sums,propagate-shardings,insert-collectives,unroll-time-axes,cse,dce,merge-collectives"
OVERLAP = "overlap-communication{schedule=list cluster=perlmutter}"

PIPELINES = {
    "gpt": ("gpt", "data=2,tensor=2", f"{LOCAL},bucket-collectives"),
    "sequence-parallel": ("gpt", "data=2,tensor=2", LOCAL),
    "cnn": ("cnn", "data=2,tensor=2", LOCAL),
    "sub-batches": ("gpt", "data=2,tensor=2", f"split-batch{{n=2}},{UNROLLED}"),
    "recomputed": (
        "gpt",
        "data=2,tensor=2",
        f"{LOCAL},rematerialize,delete-redundant-collectives",
    ),
    "started": ("gpt", "data=2,tensor=2", f"{LOCAL},start-collectives,{OVERLAP}"),
}
"""By case: a model, a mesh, and the passes after its megatron plan."""


def pipeline(case: str) -> PassPipeline:
    model, mesh, passes = PIPELINES[case]
    plan = megatron(SPECS[model], mesh, sequence_parallel=case == "sequence-parallel")
    return PassPipeline([ApplyPlanPass.of(plan), passes])


@cache
def program_before(case: str, pass_name: str) -> Program:
    """What the passes of a case give up to one of them."""
    model, mesh, _ = PIPELINES[case]
    program = captured(SPECS[model]).program.clone()
    program.set_mesh(as_mesh(mesh))
    passes = pipeline(case).passes
    names = [one.name for one in passes]
    return PassPipeline(passes[: names.index(pass_name)]).run(program)


def answer(one: Defect) -> str:
    """What a pipeline says that begins with the broken pass and goes on with right ones."""
    passes = pipeline(one.case).passes
    index = [p.name for p in passes].index(one.pass_name)
    spec = str(passes[index].spec())
    begun = [broken(spec, one.mistake), *passes[index + 1 :]]
    with pytest.raises(PassError) as error:
        PassPipeline(begun).run(program_before(one.case, one.pass_name), observer=Validator())
    return str(error.value)


@pytest.mark.parametrize("one", DEFECTS, ids=lambda one: one.name)
def test_defect_is_answered_with_the_name_of_its_pass(one: Defect) -> None:
    said = answer(one)
    assert said.startswith(f"pass '{one.pass_name}' "), said
    assert "\n" not in said


def test_there_are_enough_defects_in_enough_passes() -> None:
    assert len(DEFECTS) >= 25
    assert len({one.pass_name for one in DEFECTS}) >= 10


@pytest.mark.parametrize("case", ["sequence-parallel", "sub-batches"])
def test_right_passes_raise_no_alarm(case: str) -> None:
    model, mesh, _ = PIPELINES[case]
    program = captured(SPECS[model]).program.clone()
    program.set_mesh(as_mesh(mesh))
    validator = Validator()
    PassPipeline(pipeline(case).passes).run(program, observer=validator)
    assert validator.num_runs > 3


FULL = (
    f"split-batch{{n=2}},{UNROLLED},rematerialize{{policy=POLICY}},delete-redundant-collectives,"
    "bucket-collectives,start-collectives,"
    "overlap-communication{schedule=SCHEDULE cluster=perlmutter}"
)
PRESETS = [
    ("layer", "blocking"),
    ("none", "sub-batch"),
    ("after-communication", "cross-pass"),
    ("layer", "list"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "schedule"), PRESETS)
@pytest.mark.parametrize("mesh", ["tensor=4", "data=2,tensor=2", "data=4"])
@pytest.mark.parametrize("name", SPECS)
def test_right_passes_raise_no_alarm_on_any_model(
    name: str, mesh: str, policy: str, schedule: str
) -> None:
    spec = SPECS[name]
    sequences = name not in IMAGE_SPECS and schedule == "list"
    plan = ApplyPlanPass.of(megatron(spec, mesh, sequence_parallel=sequences))
    program = captured(spec).program.clone()
    program.set_mesh(as_mesh(mesh))
    for seed in (0, 1):
        passes = FULL.replace("POLICY", policy).replace("SCHEDULE", schedule)
        PassPipeline([plan, passes]).run(program, observer=Validator(seed=seed))
