"""The rows of benchmarks/pipelines.py: each schedule of ours, and PyTorch's on the same stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from timed_rows import TimedRow
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as pytorch
from torch.nn import functional as F

import shardweave as sw
from shardweave.driver.models.models import build_example
from shardweave.ir.program.program import Program
from shardweave.planners.lowering.partition import partition
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.planners.schedules.schedules import find_schedule


@dataclass(frozen=True)
class Case:
    """A schedule of ours, and PyTorch's of the same order. chunks: stages on each rank."""

    schedule: str
    chunks: int
    peer: str = ""


CASES = (
    Case("gpipe", 1, "ScheduleGPipe"),
    Case("1f1b", 1, "Schedule1F1B"),
    Case("interleaved-1f1b", 2, "ScheduleInterleaved1F1B"),
    Case("zero-bubble", 1, "ScheduleInterleavedZeroBubble"),
    Case("zero-bubble-h2", 1),
    Case("zero-bubble-v", 2, "ScheduleZBVZeroBubble"),
    Case("dualpipe-v", 2, "ScheduleDualPipeV"),
    Case("list", 2),  # stages that are half as long fill bubbles better
)


def plan_of(program: Program, case: Case, ranks: int, micro_batches: int, cluster: str) -> Plan:
    stages = balanced_stages(program, ranks * case.chunks)
    pipeline = Pipeline(stages, micro_batches, schedule=case.schedule)
    plan = plan_megatron(program, sw.Mesh(stage=ranks))
    return replace(plan, pipeline=pipeline, cluster=cluster if case.schedule == "list" else "")


def our_program(case: Case, model: str, ranks: int, micro_batches: int, cluster: str) -> Program:
    """The program of our step, without its processes."""
    example = build_example(model)
    program = sw.capture(example.module, kwargs=example.kwargs)
    plan = plan_of(program, case, ranks, micro_batches, cluster)
    return partition(program, sw.Mesh(**plan.mesh), plan)


def our_row(case: Case, model: str, micro_batches: int, cluster: str) -> TimedRow:
    """Our step. Its loss is 0 on ranks but the first, as PyTorch's is but on the last stage's."""
    example = build_example(model)
    program = sw.capture(example.module, kwargs=example.kwargs)
    plan = plan_of(program, case, dist.get_world_size(), micro_batches, cluster)
    step = sw.compile(example.module, kwargs=example.kwargs, plan=plan, backward="in_call")
    is_first = dist.get_rank() == 0

    def run() -> Tensor:
        loss = step(**example.kwargs)  # all ranks have it
        return loss.detach() if is_first else torch.zeros(())

    return TimedRow(f"shardweave {case.schedule}", run, [step], step.program)


# PyTorch's


class GPTStage(nn.Module):
    """Some layers of a GPT, by their names. Gives hidden states, or at the end logits."""

    def __init__(self, gpt: Any, layers: Sequence[str]) -> None:
        super().__init__()
        self.tables = nn.ModuleList([gpt.wte, gpt.wpe] if "wte" in layers else [])
        self.blocks = nn.ModuleList(
            block for index, block in enumerate(gpt.h) if f"h.{index}" in layers
        )
        self.ends = nn.ModuleList([gpt.ln_f, gpt.head] if "head" in layers else [])

    def forward(self, x: Tensor) -> Tensor:
        if len(self.tables):
            tokens, positions = self.tables
            x = tokens(x) + positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        for end in self.ends:
            x = end(x)
        return x


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def peer_row(case: Case, model: str, micro_batches: int) -> TimedRow:
    """PyTorch's schedule on stages with the same layers, and the same weights and batch."""
    example = build_example(model)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    program = sw.capture(example.module, kwargs=example.kwargs)
    layers = balanced_stages(program, ranks * case.chunks)
    ours, count = find_schedule(case.schedule), ranks * case.chunks
    stages = [
        PipelineStage(GPTStage(example.module, layers[s]), s, count, torch.device("cpu"))
        for s in range(count)
        if ours.place(s, ranks) == rank
    ]
    kind: Any = getattr(pytorch, case.peer)
    is_single = issubclass(kind, pytorch.PipelineScheduleSingle)
    schedule = kind(stages[0] if is_single else stages, micro_batches, loss_fn=loss_of)
    has_first = any(stage.is_first for stage in stages)
    has_last = any(stage.is_last for stage in stages)
    given = [example.kwargs["input_ids"]] if has_first else []

    def run() -> Tensor:
        losses: list[Tensor] = []
        target = example.kwargs["labels"] if has_last else None
        schedule.step(*given, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).mean().detach() if has_last else torch.zeros(())

    return TimedRow(f"torch {case.peer}", run, [stage.submod for stage in stages])
