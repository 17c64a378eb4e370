"""Memory of stages: what a rank allocates in a step, counted, is what is simulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardweave.backends.distributed.distributed import DistributedBackend
from shardweave.driver.models.models import build_example
from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.planners.simulate.run_memory import memory_of_places
from shardweave.tests.compiled import compile_copy
from shardweave.tests.counted import Counted
from shardweave.tests.spawn import run_ranks
from shardweave.tests.zoo import captured, megatron

GPT = "gpt:layers=4,hidden=32,heads=4,vocab=32,seq=32,batch=16,tie=false"


def peaks(spec: str, plan: Plan) -> tuple[int, int]:
    """The most bytes that live at once on this rank in a step: counted, and simulated."""
    torch.set_num_threads(1)
    example = build_example(spec)
    step = compile_copy(example.module, kwargs=example.kwargs, plan=plan)
    assert isinstance(step.backend, DistributedBackend)
    step(**example.kwargs)
    step.zero_grad()
    with Counted() as counted:
        step(**example.kwargs)
    return counted.most, memory_of_places(step.program)[step.backend.runtime.place].peak_bytes


def check(schedule: str, mesh: str, count: int, chunks: int, world_size: int, **more: Any) -> None:
    stages = balanced_stages(captured(GPT).program, Mesh.parse(mesh).num_stages * chunks)
    plan = replace(megatron(GPT, mesh), pipeline=Pipeline(stages, count, schedule=schedule), **more)
    for counted, simulated in run_ranks(peaks, world_size, GPT, plan):
        assert simulated == pytest.approx(counted, rel=0.05)


def test_peak_of_each_stage_is_the_simulated_one() -> None:
    check("zero-bubble", "stage=2", 8, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "mesh", "count", "chunks", "more"),
    [
        ("1f1b", "stage=4", 8, 1, {}),
        ("gpipe", "stage=2,data=2", 4, 1, {}),
        ("interleaved-1f1b", "stage=2,tensor=2", 4, 2, {}),
        ("zero-bubble-v", "stage=2,data=2", 4, 2, {"zero": 2}),
        ("list", "stage=4", 8, 1, {}),
        ("dualpipe-v", "stage=2,data=2", 4, 2, {"recompute": "layer"}),
    ],
)
def test_peaks_of_all_schedules_are_the_simulated_ones(
    schedule: str, mesh: str, count: int, chunks: int, more: dict[str, Any]
) -> None:
    check(schedule, mesh, count, chunks, 4, **more)
