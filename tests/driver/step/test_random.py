"""Random numbers of a step: the same on every mesh, and those of eager PyTorch under `sw.seeded`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.passes.pipeline import run_passes
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.lowering.lower import local_program
from shardweave.tests import zoo
from shardweave.tests.compiled import compile_copy
from shardweave.tests.driver.step.models import F64, assert_same_state, batch, close, compiled
from shardweave.tests.marks import slow
from shardweave.tests.spawn import run_ranks

GPT = "gpt:layers=2,hidden=16,heads=8,vocab=32,seq=16,batch=8,dropout=0.1"
VIT = f"{zoo.SPECS['vit']},hidden_dropout_prob=0.1,attention_probs_dropout_prob=0.1"
LAYERS = "split-addmm,add-pending-sums,propagate-shardings,rematerialize,insert-collectives,cse,dce"


@pytest.mark.parametrize(
    "spec", [pytest.param(GPT, id="gpt"), pytest.param(VIT, id="vit", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("mesh", "passes"),
    [
        ("tensor=2", "preset:partition"),
        ("data=4", "preset:partition"),
        ("data=2,tensor=2", LAYERS),
        ("data=2,tensor=2", "preset:oases"),
        slow("data=2,tensor=2", "preset:merak"),
    ],
)
def test_dropout_everywhere_equals_eager(spec: str, mesh: str, passes: str) -> None:
    zoo.assert_equals_eager(local(spec, mesh, passes), zoo.captured(spec))


@pytest.mark.parametrize("zero", [1, 3])
def test_dropout_between_weights_stored_in_shards_equals_eager(zero: int) -> None:
    plan = replace(zoo.megatron(GPT, "data=2,tensor=2"), zero=zero)
    program = local_program(zoo.captured(GPT).program, plan)
    gathered = {one.axes for one in program.stats().collectives if one.kind == "all_gather"}
    assert any("data" in axes for axes in gathered)
    zoo.assert_equals_eager(program, zoo.captured(GPT))


def local(spec: str, mesh: str, passes: str) -> sw.Program:
    """The program of each rank by Megatron's plan."""
    plan = ApplyPlanPass.of(zoo.megatron(spec, mesh))
    return run_passes(zoo.captured(spec).program, [plan, passes], mesh=mesh)


def test_what_is_dropped_is_drawn_where_it_is_used() -> None:
    """No rank draws more than its part, and what is drawn is not sent."""
    before, after = (
        local(spec, "data=2,tensor=2", "preset:partition") for spec in (zoo.SPECS["gpt"], GPT)
    )
    assert after.stats().collectives == before.stats().collectives
    shapes = {str(op.results[0].type) for op in after.ops if op.name == "dist.random"}
    assert shapes == {"tensor<4x16x16xf32>", "tensor<4x4x16x16xf32>"}


class Dropping(nn.Module):
    """Two linear maps with dropout between them, on batches of `models.batch`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, dtype=F64), nn.Linear(8, 4, dtype=F64)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.down(self.drop(self.up(x).relu()))
        return nn.functional.mse_loss(out, y), out


def eager(model: nn.Module, numbers: Any, inputs: dict[str, Tensor], scale: float = 1.0) -> Tensor:
    """The loss, and gradients in `.grad`."""
    with numbers:
        loss, _ = model(**inputs)
    (scale * loss).backward()
    return loss


def test_steps_go_on_as_eager_does_and_evaluation_draws_nothing() -> None:
    model, numbers = Dropping(), sw.seeded(11)
    step = compiled(model, batch(), seed=11)
    for rows in (8, 8, 6):
        inputs = batch(rows)
        step.zero_grad()
        model.zero_grad()
        close(step(**inputs)[0], eager(model, numbers, inputs))
        assert_same_state(step, model)
        step.eval()
        model.eval()
        close(step(**inputs)[0], model(**inputs)[0])
        step.train()
        model.train()
    assert step.get_buffer("random_state").tolist() == [11, 3]


def test_program_is_compiled_within_the_context_in_which_eager_draws() -> None:
    model, numbers = Dropping(), sw.seeded(5)
    step = compiled(model, batch(), seed=5)
    last = batch(5)
    with numbers:
        loss, _ = step(**last)
    close(loss, eager(model, numbers, last), "loss")
    assert_same_state(step, model)


def test_state_that_is_copied_back_draws_the_same_numbers_again() -> None:
    step, inputs = compiled(Dropping(), batch(), seed=5), batch()
    kept = step.random_state.clone()
    first, second = step(**inputs)[0], step(**inputs)[0]
    assert first != second
    step.random_state.copy_(kept)
    assert step(**inputs)[0] == first


def test_micro_batches_draw_one_after_another() -> None:
    model, numbers, inputs = Dropping(), sw.seeded(2), batch()
    step = compiled(model, inputs, seed=2)
    step(**inputs, accumulate=2)
    for part in (slice(0, 4), slice(4, 8)):
        eager(model, numbers, {name: value[part] for name, value in inputs.items()}, 0.5)
    assert_same_state(step, model)


def test_seed_is_that_of_torch_unless_given() -> None:
    model, inputs = Dropping(), batch()
    torch.manual_seed(123)
    first = compiled(model, inputs)
    assert first.get_buffer("random_state").tolist() == [123, 0]
    second = compiled(model, inputs, mesh="data=4", seed=123)
    close(first(**inputs)[0], second(**inputs)[0])
    assert first(**inputs)[0] != compiled(model, inputs, seed=4)(**inputs)[0]


def test_checkpoint_holds_the_state(tmp_path: Path) -> None:
    model, inputs = Dropping(), batch()
    step = compiled(model, inputs, seed=5)
    step(**inputs)
    torch.save(step.full_state_dict(), tmp_path / "state.pt")
    expected = step(**inputs)[0]
    other = compiled(model, inputs, mesh="data=4", seed=6)
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    close(other(**inputs)[0], expected)


def test_step_that_has_drawn_nothing_yet_takes_a_state() -> None:
    model, inputs = Dropping(), batch()
    trained = compiled(model, inputs, seed=5)
    trained(**inputs)
    model.eval()
    with pytest.warns(sw.PlanNote, match="evaluation mode"):
        step = compiled(model, inputs, seed=6)
    assert "random_state" not in step.state_dict()
    step.load_state_dict(trained.full_state_dict())
    step.train()
    close(step(**inputs)[0], trained(**inputs)[0])


def train_on_ranks() -> None:
    """Three steps on real processes, seeded differently by torch, beside eager."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model, numbers = Dropping(), sw.seeded(7)
    batches = [batch() for _ in range(3)]
    torch.manual_seed(7 if rank == 0 else 8)
    step = compile_copy(model, kwargs=batches[0], mesh="data=2,tensor=2")
    for inputs in batches:
        step.zero_grad()
        model.zero_grad()
        close(step(**inputs)[0], eager(model, numbers, inputs))
        for name, parameter in model.named_parameters():
            found: Any = step.get_parameter(name).grad
            close(found.full_tensor(), parameter.grad, name)
    assert "random_numbers(random_state" in step.source


def test_real_processes_draw_the_same() -> None:
    run_ranks(train_on_ranks, 4)
