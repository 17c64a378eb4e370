"""Offloaded steps on processes: eager's gradients, and the device memory that was predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardweave.backends.distributed.distributed import DistributedBackend
from shardweave.backends.distributed.in_flight import InFlight, start_copy
from shardweave.driver.models.models import build_example
from shardweave.ir.program.staged import is_staged
from shardweave.passes.pipeline import as_mesh
from shardweave.planners.cost.memory import peak_memory
from shardweave.planners.lowering.stages.choose import with_pipeline
from shardweave.planners.plan.plan import Plan
from shardweave.planners.simulate.run_memory import memory_of_places
from shardweave.tests.backends.test_stage_memory import Counted
from shardweave.tests.compiled import compile_copy
from shardweave.tests.spawn import run_ranks
from shardweave.tests.zoo import captured, gradient_errors, megatron

GPT = "gpt:layers=4,hidden=32,heads=4,vocab=32,seq=16,batch=8,tie=false"


class OnDevice(Counted):
    """Bytes as on a device with a host, whose memory is not counted."""

    is_on_host = False

    def start_to_host(self, x: Tensor, into: Tensor | None = None) -> InFlight:
        self.is_on_host = True
        started = start_copy(x, torch.device("cpu"), into)
        self.is_on_host = False
        return started

    def _count(self, storage: Any) -> None:
        if self.is_on_host:
            self.known.add(storage)
        super()._count(storage)


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def trained(spec: str, plan: Plan) -> tuple[float, int, int]:
    """The largest error of a gradient, and the most bytes of a step: counted and predicted."""
    torch.set_num_threads(1)
    example = build_example(spec, dtype=torch.float64)
    step = compile_copy(example.module, kwargs=example.kwargs, plan=plan)
    assert isinstance(step.backend, DistributedBackend)
    step(**example.kwargs)
    example.module(**example.kwargs).backward()
    own = {name: whole(p.grad) for name, p in step.named_parameters() if p.grad is not None}
    wanted = {name: p.grad for name, p in example.module.named_parameters() if p.grad is not None}
    error = max(gradient_errors(own, wanted).values())
    step.zero_grad()
    with OnDevice() as counted:
        step.backend.runtime.start_to_host = counted.start_to_host
        step(**example.kwargs)
    program = step.program
    if is_staged(program):
        predicted = memory_of_places(program)[step.backend.runtime.place].peak_bytes
    else:
        memory = peak_memory(program)
        predicted = memory.peak_bytes - memory.parts["parameters"] - memory.parts["inputs"]
    return error, counted.most, predicted


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("data=2", {"recompute": "layer"}),
        ("stage=2", {"offload": "all"}),
        ("tensor=2", {"offload": "none", "decompose": ("*",)}),
    ],
)
def test_offloaded_processes_are_eager_s_in_the_predicted_memory(
    mesh: str, options: dict[str, Any]
) -> None:
    plan = megatron(GPT, mesh, sequence_parallel="decompose" in options)
    plan = replace(plan, **{"offload": "inputs", **options})
    plan = with_pipeline(plan, captured(GPT).program, as_mesh(mesh))
    for error, counted, predicted in run_ranks(trained, as_mesh(mesh).num_devices, GPT, plan):
        print(mesh, error, counted, predicted)
        assert error < 1e-9
        assert predicted == pytest.approx(counted, rel=0.05)
