"""Steps on two real processes: each rank's rows, accumulation reduced once, failures everywhere."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

import shardweave as sw
from shardweave.driver.processes import world
from shardweave.driver.step import lowering
from shardweave.tests.compiled import compile_copy
from shardweave.tests.driver.step.models import Masked, Mixed, Normed, batch, close, two_devices
from shardweave.tests.spawn import run_ranks

STORED = {"*.weight": '[{"data"}, {}]'}


class Counted:
    """Counts messages by kind while it is entered."""

    def __init__(self) -> None:
        self.all_reduces = 0

    def __enter__(self) -> Counted:
        self.before = dist.all_reduce

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.all_reduces += 1
            return self.before(*args, **kwargs)

        dist.all_reduce = counting
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self.before


def assert_same(step: sw.CompiledModule, model: Normed) -> None:
    """Whole parameters, gradients and buffers are those of eager."""
    for name, parameter in model.named_parameters():
        ours = step.get_parameter(name)
        assert isinstance(ours, DTensor)
        assert isinstance(ours.grad, DTensor)
        assert parameter.grad is not None
        assert ours.grad.placements == ours.placements
        close(ours.grad.full_tensor(), parameter.grad, f"gradient of {name}")
    for name, tensor in step.full_state_dict().items():
        close(tensor, model.state_dict()[name], name)


def eager(model: Normed, inputs: dict[str, Tensor], parts: list[list[int]]) -> None:
    """Gradients of the mean of the losses of some micro-batches, each by its rows."""
    for rows in parts:
        loss, _ = model(inputs["x"][rows], inputs["y"][rows])
        (loss / len(parts)).backward()


def train(plan: dict[str, str]) -> None:
    """Every form of a call, beside eager."""
    torch.manual_seed(0)
    model, rank = Normed(), dist.get_rank()
    step = compile_copy(model, kwargs=batch(), mesh="data=2", plan=plan)
    assert list(step.rows("x")) == list(range(4 * rank, 4 * rank + 4))
    assert step.rows("y", 6) == range(3 * rank, 3 * rank + 3)
    both = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (step, model)]

    # The global batch, this rank's rows, and a last batch that does not divide.
    for rows, is_local in ((8, False), (8, True), (7, False), (6, True)):
        for optimizer in both:
            optimizer.zero_grad()
        inputs = batch(rows)
        loss_of = dict(inputs)
        if is_local:
            mine = list(step.rows("x", rows))
            loss_of = step.local_batch(y=inputs["y"][mine])
            loss_of |= step.local_batch(y=inputs["y"][mine], x=inputs["x"][mine])
        loss, out = step(**loss_of)
        expected, wanted = model(**inputs)
        expected.backward()
        close(loss, expected)
        assert isinstance(out, DTensor)
        assert out.placements == (Shard(0),)
        close(out.full_tensor(), wanted)
        assert_same(step, model)
        for optimizer in both:
            optimizer.step()

    step.eval()
    model.eval()
    inputs = batch(4)
    close(step(**inputs)[1].full_tensor(), model(**inputs)[1])
    step.train()
    model.train()
    accumulate(step, model)


def accumulate(step: sw.CompiledModule, model: Normed) -> None:
    """Micro-batches of one call and of several, whose gradients are reduced once."""
    inputs = batch()
    step.zero_grad()
    model.zero_grad()
    step(**inputs, accumulate=2)
    eager(model, inputs, [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert_same(step, model)

    mine = list(step.rows("x"))
    local = {name: tensor[mine] for name, tensor in inputs.items()}
    step.zero_grad()
    model.zero_grad()
    step(**step.local_batch(**local), accumulate=2)
    eager(model, inputs, [[0, 1, 4, 5], [2, 3, 6, 7]])
    assert_same(step, model)

    # On top of reduced gradients, and with a batch in between that every rank has whole.
    with step.no_sync():
        step(**inputs, loss_scale=0.5)
        pending = step.get_parameter("down.bias").grad
        assert isinstance(pending, DTensor)
        assert pending.placements == (Partial(),)
        step(**{name: tensor[:7] for name, tensor in inputs.items()}, loss_scale=0.5)
    step(**{name: tensor[:6] for name, tensor in inputs.items()}, loss_scale=0.5)
    for rows in (8, 7, 6):
        (model(**{name: tensor[:rows] for name, tensor in inputs.items()})[0] * 0.5).backward()
    assert_same(step, model)


def count_messages() -> tuple[int, int]:
    """All-reduces of a call, and of one of four micro-batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.Linear(300, 4))
    step = compile_copy(Loss(model), (torch.randn(8, 4),), mesh="data=2", plan="replicated")
    counts: list[int] = []
    for options in ({}, {"accumulate": 4}):
        step(torch.randn(8, 4), **options)
        with Counted() as counted:
            step(torch.randn(8, 4), **options)
        counts.append(counted.all_reduces)
    return counts[0], counts[1]


