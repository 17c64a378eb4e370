"""Pipelines on processes: training, state and checkpoints, and the messages between stages."""

# torch documents dcp.save and dcp.load, but does not export them by its own rules.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardweave.backends.distributed.mail import ExpectedMessage, Mail
from shardweave.backends.distributed.runtime import Runtime
from shardweave.backends.step.compiled_module import CompiledModule
from shardweave.driver.checking.check import (
    CheckResult,
    Expected,
    compare_steps,
    results_of,
    run_eager,
    scalar_loss,
)
from shardweave.driver.models.models import build_example
from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.planners.schedules.schedules import find_schedule
from shardweave.tests.compiled import compile_copy
from shardweave.tests.spawn import run_ranks
from shardweave.tests.unforeseen import HERE
from shardweave.tests.zoo import SPECS, captured, megatron

GPT = "gpt:layers=2,hidden=16,heads=2,vocab=32,seq=8,batch=8"
DEEP = "gpt:layers=4,hidden=16,heads=2,vocab=32,seq=8,batch=8"
STEPS = 3


def plan_of(
    spec: str, mesh: str, schedule: str, count: int, chunks: int = 1, /, **more: Any
) -> Plan:
    stages = balanced_stages(captured(spec).program, Mesh.parse(mesh).num_stages * chunks)
    pipeline = Pipeline(stages, count, schedule=schedule)
    return replace(megatron(spec, mesh), pipeline=pipeline, **more)


def train(module: nn.Module, batch: dict[str, Tensor], *, is_step: bool) -> list[float]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = scalar_loss(module(**batch))
        if not is_step:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def clipped(spec: str, plan: Plan, backward: str) -> tuple[float, float, float]:
    """The norm of the gradients of two calls of a step and of the model, and how far apart they are
    clipped."""
    torch.set_num_threads(1)
    example = build_example(spec, dtype=torch.float64)
    step = compile_copy(example.module, kwargs=example.kwargs, plan=plan, backward=backward)
    for synced in (step.no_sync(), nullcontext()):
        with synced:
            loss = scalar_loss(step(**example.kwargs))
            if backward == "autograd":
                loss.backward()
        scalar_loss(example.module(**example.kwargs)).backward()
    found = nn.utils.clip_grad_norm_(step.parameters(), 0.1)
    expected = nn.utils.clip_grad_norm_(example.module.parameters(), 0.1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (step, example.module)]
    for optimizer in optimizers:
        optimizer.step()
    return found.item(), expected.item(), error_of(step, example.module)


@pytest.mark.parametrize("backward", ["autograd", "in_call"])
def test_norm_over_all_stages_is_that_of_eager(backward: str) -> None:
    plan = plan_of(GPT, "stage=2", "1f1b", 4)
    for found, expected, error in run_ranks(clipped, 2, GPT, plan, backward):
        assert found == pytest.approx(expected, rel=1e-9)
        assert error < 1e-9


def error_of(step: CompiledModule, model: nn.Module) -> float:
    """The largest difference of a parameter on any stage from that of a model."""
    full = step.full_state_dict()
    return max((full[n] - p.detach()).abs().max().item() for n, p in model.named_parameters())


def trained(spec: str, plan: Plan) -> tuple[list[float], list[float], float, int]:
    """Losses of a step and of the model, how far apart they end, and the elements that are held."""
    torch.set_num_threads(1)
    example = build_example(spec, dtype=torch.float64)
    step = compile_copy(example.module, kwargs=example.kwargs, plan=plan)
    model = copy.deepcopy(example.module)
    losses = train(step, example.kwargs, is_step=True)
    expected = train(model, example.kwargs, is_step=False)
    held = [p.to_local() for p in step.parameters() if isinstance(p, DTensor)]
    return losses, expected, error_of(step, model), sum(local.numel() for local in held)


def check(spec: str, plan: Plan, world_size: int) -> list[int]:
    results = run_ranks(trained, world_size, spec, plan)
    for losses, expected, error, _ in results:
        assert losses == pytest.approx(expected, abs=1e-9)
        assert error < 1e-9
    return [held for *_, held in results]


