"""Hooks that step and free each gradient, as in PyTorch's tutorial of optimizers in backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardweave.driver.step.step import Step
from shardweave.tests.compiled import compile_copy
from shardweave.tests.counted import Counted
from shardweave.tests.spawn import run_ranks

F64 = torch.float64


class Deep(nn.Module):
    """Equal layers, of which the first and the last share their weight, with a small batch."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=F64) for _ in range(layers))
        self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def hook_all(model: nn.Module) -> list[str]:
    """Let each parameter be stepped and freed in backward; returns the names in their order."""
    names: list[str] = []
    for name, parameter in model.named_parameters():
        optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.5, foreach=False)

        def update(p: Tensor, name: str = name, optimizer: Any = optimizer) -> None:
            names.append(name)
            optimizer.step()
            p.grad = None

        parameter.register_post_accumulate_grad_hook(update)
    return names


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(step: nn.Module, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        ours = whole(step.get_parameter(name).detach())
        torch.testing.assert_close(ours, parameter.detach(), rtol=1e-9, atol=1e-12, msg=name)


def batch(width: int, number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, width, dtype=F64, generator=generator)


def trained(
    layers: int,
    width: int,
    run: Callable[[nn.Module, Tensor], Any],
    measured: int = 1,
    **options: Any,
) -> tuple[int, list[str]]:
    """Train a compiled model and its eager copy, compare them; returns the most bytes that live at
    once in a compiled step, the least of the `measured` last steps, and the order of its hooks."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Deep(layers, width)
    step = compile_copy(model, (batch(width),), **options)
    order, _ = hook_all(step), hook_all(model)
    for number in range(2):
        run(step, batch(width, number))
        run(model, batch(width, number))
    peaks: list[int] = []
    for number in range(2, 2 + measured):
        order.clear()
        with Counted() as counted:
            run(step, batch(width, number))
        run(model, batch(width, number))
        peaks.append(counted.most)
    assert_same(step, model)
    return min(peaks), order


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).backward()


def in_call(model: nn.Module, x: Tensor) -> None:
    loss = model(x)
    if type(model) is Deep:
        loss.backward()


def twice(model: nn.Module, x: Tensor) -> None:
    (model(x) + model(2 * x) + sum(p.square().sum() for p in model.parameters())).backward()


@pytest.mark.parametrize(("run", "how"), [(backward, "autograd"), (in_call, "in_call")])
def test_gradients_are_freed_as_they_arrive(run: Any, how: str) -> None:
    layers, width = 10, 64
    most, order = trained(layers, width, run, backward=how)
    assert order[0] == "layers.9.bias"
    assert order[-1] in ("layers.0.weight", "layers.0.bias")
    assert most < 0.4 * (layers - 1) * width * width * 8


def test_activations_are_freed_during_backward() -> None:
    x = torch.randn(2048, 16, dtype=F64)
    step = compile_copy(Deep(10, 16), (x,), backward="autograd")
    held: list[int] = []
    with Counted() as counted:
        last = step.get_parameter("layers.0.bias")
        last.register_post_accumulate_grad_hook(lambda _: held.append(counted.now))
        loss = step(x)
        kept = counted.now
        loss.backward()
    assert held[0] < 0.4 * kept


@pytest.mark.parametrize("run", [twice, in_call])
@pytest.mark.parametrize("mesh", ["data=2", "data=2,tensor=2"])
def test_hooks_train_as_in_eager_on_a_mesh(run: Any, mesh: str) -> None:
    how = "in_call" if run is in_call else "autograd"
    trained(4, 8, run, mesh=mesh, backend="reference", backward=how)


def test_part_of_a_chain_of_nodes_gives_its_gradients() -> None:
    model = Deep(4, 8)
    step = compile_copy(model, (batch(8),), backward="autograd")
    hook_all(step)
    for retain in (True, False):
        middle = step.get_parameter("layers.2.weight")
        ours = torch.autograd.grad(step(batch(8)), middle, retain_graph=retain)
        theirs = torch.autograd.grad(model(batch(8)), model.get_parameter("layers.2.weight"))
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_graph_is_kept_for_a_second_backward_and_for_gradients_of_gradients() -> None:
    model = Deep(3, 8)
    step = compile_copy(model, (batch(8),), backward="autograd")
    seen: list[str] = []
    for name, parameter in step.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    for each in (step, model):
        loss = each(batch(8))
        loss.backward(retain_graph=True)
        loss.backward()
        slopes = torch.autograd.grad(each(batch(8)), list(each.parameters()), create_graph=True)
        torch.stack([slope.square().sum() for slope in slopes]).sum().backward()
    assert len(seen) == 3 * 5
    for name, parameter in model.named_parameters():
        ours = step.get_parameter(name).grad
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-9, atol=1e-12)


def test_hook_that_changes_a_parameter_too_early_is_refused() -> None:
    step = compile_copy(Deep(4, 8), (batch(8),), backward="autograd")
    early = step.get_parameter("layers.1.weight")

    def change(_: Tensor) -> None:
        with torch.no_grad():
            early.mul_(0.5)

    step.get_parameter("layers.2.bias").register_post_accumulate_grad_hook(change)
    early.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(RuntimeError, match=r"changed parameter 'layers.1.weight' before"):
        step(batch(8)).backward()


@pytest.mark.parametrize("mesh", ["stage=2", "data=2"])
def test_step_says_where_hooks_run_after_the_whole_backward_pass(mesh: str) -> None:
    step = compile_copy(
        Deep(4, 8), (batch(8),), mesh=mesh, backend="reference", backward="autograd"
    )
    hook_all(step)
    with nullcontext() if mesh == "stage=2" else step.no_sync():
        step(batch(8)).backward()
    assert any("run after the whole backward pass" in note for note in Step.of(step).notes)


def on_ranks(zero: int) -> int:
    # Gloo's thread lets go of a message at its own time, so one step may hold a gradient more.
    options = {"mesh": "data=2", "zero": zero, "backward": "autograd"}
    return trained(8, 512, backward, measured=8, **options)[0]


@pytest.mark.parametrize("zero", [0, 3])
def test_processes_hold_few_gradients_at_once(zero: int) -> None:
    assert max(run_ranks(on_ranks, 2, zero)) < 0.6 * 7 * 512 * 512 * 8
