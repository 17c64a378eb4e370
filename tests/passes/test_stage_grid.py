"""The whole grid of models, stages, schedules, micro-batches and layouts: each trains as eager does.

`test_cut_stages.py` has the part that is run every day.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.passes.notes import unheard
from shardweave.passes.pipeline import PassPipeline
from shardweave.planners.lowering.plan_passes import plan_passes
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import PIPELINE_SCHEDULES, Pipeline
from shardweave.planners.schedules.schedules import find_schedule
from shardweave.tests.adamw_steps import assert_trains_as_eager
from shardweave.tests.zoo import SPECS, captured

DEEPER = {
    "layers=2": "layers=6", "n_layer=2": "n_layer=6", ":num_layers=6": ":num_layers=4",
    "batch=8": "batch=16",
}  # fmt: skip
"""Of models that have blocks for eight stages, and rows for eight micro-batches of two replicas."""

MODELS = ("gpt", "gpt2", "llama", "bert", "t5", "unet")

LAYOUTS = {
    "alone": ("", 0),
    "data": (",data=2", 0),
    "tensor": (",tensor=2", 0),
    "both": (",data=2,tensor=2", 0),
    "stored-1": (",data=2", 1),
    "stored-2": (",data=2,tensor=2", 2),
    "stored-3": (",data=2", 3),
}
"""The other axes of the mesh, and the ZeRO stage of parameters that are stored in shards."""


def spec_of(name: str) -> str:
    spec = SPECS[name]
    for shallow, deep in DEEPER.items():
        spec = spec.replace(shallow, deep)
    return spec


def plan_of(spec: str, stages: int, schedule: str, micro_batches: int, layout: str) -> Plan:
    axes, zero = LAYOUTS[layout]
    mesh, program = Mesh.parse(f"stage={stages}{axes}"), captured(spec).program
    layers = balanced_stages(program, stages * find_schedule(schedule).chunks)
    pipeline = Pipeline(layers, micro_batches, schedule=schedule)
    return replace(plan_megatron(program, mesh), pipeline=pipeline, zero=zero)


def is_one(schedule: str, stages: int, micro_batches: int) -> bool:
    """Whether there is such an order: DualPipeV needs two micro-batches for each rank."""
    return schedule != "dualpipe-v" or micro_batches >= 2 * stages


def cut(spec: str, plan: Plan) -> Program:
    """The program that a plan makes of a model. What is the same for all schedules is made once."""
    passes = plan_passes(plan)
    first = [one.name for one in passes].index("cut-stages")
    assert plan.pipeline is not None
    any_schedule = replace(plan, pipeline=replace(plan.pipeline, schedule="gpipe"))
    alike = plan_passes(any_schedule)[:first]
    assert list(map(str, passes[1:first])) == list(map(str, alike[1:]))
    before = uncut(spec, any_schedule.to_json(), first)
    with unheard():
        return PassPipeline(passes[first:]).run(before, verify_each=False)


@lru_cache(maxsize=2)
def uncut(spec: str, plan: str, first: int) -> Program:
    """The program that a plan's first passes make."""
    found = Plan.from_json(plan)
    passes = PassPipeline(plan_passes(found)[:first])
    with unheard():
        return passes.run(captured(spec).program, mesh=Mesh(**found.mesh), verify_each=False)


CASES = [
    (name, layout, stages, micro_batches, schedule)
    for name in MODELS
    for layout in LAYOUTS
    for stages in (2, 4)
    for micro_batches in (4, 8)
    for schedule in sorted(PIPELINE_SCHEDULES, key=lambda name: find_schedule(name).chunks)
    if is_one(schedule, stages, micro_batches)
]
"""Schedules with as many stages on each rank stand together."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout", "stages", "micro_batches", "schedule"), CASES)
def test_model_in_stages_trains_as_eager(
    name: str, layout: str, stages: int, micro_batches: int, schedule: str
) -> None:
    spec = spec_of(name)
    plan = plan_of(spec, stages, schedule, micro_batches, layout)
    assert_trains_as_eager(cut(spec, plan), spec)
