"""Points of the whole plan space that `benchmarks/fuzz.py` lowers: kind "point".

A case is a model, a cluster and a plan: a point of the joint space or any mix of its dimensions,
and fields of plans that no point has. Its program must be verified, priced and the same by each way
that leads to it, or the plan is refused by name.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import shardweave as sw
from shardweave.benchmarks.fuzz_cases import WrongError
from shardweave.driver.models.models import build_example
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.blocks import blocks_of
from shardweave.ir.program.program import Program
from shardweave.ir.verify.program import VerifyError, check
from shardweave.planners.auto.estimate import Estimator
from shardweave.planners.auto.plans import PlanMaker
from shardweave.planners.auto.reader import CostReader, Depths
from shardweave.planners.auto.space.constraints import Constraints
from shardweave.planners.auto.space.point import BUCKETS, MESH, JointPoint
from shardweave.planners.auto.space.space import JointSpace, joint_space
from shardweave.planners.cost.degrees import divisors
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.lowering.plan_passes import plan_passes
from shardweave.planners.lowering.stages.choose import with_pipeline
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_check import check_plan
from shardweave.planners.plan.plan_parts import (
    OFFLOAD,
    PIPELINE_SCHEDULES,
    RECOMPUTE,
    SCHEDULES,
    Pipeline,
)
from shardweave.planners.predict.predict import predicted_of, simulate_step

MODELS = {
    "gpt": "gpt:layers=4,hidden=32,heads=4,vocab=64,seq=16,batch=16",
    "llama": "hf:llama:tiny,batch=16,seq=16",
    "bert": "hf:bert:tiny,batch=16,seq=16",
    "t5": "hf:t5:tiny,batch=16,seq=16",
    "unet": "unet:channels=8,size=8,levels=1,groups=4,batch=16",
    "mixture": "gpt:layers=4,hidden=32,heads=4,vocab=64,seq=16,batch=16,experts=4,choices=2",
}
"""What is planned: each with a batch that meshes and micro-batches divide."""

CLUSTERS = ("perlmutter:nodes=1", "perlmutter:nodes=2", "amp-het-cluster")
"""Four and eight devices that are alike, and sixteen that are not."""

SPACE_SHARE = 0.5
"""How many cases are points of the joint space as it is searched; others mix its dimensions."""

FIELD_SHARE = 0.25
"""How often each field that no point has is changed."""

LIST_SHARE = 0.1
"""How many of the drawn points with an order `list`, which takes long to find, are kept."""


@cache
def program_of(model: str) -> Program:
    """The captured step of one of MODELS, or of a model as the command line names it."""
    with FakeTensorMode():
        example = build_example(MODELS.get(model, model), dtype=torch.float32)
    return sw.capture(example.module, kwargs=example.kwargs)


@cache
def maker_of(model: str, place: str) -> PlanMaker:
    # All blocks are read, so that a point is that of the whole program.
    depths = Depths.of(program_of(model), deep=10**6)
    return PlanMaker(Estimator(CostReader(depths, find_cluster(place))), place)


@cache
def space_of(model: str, place: str) -> JointSpace:
    return joint_space(maker_of(model, place).estimator.reader, None, Constraints())


@cache
def points_of(model: str, place: str) -> list[JointPoint]:
    return [*space_of(model, place).all_points()]


def make_point(rng: random.Random, folder: Path) -> str:
    """A model's name, a cluster's and a plan, as JSON."""
    del folder
    while True:
        model, place = rng.choice([*MODELS]), rng.choice(CLUSTERS)
        if rng.random() < SPACE_SHARE:
            space = space_of(model, place)
            point = rng.choice([*space.variants(rng.choice(points_of(model, place)))])
        else:
            point = mixed_point(rng, find_cluster(place).num_devices)
        if "list" in (point.schedule, point.pipeline) and rng.random() >= LIST_SHARE:
            continue
        try:
            plan = maker_of(model, place).plan(point, program_of(model))
        except ValueError:
            continue  # refused by name before there is a plan
        plan = with_fields(plan, program_of(model), rng)
        case = {"model": model, "cluster": place, "point": str(point), "plan": plan.to_json()}
        return json.dumps(case)


def mixed_point(rng: random.Random, devices: int) -> JointPoint:
    """Any degrees of so many devices, or of a part of them, and any value of each dimension."""
    degrees: dict[str, int] = dict.fromkeys(MESH, 1)
    for prime in _primes(devices):
        if rng.random() < 0.9:
            degrees[rng.choice([*degrees])] *= prime
    return JointPoint(
        **degrees,
        sequence_parallel=rng.random() < 0.4,
        zero=rng.randrange(4),
        recompute=rng.choice(RECOMPUTE),
        offload=rng.choice(("none", *OFFLOAD)),
        micro_batches=rng.choice((1, 1, 2, 4, 8)),
        sub_batches=rng.choice((1, 1, 2)),
        schedule=rng.choice([name for name in SCHEDULES if name]),
        pipeline=rng.choice(PIPELINE_SCHEDULES),
        buckets=rng.choice(BUCKETS),
        recompute_layers=rng.choice((0, 0, 1, 2)),
        decompose=False,  # variants of the space draw it
    )


def _primes(count: int) -> list[int]:
    found: list[int] = []
    while count > 1:
        found.append(divisors(count)[1])
        count //= found[-1]
    return found


def with_fields(plan: Plan, program: Program, rng: random.Random) -> Plan:
    """The plan with other fields as a person may set them, each now and then."""

    def sometimes() -> bool:
        return rng.random() < FIELD_SHARE

    blocks = blocks_of(program).names
    if sometimes():
        plan = replace(plan, precision=rng.choice(("fp32", "bf16-mixed", "fp16-mixed")))
    if sometimes():
        plan = replace(plan, loss_chunks=rng.choice((2, 4)))
    if sometimes() and plan.recompute != "none" and blocks:
        plan = replace(plan, recompute_in=(rng.choice(blocks),))
    if sometimes() and plan.alone_bytes == 0:
        plan = replace(plan, alone_bytes=rng.choice((1, 2**10, 2**30)))
    pipeline = plan.pipeline
    if sometimes() and pipeline is not None and len(pipeline.stages) > 1:
        chosen = (None, _uneven(pipeline, rng))  # without stages, the mesh's axis has balanced ones
        plan = replace(plan, pipeline=rng.choice(chosen))
    return plan


def _uneven(pipeline: Pipeline, rng: random.Random) -> Pipeline:
    """Stages of which one hands its last layer to the next."""
    stages = [list(stage) for stage in pipeline.stages]
    index = rng.randrange(len(stages) - 1)
    if len(stages[index]) > 1:
        stages[index + 1].insert(0, stages[index].pop())
    return replace(pipeline, stages=tuple(map(tuple, stages)))


def use_point(text: str, folder: Path) -> None:
    """Lower the plan as planners do and as `compile` does, verify, and simulate both."""
    del folder
    case = json.loads(text)
    program, plan = program_of(case["model"]), Plan.from_json(case["plan"])
    if Plan.from_json(plan.to_json()) != plan:
        raise WrongError("a plan is not what it was written as")
    check_plan(plan, program)
    cluster = find_cluster(case["cluster"])
    staged = with_pipeline(plan, program, Mesh(**plan.mesh))
    priced = local_program(program, staged)
    step = sw.run_passes(program.clone(), plan_passes(staged))
    for made in (priced, step):
        try:
            check(made)
        except VerifyError as error:
            raise WrongError(f"a plan gives an invalid program: {error}") from error
    if str(step) != str(priced):
        raise WrongError("what is priced is another program than what runs")
    found = predicted_of(simulate_step(priced, cluster, precision=plan.precision))
    for number in (found.time_s, found.peak_bytes):
        if not (math.isfinite(number) and number > 0):
            raise WrongError(f"a step takes {found.time_s} s and {found.peak_bytes} bytes")
