"""One step, many programs: modes, shapes and arguments mean what they mean in PyTorch."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.driver.models.models import build_example
from shardweave.tests.driver.step.models import (
    F64,
    Normed,
    assert_same_state,
    batch,
    close,
    compiled,
    optimizers,
)


def test_training_and_validation_in_turn_are_those_of_eager() -> None:
    model = Normed()
    step = compiled(model, batch())
    both = optimizers([step, model])
    for rows in (8, 8, 6, 8):  # the last batch of an epoch is short
        step.train()
        model.train()
        for optimizer in both:
            optimizer.zero_grad()
        inputs = batch(rows)
        (loss, out), (expected, wanted) = step(**inputs), model(**inputs)
        expected.backward()
        close(loss, expected)
        close(out, wanted)
        assert_same_state(step, model)
        for optimizer in both:
            optimizer.step()
        step.eval()
        model.eval()
        inputs = batch(4)
        found, wanted = step(**inputs), model(**inputs)
        assert not found[0].requires_grad
        close(found[0], wanted[0])
        close(found[1], wanted[1])
        assert_same_state(step, model)
    assert len(step.programs.kept()) == 3


def test_no_grad_in_training_mode_updates_statistics_and_leaves_gradients_alone() -> None:
    model = Normed()
    step = compiled(model, batch())
    inputs = batch()
    for disabled in (torch.no_grad, torch.inference_mode):
        with disabled():
            found, wanted = step(**inputs), model(**inputs)
        close(found[0].clone(), wanted[0].clone())
    assert not torch.equal(model.get_buffer("norm.running_mean"), torch.zeros(8, dtype=F64))
    assert_same_state(step, model)
    assert all(parameter.grad is None for parameter in step.parameters())


def test_frozen_batch_norm_and_parameters_are_frozen() -> None:
    model = Normed()
    step = compiled(model, batch())
    for module in (step, model):
        module.get_submodule("norm").eval()
        module.get_parameter("up.weight").requires_grad_(False)
    inputs = batch()
    loss, _ = step(**inputs)
    expected, _ = model(**inputs)
    expected.backward()
    close(loss, expected)
    assert_same_state(step, model)
    for module in (step, model):
        module.get_parameter("up.weight").requires_grad_(True)
    inputs = batch()
    step(**inputs)
    model(**inputs)[0].backward()
    assert_same_state(step, model)


def test_another_sequence_length_runs_on_the_same_shards_as_eager() -> None:
    example = build_example("gpt:layers=1,hidden=16,heads=2,vocab=32,seq=8,batch=4", dtype=F64)
    model, inputs = example.module, example.kwargs
    step = compiled(model, inputs)
    both = optimizers([step, model])
    for seq in (8, 5, 8):
        for optimizer in both:
            optimizer.zero_grad()
        short = {name: tensor[:, :seq].contiguous() for name, tensor in inputs.items()}
        expected = model(**short)
        expected.backward()
        close(step(**short), expected)
        for optimizer in both:
            optimizer.step()
    assert_same_state(step, model)
    by_program = [
        {key: bound.shardings[key] for key in bound.state_shardings}
        for _, bound in step.programs.kept()
    ]
    assert len(by_program) == 2
    assert any(not sharding.is_replicated for sharding in by_program[0].values())
    assert by_program[0] == by_program[1]


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "tensor=2", "sequence_parallel": True},
        {
            "mesh": "data=2",
            "plan": {"h.*.weight": '[{"data"}, {}]', "wte.weight": '[{"data"}, {}]'},
        },
    ],
    ids=["sequence-parallel", "stored in shards"],
)
def test_plan_made_for_one_shape_is_followed_for_others(options: dict[str, Any]) -> None:
    example = build_example("gpt:layers=1,hidden=16,heads=2,vocab=32,seq=8,batch=4", dtype=F64)
    model, inputs = example.module, example.kwargs
    step = compiled(model, inputs, **options)
    for rows, seq in ((4, 8), (3, 5)):
        cut = {name: tensor[:rows, :seq].contiguous() for name, tensor in inputs.items()}
        model.zero_grad()
        step.zero_grad()
        expected = model(**cut)
        expected.backward()
        close(step(**cut), expected)
        assert_same_state(step, model)
    step.eval()
    close(step(**cut), expected)
    wanted = {k: s for k, s in step.shardings.items() if not s.is_replicated}
    for _, bound in step.programs.kept():
        assert {k: s for k, s in bound.state_shardings.items() if not s.is_replicated} == wanted


def test_plan_with_sub_batches_takes_a_batch_that_does_not_split() -> None:
    model = Normed()
    inputs = {name: '[{"data"}, {}]' for name in batch()}
    plan = sw.Plan(mesh={"data": 2}, inputs=inputs, batch_split=2, recompute="layer")
    step = compiled(model, batch(), mesh=None, plan=plan)
    for rows in (8, 6):
        given = batch(rows)
        model.zero_grad()
        step.zero_grad()
        loss, _ = step(**given)
        expected, _ = model(**given)
        expected.backward()
        close(loss, expected)
        assert_same_state(step, model)
    assert any("do not divide by 2" in note for note in step.notes)


def test_compiling_says_so_with_the_time_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardweave")
    step = compiled(Normed(), batch())
    assert caplog.messages == []
    step(**batch(6))
    step.eval()
    step(**batch(6))
    step(**batch(6))
    first, second = caplog.messages
    assert first.startswith("shardweave: compiled a program for training in ")
    assert first.endswith(
        "x is (6, 4) float64, was (8, 4) float64, y is (6, 4) float64, was (8, 4) float64"
    )
    assert "for evaluation in" in second
    assert "the first call in this mode" in second


def test_program_compiled_ahead_is_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardweave")
    step = compiled(Normed(), batch())
    step.compile_for(**batch(4), train=False)
    step.compile_for(**batch(4), grad=False)
    assert len(caplog.messages) == 2
    assert step.training
    with torch.no_grad():
        step(**batch(4))
    step.eval()
    step(**batch(4))
    assert len(caplog.messages) == 2


def test_programs_are_kept_in_a_bounded_cache() -> None:
    step = compiled(Normed(), batch(), max_programs=2)
    for rows in (2, 4, 8):
        step(**batch(rows))
    kept = [name for name, _ in step.programs.kept()]
    assert len(kept) == 2
    assert "x (4, 4)" in kept[0]
    assert "x (8, 4)" in kept[1]


def test_another_shape_is_refused_where_that_is_asked_for() -> None:
    step = compiled(Normed(), batch(), dynamic=False)
    with pytest.raises(
        ValueError, match=r"compiled with dynamic=False for x \(8, 4\).* this call .*x \(6, 4\)"
    ):
        step(**batch(6))
    step.compile_for(**batch(6))
    step(**batch(6))
    step.eval()
    step(**batch(6))


def test_model_in_evaluation_mode_makes_a_step_in_evaluation_mode_that_says_so() -> None:
    model = Normed().eval()
    with pytest.warns(sw.PlanNote, match=r"in evaluation mode.*call step\.train\(\) to train"):
        step = compiled(model, batch())
    assert not step.training
    step(**batch())
    assert all(parameter.grad is None for parameter in step.parameters())
    step.train()
    step(**batch())
    assert all(parameter.grad is not None for parameter in step.parameters())
    assert not model.training


class TwoHeads(nn.Module):
    """Reads another parameter and another buffer in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4, dtype=F64)
        self.head = nn.Linear(4, 4, dtype=F64)
        self.register_buffer("shift", torch.arange(4.0, dtype=F64))

    def forward(self, x: Tensor, scale: float = 1.0, extra: dict[str, Tensor] | None = None) -> Any:
        y = self.body(x) * scale
        if extra is not None:
            y = y + extra["bias"]
        if not self.training:
            return {"logits": self.head(y) + self.shift}
        return {"loss": y.square().mean(), "logits": y}


