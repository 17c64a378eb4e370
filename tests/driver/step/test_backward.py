"""Gradients that arrive at `backward()`: loops written for plain PyTorch, beside eager ones."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardweave as sw
from shardweave.tests.driver.step.loops import STEPS, Net, WithLoss, batch
from shardweave.tests.spawn import run_ranks

MESHES = [("data=2", 0), ("tensor=2", 0), ("data=2,tensor=2", 3), ("stage=2", 0)]


def criterion_outside(model: Any, number: int) -> Tensor:
    x, y = batch(number)
    loss = F.mse_loss(model(x)[0], y)
    loss.backward()
    return loss


def two_calls_before_one_backward(model: Any, number: int) -> Tensor:
    x, y = batch(number)
    loss = F.cosine_embedding_loss(model(x)[1], model(x * 2)[1], torch.ones(8)) + y.mean()
    loss.backward()
    return loss


def accumulation(model: Any, number: int) -> Tensor:
    for part in range(2):
        x, y = batch(2 * number + part)
        loss = F.mse_loss(model(x)[0], y) / 2
        loss.backward()
    return loss


def another_output_each_time(model: Any, number: int) -> Tensor:
    x, y = batch(number)
    logits, features = model(x)
    loss = F.mse_loss(logits, y) if number % 2 else features.square().mean()
    loss.backward()
    return loss


def graph_that_is_kept(model: Any, number: int) -> Tensor:
    x, y = batch(number)
    loss = F.mse_loss(model(x)[0], y)
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    return loss


def gradient_of_inputs(model: Any, number: int) -> Tensor:
    x, y = batch(number)
    x.requires_grad_()
    loss = F.mse_loss(model(x)[0], y)
    loss.backward()
    assert x.grad is not None
    return loss + x.grad.sum().detach()


def scaled_loss_of_the_model(model: Any, number: int) -> Tensor:
    loss = model(*batch(number))
    (3 * loss).backward()
    return loss


LOOPS: list[tuple[type[nn.Module], Callable[[Any, int], Tensor]]] = [
    (Net, criterion_outside),
    (Net, two_calls_before_one_backward),
    (Net, accumulation),
    (Net, another_output_each_time),
    (Net, graph_that_is_kept),
    (Net, gradient_of_inputs),
    (WithLoss, scaled_loss_of_the_model),
]


def losses(model: nn.Module, loop: Callable[[Any, int], Tensor]) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    values: list[float] = []
    for number in range(STEPS):
        optimizer.zero_grad()
        values.append(loop(model, number).item())
        optimizer.step()
    return values


def example_of(kind: type[nn.Module], *, is_of_inputs: bool = False) -> tuple[Tensor, ...]:
    x, y = batch(0)
    return (x, y) if kind is WithLoss else (x.requires_grad_(is_of_inputs),)


@pytest.mark.parametrize(("mesh", "zero"), MESHES)
@pytest.mark.parametrize(("kind", "loop"), LOOPS)
def test_loop_trains_as_in_eager(
    kind: type[nn.Module], loop: Callable[[Any, int], Tensor], mesh: str, zero: int
) -> None:
    torch.manual_seed(0)
    model = kind().double()
    eager = copy.deepcopy(model)
    example = example_of(kind, is_of_inputs=loop is gradient_of_inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = sw.compile(
            model, example, mesh=mesh, zero=zero, backend="reference", backward="autograd"
        )
        assert losses(step, loop) == pytest.approx(losses(eager, loop), rel=1e-9)
    for name, parameter in eager.named_parameters():
        trained = sw.full_tensor(step.get_parameter(name))
        assert torch.allclose(trained, parameter, rtol=1e-9, atol=1e-12), name


def test_second_backward_of_a_freed_graph_is_refused() -> None:
    step = sw.compile(
        Net().double(), example_of(Net), mesh="data=2", backend="reference", backward="autograd"
    )
    loss = step(batch(0)[0])[0].sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_processes_train_as_in_eager() -> None:
    run_ranks(_train, 2)


def _train() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Net().double()
    eager = copy.deepcopy(model)
    step = sw.compile(model, example_of(Net), mesh="data=2", zero=3, backward="autograd")
    assert losses(step, criterion_outside) == pytest.approx(losses(eager, criterion_outside))


@pytest.mark.parametrize("zero", [0, 3])
def test_parameters_that_changed_since_the_call_are_refused_or_not_read(zero: int) -> None:
    model = Net().double()
    eager = copy.deepcopy(model)
    step = sw.compile(
        model, example_of(Net), mesh="data=2", zero=zero, backend="reference", backward="autograd"
    )
    optimizer = torch.optim.SGD(step.parameters(), 0.1)
    step(batch(0)[0])[0].sum().backward()
    loss = step(batch(1)[0])[0].sum()
    optimizer.step()
    optimizer.zero_grad()
    if zero == 0:
        with pytest.raises(RuntimeError, match=r"Run backward\(\) before optimizer\.step\(\)"):
            loss.backward()
        return
    loss.backward()  # reads what the call gathered
    eager(batch(1)[0])[0].sum().backward()
    for name, parameter in eager.named_parameters():
        gradient = step.get_parameter(name).grad
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.allclose(sw.full_tensor(gradient), parameter.grad, rtol=1e-9)


@pytest.mark.parametrize("mesh", ["data=2", "data=2,tensor=2"])
def test_sum_of_a_loss_travels_apart_from_gradients(mesh: str) -> None:
    model = WithLoss().double()
    eager, given = copy.deepcopy(model), example_of(WithLoss)
    step = sw.compile(model, given, mesh=mesh, backend="reference")
    loss = step(*given)
    assert all(p.grad is None for p in step.parameters())
    assert sw.Step.of(step).bound.parts is not None
    (3.0 * loss).backward()
    (3.0 * eager(*given)).backward()
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(step.get_parameter(name).grad, parameter.grad)


def test_step_says_where_its_gradients_are_computed() -> None:
    made = []
    for kind in (Net, WithLoss):
        step = sw.compile(
            kind().double(),
            example_of(kind),
            mesh="stage=2",
            backend="reference",
            backward="autograd",
        )
        step(*example_of(kind))
        made.append([note for note in step.notes if "backward" in note])
    assert "runs the forward pass again" in made[0][0]
    assert "computed in the call" in made[1][0]


def test_unknown_ways_are_refused() -> None:
    with pytest.raises(ValueError, match="backward='late' is unknown; use one of in_call"):
        sw.compile(Net(), (torch.ones(8, 8),), mesh="data=2", backward="late")


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_trace_of_a_profiler_has_ranges_of_layers_forward_and_backward() -> None:
    model = sw.compile(WithLoss(), batch(0))
    with torch.profiler.profile() as profile:
        model(*batch(1)).backward()
    names = {event.key for event in profile.key_averages()}
    assert {"shardweave: forward", "shardweave: backward"} <= names
    assert {"net.second, forward", "net.first, backward"} <= names
