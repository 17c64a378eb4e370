"""The rows of benchmarks/zero.py: ours, FSDP2's, and what a rank holds of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from timed_rows import TimedRow
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import shardweave as sw
from shardweave.backends.distributed.pipeline import RankStep
from shardweave.driver.models.models import build_example
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan_parts import Pipeline


def our_row(zero: int, model: str, micro_batches: int) -> TimedRow:
    """Our step: data parallelism in micro-batches, under a stage of ZeRO."""
    example = build_example(model)
    program = sw.capture(example.module, kwargs=example.kwargs)
    plan = plan_megatron(program, sw.Mesh(data=dist.get_world_size()))
    plan = replace(plan, zero=zero, pipeline=Pipeline((("*",),), micro_batches))
    step = sw.compile(example.module, kwargs=example.kwargs, plan=plan, backward="in_call")
    return TimedRow(f"shardweave ZeRO {zero}", lambda: step(**example.kwargs), [step], step.program)


def peer_row(zero: int, model: str, micro_batches: int) -> TimedRow:
    """FSDP2 that keeps and scatters as a stage of ZeRO does, on the same weights and batch."""
    example = build_example(model)
    module, size = example.module, dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    for block in cast(nn.ModuleList, module.h):
        fully_shard(block, mesh=mesh, reshard_after_forward=zero == 3)
    fully_shard(module, mesh=mesh, reshard_after_forward=zero == 3)
    assert isinstance(module, FSDPModule)
    own = {name: t.chunk(size)[dist.get_rank()] for name, t in example.kwargs.items()}
    batches = [
        {name: tensor.chunk(micro_batches)[number] for name, tensor in own.items()}
        for number in range(micro_batches)
    ]
    return TimedRow(f"FSDP2 as ZeRO {zero}", _step_of(module, batches, zero), [module])


def _step_of(module: Any, batches: list[dict[str, Tensor]], zero: int) -> Callable[[], Tensor]:
    def step() -> Tensor:
        total = torch.zeros(())
        for batch in batches:
            is_last = batch is batches[-1]
            module.set_is_last_backward(is_last)
            module.set_reshard_after_backward(zero == 3 or is_last)
            module.set_requires_gradient_sync(zero > 1 or is_last)
            loss = module(**batch) / len(batches)
            loss.backward()
            total += loss.detach()
        return total

    return step


# What a rank holds


def held_bytes(row: TimedRow) -> dict[str, int]:
    """Bytes of states that this rank holds after a step of AdamW; frees them. Collective."""
    parameters = [p for module in row.modules for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.0)
    row.clear()
    row.run()
    optimizer.step()
    states = [one for state in optimizer.state.values() for one in state.values()]
    return {
        "parameters": sum(map(_bytes, parameters)),
        "gradients": sum(_bytes(p.grad) for p in parameters if p.grad is not None),
        "optimizer": sum(_bytes(one) for one in states if one.ndim),
    }


def _bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


@contextmanager
def watched() -> Iterator[dict[str, int]]:
    """Notes the most that steps of ours hold from run to run, by kind: `whole` is what was made
    once, the gathered weights; `sum` are sums of gradients."""
    found = {"whole": 0, "sum": 0}
    run = RankStep.run

    def noting(self: RankStep, *arguments: Any) -> None:
        whole = [tensor for (_, _, number), tensor in self.kept.items() if number is None]
        sums = [tensor for parts in self.totals.values() for tensor in parts]
        found["whole"] = max(found["whole"], sum(map(_bytes, whole)))
        found["sum"] = max(found["sum"], sum(map(_bytes, sums)))
        run(self, *arguments)

    RankStep.run = cast("Any", noting)
    try:
        yield found
    finally:
        RankStep.run = run


def textbook_bytes(zero: int, whole_bytes: int, ranks: int) -> Mapping[str, int]:
    """What a rank holds of a model whose parameters take `whole_bytes`, with AdamW in their dtype.

    States are in shards after a step. In it, ZeRO 1 has whole gradients, 2 and 3 their shards, and
    1 and 2 have whole weights.
    """
    shard = whole_bytes // ranks
    gradients = whole_bytes if zero == 1 else shard
    return {
        "parameters": shard,
        "gradients": shard,
        "optimizer": 2 * shard,
        "in a step": gradients + (whole_bytes if zero < 3 else 0),
    }