def test_two_stages_train_as_eager_does_and_hold_their_own_layers() -> None:
    held = check(GPT, plan_of(GPT, "stage=2", "1f1b", 4), 2)
    program = captured(GPT).program
    whole = sum(p.numel() for p in captured(GPT).example.module.parameters())
    tied = captured(GPT).example.module.get_parameter("wte.weight").numel()
    assert program is not None
    assert sum(held) == whole + tied
    assert max(held) < 0.7 * whole


def checked(spec: str, plan: Plan) -> CheckResult:
    """Two steps beside eager's: the loss, every gradient, every buffer."""
    torch.set_num_threads(1)
    example = build_example(spec, dtype=torch.float64)
    step, model = compile_copy(example.module, kwargs=example.kwargs, plan=plan), example.module
    found: list[Expected] = []
    for _ in range(2):
        step.zero_grad()
        found.append(results_of(step, step(**example.kwargs)))
    expected = [run_eager(model, example.kwargs) for _ in range(2)]
    return compare_steps(found, expected, torch.float64)


def test_buffers_that_another_stage_writes_than_reads_are_those_of_eager() -> None:
    spec = f"{HERE}:recorded"
    stages = (("blocks.0",), ("blocks.1",))
    plan = Plan({"stage": 2}, pipeline=Pipeline(stages, 1))
    for found in run_ranks(checked, 2, spec, plan):
        assert found.ok, found
        assert found.worst_buffer is not None


@pytest.mark.parametrize(("mesh", "chunks"), [("data=1", 2), ("stage=1", 1)])
def test_stages_of_one_device_train_as_eager_does(mesh: str, chunks: int) -> None:
    losses, expected, error, _ = trained(GPT, plan_of(GPT, mesh, "zero-bubble", 4, chunks))
    assert losses == pytest.approx(expected, abs=1e-9)
    assert error < 1e-9


def uneven_plan(
    spec: str, mesh: str, shares: tuple[tuple[int, ...], ...], schedule: str = "1f1b", **more: Any
) -> Plan:
    """Megatron's plan with stages at several coordinates each."""
    stages = balanced_stages(captured(spec).program, len(shares) * find_schedule(schedule).chunks)
    pipeline = Pipeline(stages, sum(shares[0]), schedule=schedule, shares=shares)
    ranks = more.pop("ranks", ())
    return replace(megatron(spec, mesh), pipeline=replace(pipeline, ranks=ranks), **more)


def test_stage_at_two_devices_of_a_plan_trains_as_eager_does() -> None:
    plan = uneven_plan(GPT, "stage=3", ((4,), (3, 1)), ranks=((2,), (0, 1)))
    held = check(GPT, plan, 3)
    assert held[0] == held[1] != held[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "shares", "schedule", "more"),
    [
        ("gpt", "stage=4", ((5, 3), (2, 6)), "1f1b", {"ranks": ((3, 0), (1, 2))}),
        ("gpt", "stage=4", ((5, 3), (2, 6)), "zero-bubble-v", {}),
        ("gpt2", "stage=2,data=2", ((3, 1),), "gpipe", {"ranks": ((1, 3, 2, 0),)}),
        ("t5", "data=2,stage=2", ((3, 1),), "1f1b", {"zero": 2}),
        ("unet", "stage=4", ((2,), (1, 1), (2,)), "1f1b", {}),
        ("gpt", "stage=2,tensor=2", ((7, 1),), "1f1b", {"ranks": ((2, 3, 0, 1),)}),
    ],
)
def test_uneven_stages_of_four_processes_train_as_eager_does(
    name: str, mesh: str, shares: tuple[tuple[int, ...], ...], schedule: str, more: dict[str, Any]
) -> None:
    spec = DEEP if name == "gpt" else SPECS[name]
    check(spec, uneven_plan(spec, mesh, shares, schedule, **more), 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "schedule", "count", "chunks", "more"),
    [
        ("gpt", "stage=2,data=2", "dualpipe-v", 4, 2, {"zero": 2}),
        ("gpt", "stage=2,tensor=2", "interleaved-1f1b", 4, 2, {"recompute": "layer"}),
        ("gpt", "stage=4", "zero-bubble", 8, 1, {}),
        ("gpt2", "stage=2,data=2", "zero-bubble-v", 4, 2, {"zero": 1}),
        ("t5", "stage=2,data=2", "zero-bubble", 2, 1, {"zero": 3}),
        ("unet", "stage=4", "1f1b", 4, 1, {}),
        ("bert", "stage=2,tensor=2", "gpipe", 4, 1, {"batch_split": 2, "schedule": "sub-batch"}),
    ],
)
def test_four_processes_train_as_eager_does(
    name: str, mesh: str, schedule: str, count: int, chunks: int, more: dict[str, Any]
) -> None:
    spec = DEEP if name == "gpt" else SPECS[name]
    check(spec, plan_of(spec, mesh, schedule, count, chunks, **more), 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "schedule", "count", "chunks", "more"),
    [
        ("gpt", "stage=4,data=2", "list", 4, 1, {"zero": 1}),
        ("llama", "stage=2,data=2,tensor=2", "zero-bubble-v", 4, 2, {}),
    ],
)
def test_eight_processes_train_as_eager_does(
    name: str, mesh: str, schedule: str, count: int, chunks: int, more: dict[str, Any]
) -> None:
    spec = DEEP if name == "gpt" else SPECS[name]
    check(spec, plan_of(spec, mesh, schedule, count, chunks, **more), 8)


