"""A script for DistributedDataParallel trains the same where sw.compile stands in its place."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

import shardweave as sw
from shardweave.tests.integrations.frameworks import check_same, example, weights
from shardweave.tests.spawn import run_ranks


def trains_as_ddp(meshes: list[tuple[str, int]]) -> None:
    train = example("ddp_script").train
    torch.set_default_dtype(torch.float64)
    wrapped, losses = train(None, 0)
    assert isinstance(wrapped, DistributedDataParallel)
    for mesh, zero in meshes:
        model, numbers = train(mesh, zero)
        assert isinstance(model, sw.CompiledModule)
        check_same(numbers, losses, mesh, 1e-9)
        check_same(weights(model), weights(wrapped.module), mesh, 1e-9)


def test_script_for_ddp_trains_the_same() -> None:
    run_ranks(trains_as_ddp, 2, [("data=2", 0), ("data=2", 3)])
