"""ZeRO beside an axis of further replicas: exact, and sums over these are sent once in a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardweave.driver.models.models import build_example
from shardweave.ir.dialects.dist import DistOp
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import functions_of
from shardweave.planners.lowering.lower import Lowerings
from shardweave.planners.lowering.partition import partition
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.planners.predict.predict import predicted_of, simulation_of
from shardweave.tests.adamw import errors_of_three_steps
from shardweave.tests.compiled import compile_copy
from shardweave.tests.marks import slow
from shardweave.tests.planners.small_clusters import cluster, with_dtype
from shardweave.tests.spawn import run_ranks
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured

HALVES = (("wte", "wpe", "h.0"), ("h.1", "ln_f", "head"))
PIPELINES = {
    "one pass": None,
    "micro-batches": Pipeline((("*",),), 2),
    "1f1b": Pipeline(HALVES, 2),
    "zero-bubble": Pipeline(HALVES, 2, schedule="zero-bubble"),
}


def hybrid(zero: int, pipeline: Pipeline | None = None, tensor: int = 1) -> Plan:
    """Two replicas of two shards each, and as many stages as the pipeline has."""
    plan = plan_megatron(captured(SPECS["gpt"]).program, Mesh(replica=2, data=2, tensor=tensor))
    stages = {"pipeline": 2} if pipeline is not None and len(pipeline.stages) > 1 else {}
    return replace(plan, mesh={**stages, **plan.mesh}, zero=zero, pipeline=pipeline)


def local(plan: Plan) -> Program:
    return partition(captured(SPECS["gpt"]).program, Mesh(**plan.mesh), plan)


@pytest.mark.parametrize("way", PIPELINES)
@pytest.mark.parametrize("zero", [1, slow(2), 3])
def test_step_equals_eager(zero: int, way: str) -> None:
    case = captured(SPECS["gpt"])
    assert_equals_eager(local(hybrid(zero, PIPELINES[way])), case)


@pytest.mark.parametrize("model", ["llama", "unet"])
def test_other_models_equal_eager_with_a_tensor_axis_too(model: str) -> None:
    case = captured(SPECS[model])
    plan = plan_megatron(case.program, Mesh(replica=2, data=2, tensor=2))
    found = partition(case.program, Mesh(**plan.mesh), replace(plan, zero=3))
    assert_equals_eager(found, case)


def test_both_axes_cut_the_batch_and_one_of_them_the_weights() -> None:
    plan = hybrid(3)
    assert plan.inputs["input_ids"] == '[{"replica", "data"}, {}]'
    assert plan.notes == ()
    found = local(plan)
    slots = {slot.name: found.sharding_of_slot(slot) for slot in found.arguments}
    assert slots["wte.weight"].axes == {"data"}
    assert slots["input_ids"].axes == {"replica", "data"}


def test_shards_are_scattered_in_every_micro_batch_and_summed_over_replicas_once() -> None:
    step = local(hybrid(2, PIPELINES["micro-batches"]))
    found = {
        name: {
            (op.name.removeprefix("dist.start_"), op.axes)
            for op in function.ops
            if isinstance(op, DistOp)
        }
        for name, function in functions_of(step).items()
    }
    assert ("reduce_scatter", ("data",)) in found["backward_0"]
    assert not any(kind == "all_to_all" for kind, _ in found["backward_0"])
    assert not any("replica" in axes for _, axes in found["backward_0"])
    assert ("all_reduce", ("replica",)) in found["after_0"]


def test_shards_of_a_node_send_less_between_nodes_than_those_of_all() -> None:
    lowerings = Lowerings(captured(SPECS["gpt"]).program)
    on = with_dtype(cluster(nodes=2, devices=2))
    inside = simulation_of(lowerings, hybrid(3), on)
    plan = replace(plan_megatron(lowerings.program, Mesh(data=4)), zero=3)
    across = simulation_of(lowerings, plan, on)
    assert inside.time_s < across.time_s
    parts = [predicted_of(found).memory_bytes for found in (inside, across)]
    assert parts[0]["parameters"] == pytest.approx(2 * parts[1]["parameters"], rel=0.05)


def train() -> list[float]:
    example = build_example(SPECS["gpt"], dtype=torch.float64)
    step = compile_copy(example.module, kwargs=example.kwargs, mesh="replica=2,data=2", zero=3)
    weight = step.get_parameter("h.0.mlp.fc_in.weight")
    assert isinstance(weight, DTensor)
    assert weight.placements == (Replicate(), Shard(0))
    return errors_of_three_steps(step, example)


@pytest.mark.slow
def test_adamw_on_four_processes_trains_as_eager_does() -> None:
    for errors in run_ranks(train, 4):
        assert max(map(abs, errors)) < 1e-9