class Loss(torch.nn.Module):
    """A model with the mean of squares as its loss."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


def fail_together() -> list[str]:
    """What each rank is told when rank 0 fails, and when ranks call differently."""
    found: list[str] = []

    def wrong() -> None:
        raise KeyError("lost")

    is_first = dist.get_rank() == 0
    with pytest.raises(KeyError if is_first else world.RankZeroError) as raised:
        world.from_rank_0(wrong)
    found.append(str(raised.value))
    with pytest.raises(AttributeError if is_first else world.RankZeroError):
        world.from_rank_0(lambda: wrong)  # which pickle does not take
    step = compile_copy(Normed(), kwargs=batch(), mesh="data=2")
    with pytest.raises(ValueError, match="ranks differ in the call") as differs:
        step(**batch(6 if dist.get_rank() == 0 else 4))
    found.append(str(differs.value))
    torch.manual_seed(1)  # the ranks have drawn unequally many numbers
    step(**batch())
    fail_while_running()
    return found


def fail_while_running() -> None:
    """Ranks that failed at the same op go on as before; where they are left apart, none does."""
    table, ids = nn.EmbeddingBag(4, 2).double(), torch.zeros(4, 3, dtype=torch.int64)
    step = compile_copy(table, (ids,), mesh="data=2", loss=lambda out: out.sum())
    step(ids)
    for _ in range(2):
        with pytest.raises((ValueError, IndexError)):
            step(ids + 9)
        step.zero_grad()
        loss, _ = step(ids)
        expected = table(ids).sum()
        close(loss, expected)
        (gradient,) = torch.autograd.grad(expected, table.weight)
        found = step.get_parameter("weight").grad
        assert isinstance(found, DTensor)
        close(found.full_tensor(), gradient)
    with pytest.raises((ValueError, IndexError)) if dist.get_rank() else failing_message():
        step(ids + 9 * dist.get_rank())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"failed on this rank .*End the processes"):
            step(ids)


@contextmanager
def failing_message() -> Iterator[None]:
    """Messages meanwhile fail on this rank, as if it was interrupted while it waits."""
    before = dist.all_reduce

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    dist.all_reduce = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        dist.all_reduce = before


def plan_for_cluster() -> None:
    """Rank 0 alone plans, and every rank follows its plan."""
    torch.manual_seed(0)
    model, asked = Normed(), list[str]()
    before = lowering.planned

    def counting(*args: Any, **kwargs: Any) -> sw.Plan:
        asked.append("once")
        return before(*args, **kwargs)

    lowering.planned = counting
    try:
        inputs = batch()
        step = compile_copy(model, kwargs=inputs, cluster=two_devices(), plan="megatron")
    finally:
        lowering.planned = before
    assert asked == (["once"] if dist.get_rank() == 0 else [])
    assert step.plan is not None
    assert sw.Mesh(**step.plan.mesh).num_devices == 2
    loss, _ = step(**inputs)
    expected, _ = model(**inputs)
    close(loss, expected, "loss")


def synchronise_batch_norm() -> None:
    """What DDP needs for it changes nothing: a program's batch norm is over the global batch."""
    model, inputs = Normed(), batch()
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    step = compile_copy(converted, kwargs=inputs, mesh="data=2")
    loss, _ = step(**inputs)
    expected, _ = model(**inputs)
    expected.backward()
    close(loss, expected, "loss")
    assert_same(step, model)


def draw_before_micro_batches() -> None:
    """Each stage has the state of random numbers from which what it reads of all samples is made."""
    for model, inputs in ((Masked(), torch.randn(8, 5, 4)), (Mixed(), torch.randn(8, 3, 4))):
        x = inputs.double()
        step = compile_copy(model, (x,), mesh="stage=2", seed=3)
        assert not [note for note in step.notes if "one micro-batch" in note]
        numbers = sw.seeded(3)
        for _ in range(3):
            with numbers:
                expected = model(x)
            close(step(x), expected, "loss")


class Noted(nn.Module):
    """A loss, and a setting that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.note = nn.Linear(4, 4), "before"

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).square().mean()


def change_what_nobody_reads() -> None:
    """On one rank alone, as where rank 0 saves a model and its config."""
    model, x = Noted(), torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    sw.compile(model, (x,), mesh="data=2")
    before = model(x)
    if dist.get_rank() == 0:
        model.note = "after"
    close(model(x), before, "loss")


def everything() -> tuple[tuple[int, int], list[str]]:
    """All of the above in one start of processes."""
    train({})
    train(STORED)
    synchronise_batch_norm()
    draw_before_micro_batches()
    plan_for_cluster()
    change_what_nobody_reads()
    return count_messages(), fail_together()


@pytest.mark.filterwarnings("ignore::shardweave.passes.notes.PlanNote")
def test_steps_on_two_processes_are_those_of_eager() -> None:
    first, second = run_ranks(everything, 2)
    for (once, accumulated), _ in (first, second):
        # Loss and gradients travel together; of micro-batches each loss alone, and gradients once.
        assert once == 1
        assert accumulated == 3 + 1
    assert first[1][0] == "'lost'"
    assert second[1][0] == "rank 0 failed: KeyError: 'lost'"
    assert first[1][1] == second[1][1]
    assert (
        "rank 0 has x (6, 4) float64, y (6, 4) float64 in training, rank 1 has x (4, 4)"
        in first[1][1]
    )
