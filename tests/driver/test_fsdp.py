"""FSDP on real processes: parameters, gradients and Adam's state are shards, as eager trains."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard

from shardweave.driver.models.models import build_example
from shardweave.tests.adamw import errors_of_three_steps
from shardweave.tests.compiled import compile_copy
from shardweave.tests.spawn import run_ranks

GPT = "gpt:layers=1,hidden=16,heads=4,vocab=32,seq=8,batch=4"


def train() -> list[float]:
    """Errors of losses and then of parameters; Adam's state is in shards, too."""
    example = build_example(GPT, dtype=torch.float64)
    step = compile_copy(
        example.module, kwargs=example.kwargs, mesh="data=2", plan={"h.*.weight": '[{"data"}, {}]'}
    )
    errors = errors_of_three_steps(step, example)
    weight = step.get_parameter("h.0.mlp.fc_in.weight")
    assert isinstance(weight, DTensor)
    assert isinstance(weight.grad, DTensor)
    optimizer = torch.optim.AdamW(step.parameters())
    optimizer.step()
    moment = optimizer.state[weight]["exp_avg"]
    for one in (weight, weight.grad, moment):
        assert one.placements == (Shard(0),)
        assert one.to_local().shape == (32, 16)
    return errors


def test_adamw_on_stored_shards_trains_as_eager_does() -> None:
    for errors in run_ranks(train, 2):
        assert max(map(abs, errors)) < 1e-9
