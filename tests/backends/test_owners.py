"""Owners of matrices: what they compute is what one process computes, for the fewest bytes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardweave as sw
from shardweave.backends.optimizers import hook, owned_step
from shardweave.backends.optimizers.exchange import Layout, Message, layout_of, put, take
from shardweave.backends.optimizers.shards import full_value
from shardweave.tests.compiled import compile_copy
from shardweave.tests.spawn import run_ranks


class Two(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.a = nn.Linear(16, width, bias=False)
        self.b = nn.Linear(width, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()).square().mean()


def muon(zero: int, mesh: str = "data=2", width: int = 32) -> tuple[float, list[int], list[str]]:
    """The largest error after two steps, the bytes of the messages of each, and the notes."""
    torch.manual_seed(0)
    model, x = Two(width).double(), torch.randn(8, 16, dtype=torch.float64)
    step = compile_copy(model, (x,), mesh=mesh, zero=zero)
    eager = copy.deepcopy(model)
    ours, theirs = (torch.optim.Muon(m.parameters(), lr=0.1) for m in (step, eager))
    sent: list[int] = []
    plain = owned_step.exchanged

    def counted(messages: Sequence[Message], device: torch.device) -> list[Tensor | None]:
        rank = dist.get_rank()
        sent.append(sum(m.num_bytes for m in messages if m.source == rank != m.goal))
        return plain(messages, device)

    owned_step.exchanged = counted
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", hook.OptimizerNote)
        for rate in (0.1, 0.05):
            for module, optimizer in ((step, ours), (eager, theirs)):
                optimizer.param_groups[0]["lr"] = rate
                optimizer.zero_grad()
                loss = module(x)
                if module is eager:
                    loss.backward()
                optimizer.step()
    owned_step.exchanged = plain
    wanted = dict(eager.named_parameters())
    errors = [
        (full_value(cast("DTensor", p)) - wanted[name]).abs().max().item()
        for name, p in step.named_parameters()
    ]
    return (
        max(errors),
        sent,
        [str(note.message) for note in caught if note.category is hook.OptimizerNote],
    )


def test_muon_on_shards_sends_half_a_matrix_there_and_back_in_bfloat16() -> None:
    half = 16 * 32 // 2 * 2
    for error, sent, notes in run_ranks(muon, 2, 3):
        assert error < 1e-9
        assert sent == [half] * 4  # each rank owns one of the two matrices
        assert notes == []


def test_muon_on_full_values_sends_nothing_where_computing_takes_less() -> None:
    for error, sent, _ in run_ranks(muon, 2, 0):
        assert error < 1e-9
        assert sent == [0] * 4


@pytest.mark.parametrize(("mesh", "width"), [("data=2", 33), ("stage=2", 32)])
def test_bytes_and_messages_of_owners_are_those_predicted(mesh: str, width: int) -> None:
    x = torch.randn(8, 16, dtype=torch.float64)
    program = sw.capture(Two(width).double(), (x,))
    plan = sw.Plan(mesh={"data": 2}, zero=3) if mesh == "data=2" else sw.Plan(mesh={"stage": 2})
    told = sw.simulate(program, "testbed:rate=250mbit", plan=plan, update="muon").update
    assert told is not None
    zero = plan.zero
    sums = [0, 0]
    for rank, (_, sent, _) in enumerate(run_ranks(muon, 2, zero, mesh, width)):
        sums[rank] = sent[0] + sent[1]
        assert sum(size > 0 for size in sent[:2]) <= told.messages
    assert max(sums) == told.sent_bytes


def layouts() -> list[bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    full = torch.arange(7 * 6.0).view(7, 6)
    checks: list[bool] = []
    for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Shard(1), Shard(1)]):
        local = distribute_tensor(full, mesh, placements)
        layout = layout_of(local)
        own = layout.shards[dist.get_rank()]
        checks.append(torch.equal(take(full, own), local.to_local()))
        checks.append(torch.equal(joined(layout, full), full))
    return checks


def joined(layout: Layout, full: Tensor) -> Tensor:
    made = torch.zeros_like(full)
    for index in layout.shards.values():
        put(made, index, take(full, index))
    return made


def test_shards_of_every_rank_are_known_to_all() -> None:
    for checks in run_ranks(layouts, 4):
        assert all(checks)


def test_elements_of_a_strided_shard_are_taken_and_put() -> None:
    full = torch.arange(48.0).view(8, 6)
    shards: dict[int, Any] = {
        0: ((0, 1, 4, 5), range(3)), 1: ((0, 1, 4, 5), range(3, 6)),
        2: ((2, 3, 6, 7), (0, 2, 4)), 3: ((2, 3, 6, 7), (1, 3, 5)),
    }  # fmt: skip
    assert torch.equal(joined(Layout((8, 6), shards), full), full)
    assert take(full, shards[0])[:, 0].tolist() == [0, 6, 24, 30]