def trained_with_message_groups(spec: str, plan: Plan) -> tuple[Any, ...]:
    """As `trained`, with a process group for each direction between two ranks, as NCCL needs."""
    Runtime.groups_messages = property(lambda _: True)  # pyright: ignore[reportAttributeAccessIssue]
    found = trained(spec, plan)
    return *found, len(torch.distributed.distributed_c10d._world.pg_map)


def test_messages_have_a_group_for_each_direction_where_the_backend_runs_them_in_turn() -> None:
    plan = plan_of(GPT, "stage=2", "zero-bubble", 4)
    for losses, expected, error, _, groups in run_ranks(trained_with_message_groups, 2, GPT, plan):
        assert losses == pytest.approx(expected, abs=1e-9)
        assert error < 1e-9
        assert groups >= 3


class Lost:
    """A receive whose sender is gone."""

    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


def test_stage_whose_sender_is_gone_says_what_it_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "irecv", lambda *_, **__: Lost())
    address = 0, 1, "add.2", 3
    mail = Mail(1, {0: [ExpectedMessage(address, (2,), torch.float64)]}, torch.device("cpu"))
    mail.open()
    expected = r"rank 1 in stage 1 waited for 'add.2' of micro-batch 3 from stage 0, on rank 0: Con"
    with pytest.raises(RuntimeError, match=expected):
        mail.receive(0, address)


def saved_and_resumed(spec: str, plan: Plan, other: Plan, folder: str) -> tuple[float, float]:
    """A checkpoint of one plan, loaded under another, and back: how far parameters are off."""
    torch.set_num_threads(1)
    example = build_example(spec, dtype=torch.float64)
    model = copy.deepcopy(example.module)
    first = compile_copy(example.module, kwargs=example.kwargs, plan=plan)
    train(first, example.kwargs, is_step=True)
    train(model, example.kwargs, is_step=False)
    dcp.save(first.state_dict(), checkpoint_id=f"{folder}/first")
    second = compile_copy(
        build_example(spec, dtype=torch.float64, seed=7).module, kwargs=example.kwargs, plan=other
    )
    state = second.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/first")
    second.load_state_dict(state)
    there = error_of(second, model)
    second.load_state_dict(model.state_dict())
    return there, error_of(second, model)


def test_checkpoint_of_stages_resumes_without_and_back(tmp_path: Any) -> None:
    staged, flat = plan_of(GPT, "stage=2", "1f1b", 4), megatron(GPT, "data=2")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for pair, folder in (((staged, flat), "a"), ((flat, staged), "b")):
        for errors in run_ranks(saved_and_resumed, 2, GPT, *pair, str(tmp_path / folder)):
            assert max(errors) < 1e-9