def test_what_only_evaluation_reads_is_shared_too() -> None:
    model = TwoHeads()
    x = torch.randn(4, 4, dtype=F64)
    step = compiled(model, {"x": x}, plan={"body.weight": '[{"tensor"}, {}]'})
    step(x)
    step.eval()
    model.eval()
    with torch.no_grad():
        for module in (step, model):
            module.get_parameter("head.weight").mul_(2)
    close(step(x)["logits"], model(x)["logits"])


def test_constants_and_nested_arguments_are_part_of_the_form() -> None:
    model = TwoHeads()
    x = torch.randn(4, 4, dtype=F64)
    step = compiled(model, {"x": x})
    bias = torch.randn(4, dtype=F64)
    for kwargs in ({}, {"scale": 2.0}, {"extra": {"bias": bias}}, {"scale": 3.0, "extra": None}):
        close(step(x, **kwargs)["loss"], model(x, **kwargs)["loss"])
    assert len(step.programs.kept()) == 4
    step(x, scale=2)
    assert len(step.programs.kept()) == 5
    with pytest.raises(ValueError, match="argument 'scale' is a object; pass tensors, numbers"):
        step(x, scale=object())


def test_shared_modules_are_one_module() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    net.append(net[0])
    model = _Summed(net).double()
    inputs = {"x": torch.randn(8, 4, dtype=F64)}
    step = compiled(model, inputs)
    assert step.get_submodule("net.0") is step.get_submodule("net.2")
    close(step(**inputs), model(**inputs))
    step.get_submodule("net.2").eval()
    model.net.get_submodule("2").eval()
    close(step(**inputs), model(**inputs))
    model.zero_grad()
    step.zero_grad()
    assert_same_state(step, model)


class _Summed(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().sum()


def test_module_of_a_compiled_model_computes_by_itself() -> None:
    model = Normed()
    step = compiled(model, batch())
    x = torch.ones(1, 4, dtype=torch.float64)
    close(step.get_submodule("up")(x), model.up(x))
