"""Accumulation: gradients of micro-batches add up as in eager, and hooks fire."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardweave.ir.verify.program import check
from shardweave.passes.messages.pending_gradients import leave_gradients_pending
from shardweave.tests.driver.step.models import (
    F64,
    Normed,
    assert_same_state,
    batch,
    close,
    compiled,
)

MESHES = ["", "data=2", "data=2,tensor=2"]


def _eager(model: Normed, inputs: dict[str, Tensor], count: int, scale: float) -> Tensor:
    """The mean of the losses of micro-batches, and gradients of `scale` times their sum."""
    losses: list[Tensor] = []
    for x, y in zip(inputs["x"].chunk(count), inputs["y"].chunk(count), strict=True):
        loss = model(x, y)[0]
        (loss * scale).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    ("backend", "mesh"), [("distributed", ""), *(("reference", mesh) for mesh in MESHES)]
)
def test_micro_batches_of_a_call_are_those_of_eager(backend: str, mesh: str) -> None:
    model = Normed()
    step = compiled(model, batch(), mesh=mesh or None, backend=backend)
    for _ in range(2):  # gradients add up over calls
        inputs = batch()
        loss, outs = step(**inputs, accumulate=2)
        close(loss, _eager(model, inputs, 2, 1 / 2))
        assert [tuple(out.shape) for out in outs] == [(4, 4), (4, 4)]
        assert_same_state(step, model)
    inputs = batch()
    step(**inputs, accumulate=4, loss_scale=4.0)
    _eager(model, inputs, 4, 1.0)
    assert_same_state(step, model)


@pytest.mark.parametrize("mesh", MESHES)
def test_calls_without_reduction_and_a_last_one_are_those_of_eager(mesh: str) -> None:
    model = Normed()
    step = compiled(model, batch(), mesh=mesh or None)
    for module in (step, model):
        module.get_parameter("down.bias").requires_grad_(False)
    inputs = batch(6)
    with step.no_sync():
        for part in range(2):
            rows = slice(2 * part, 2 * part + 2)
            step(inputs["x"][rows], inputs["y"][rows], loss_scale=0.25)
    step(inputs["x"][4:], inputs["y"][4:], loss_scale=0.25)
    _eager(model, inputs, 3, 0.25)
    assert_same_state(step, model)
    step.zero_grad()
    model.zero_grad()
    step(**batch(8))
    assert not step.gradients.are_pending


def test_pending_program_has_no_reduction_of_gradients_and_verifies() -> None:
    step = compiled(Normed(), batch())
    program = step.program.clone()
    # But for those of batch norm, whose sums over the batch its backward pass reads itself.
    assert leave_gradients_pending(program) == 4
    check(program)
    assert step.program.stats().count("all_reduce", ("data",)) > program.stats().count(
        "all_reduce", ("data",)
    )
    assert not leave_gradients_pending(program)
    slots = {
        slot.name: program.sharding_of_slot(slot) for slot in program.results if slot.kind == "grad"
    }
    assert {name for name, sharding in slots.items() if sharding.unreduced} == {
        "up.weight",
        "up.bias",
        "down.weight",
        "down.bias",
    }


def test_started_reductions_are_left_out_too() -> None:
    step = compiled(Normed(), batch(), passes="start-collectives")
    program = step.program.clone()
    assert leave_gradients_pending(program) == 4
    check(program)
    model, inputs = Normed(), batch()
    step = compiled(model, batch(), passes="start-collectives")
    step(**inputs, accumulate=2)
    _eager(model, inputs, 2, 0.5)
    assert_same_state(step, model)


def test_weights_stored_in_shards_are_scattered_for_each_micro_batch() -> None:
    model, inputs = Normed(), batch()
    step = compiled(model, inputs, mesh="data=2", plan={"*.weight": '[{"data"}, {}]'})
    pending = step.bound.pending.program.stats()
    assert (
        pending.count("reduce_scatter", ("data",))
        == step.program.stats().count("reduce_scatter", ("data",))
        > 0
    )
    step(**inputs, accumulate=2)
    _eager(model, inputs, 2, 0.5)
    assert_same_state(step, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"accumulate": 3},
            r"accumulate=3 does not divide the 8 rows of the batch; use one of \[1, 2, 4, 8\]",
        ),
        ({"accumulate": 0}, "accumulate=0; give the number of micro-batches"),
        ({"accumulate": 2, "y": torch.ones(6, 4, dtype=F64)}, "differ in their number of rows"),
        (
            {"accumulate": 2, "x": torch.ones(8, 4, dtype=F64, requires_grad=True)},
            "an input requires a gradient",
        ),
    ],
)
def test_batch_that_does_not_split_is_refused(change: dict[str, Any], message: str) -> None:
    step = compiled(Normed(), batch(), mesh="data=2")
    with pytest.raises(ValueError, match=message):
        step(**{**batch(), **change})


def test_model_with_a_parameter_of_the_name_keeps_it() -> None:
    class Scaled(Normed):
        def forward(self, x: Tensor, y: Tensor, loss_scale: Tensor) -> tuple[Tensor, Tensor]:
            loss, out = super().forward(x, y)
            return loss * loss_scale, out

    model = Scaled()
    inputs = {**batch(), "loss_scale": torch.tensor(3.0, dtype=F64)}
    step = compiled(model, inputs, mesh="data=2")
    loss, _ = step(**inputs)
    expected, _ = model(**inputs)
    expected.backward()
    close(loss, expected)
    assert_same_state(step, model)


def test_hooks_of_gradients_fire() -> None:
    model, inputs = Normed(), batch()
    step = compiled(model, inputs, mesh="data=2")
    seen: dict[str, list[Tensor]] = {"step": [], "model": []}
    for name, module in (("step", step), ("model", model)):
        parameter = module.get_parameter("up.weight")
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen[name].append(p.grad.clone())
        )
    for _ in range(2):
        step(**inputs)
        model(**inputs)[0].backward()
    assert len(seen["step"]) == len(seen["model"]) == 2
    for found, expected in zip(seen["step"], seen["model"], strict=True):
        close(found, expected)
    for module in (step, model):
        module.zero_grad()
        module.get_parameter("up.weight").register_hook(lambda grad: grad * 2)
    step(**inputs)
    model(**inputs)[0].backward()
    close(seen["step"][-1], seen["model"][-1])


def test_gradients_are_added_where_they_are_made() -> None:
    model, inputs = Normed(), batch()
    step = compiled(model, inputs, mesh=None, backend="distributed")
    step(**inputs)
    before = {name: p.grad for name, p in step.named_parameters()}
    given = step.gradients.into(step.bound)
    assert len(given) == 6
    with torch.no_grad():
        left = step.bound.start(step, inputs, 1.0, given).rest()
    assert left.keys() == {key for key in step.bound.results if key[0] != "grad"}
    step(**inputs)
    for name, parameter in step.named_parameters():
        assert parameter.grad is before[name]
