"""Hooks of users around an optimizer's step, and steps that raise an error, as in eager."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardweave.backends.distributed.distributed import DistributedBackend
from shardweave.backends.distributed.in_flight import InFlight, start_copy
from shardweave.backends.optimizers import hook
from shardweave.backends.optimizers.host_states import HostStates
from shardweave.backends.optimizers.shards import full_copy
from shardweave.ir.capture.update import streams
from shardweave.tests.compiled import compile_copy
from shardweave.tests.spawn import run_ranks

CPU = torch.device("cpu")
NUM_PARAMETERS = 6


class Work:
    """A copy's handle, which knows whether the host has waited for it."""

    is_synchronized = False

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        self.is_synchronized = True


class OnHost:
    """Copies from host to host, with a handle for each; counted."""

    device = CPU

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.num_to_device = 0

    def start_to_host(self, x: Tensor, into: Tensor | None = None) -> InFlight:
        self.works.append(Work())
        return InFlight(self.works[-1], start_copy(x, CPU, into).wait)

    def start_to_device(self, x: Tensor) -> InFlight:
        self.num_to_device += 1
        return start_copy(x, CPU)


class Failing(SGD):
    """Raises an error in its second step, after the update."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        super().step(closure)
        if self.count == 2:
            raise KeyError("the second step")


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, dtype=torch.float64) for _ in range(NUM_PARAMETERS // 2)]
    return nn.Sequential(*layers)


def on_host(optimizer_class: Any, **settings: Any) -> tuple[nn.Module, Optimizer, OnHost]:
    """A model on one device, and an optimizer whose states the host keeps."""
    model, copies = net(), OnHost()
    hook.keep_states_on_host(model.parameters(), copies)
    return model, optimizer_class(model.parameters(), **settings), copies


def add_gradients(model: nn.Module, *, runs_backward: bool = True) -> None:
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)
    out = model(x)
    loss = out.square().mean() if isinstance(out, Tensor) and out.ndim else out
    if runs_backward:
        loss.backward()


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


@contextmanager
def hooks_of_all(before: Any, after: Any) -> Iterator[None]:
    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def hooked_steps(
    model: nn.Module, optimizer: Optimizer, *, runs_backward: bool
) -> tuple[list[Tensor], list[str]]:
    """The parameters after three steps with hooks, one of which clips; and what hooks have seen."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    seen: list[str] = []

    def see(when: str) -> None:
        norm = sum(
            full_copy(p.grad).square().sum().item() for p in parameters if p.grad is not None
        )
        weight = sum(full_copy(p).square().sum().item() for p in parameters)
        seen.append(f"{when}: {len(optimizer.state)} states, {norm:.9f}, {weight:.9f}")

    def clip(*_: Any) -> None:
        see("before")
        norm = sum(full_copy(p.grad).square().sum() for p in parameters if p.grad is not None)
        for p in parameters:
            if p.grad is not None:
                p.grad = p.grad * float(0.01 / norm**0.5)

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(lambda *_: see("after"))
    with hooks_of_all(lambda *_: see("first"), lambda *_: see("last")):
        for _ in range(3):
            add_gradients(model, runs_backward=runs_backward)
            optimizer.step()
            optimizer.zero_grad()
    return [full_copy(p) for p in parameters], seen


def check_hooked(pairs: list[tuple[nn.Module, Optimizer, bool]], tolerance: float = 1e-12) -> None:
    (own, seen), (wanted, wanted_seen) = [
        hooked_steps(model, optimizer, runs_backward=runs) for model, optimizer, runs in pairs
    ]
    assert seen == wanted_seen
    for a, b in zip(own, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter is a group."""
    monkeypatch.setattr(streams, "STREAM_BYTES", 1)


def test_hooks_see_all_gradients_and_all_states_of_states_on_the_host() -> None:
    model, optimizer, copies = on_host(SGD, lr=1.0, momentum=0.9)
    eager = net()
    with_eager = eager, SGD(eager.parameters(), lr=1.0, momentum=0.9), True
    check_hooked([(model, optimizer, True), with_eager])
    assert copies.num_to_device == 2 * NUM_PARAMETERS


def hooked_on_ranks(name: str, is_offloaded: bool) -> None:
    streams.STREAM_BYTES = 1
    loss = Loss()
    step = compile_copy(loss, (torch.zeros(4, 8, dtype=torch.float64),), mesh="data=2", zero=3)
    if is_offloaded:
        assert isinstance(step.backend, DistributedBackend)
        hook.keep_states_on_host(step.parameters(), step.backend.runtime)
    made: list[Any] = []
    for model in (step, loss):
        parameters = [p for p in model.parameters() if name != "Muon" or p.ndim == 2]
        optimizer = Muon(parameters, lr=0.1) if name == "Muon" else AdamW(parameters, lr=0.1)
        made.append((model, optimizer, model is loss))
    check_hooked(made, 1e-9)


@pytest.mark.parametrize(("name", "is_offloaded"), [("AdamW", True), ("Muon", False)])
def test_hooks_on_a_mesh_change_gradients_before_any_update(name: str, is_offloaded: bool) -> None:
    run_ranks(hooked_on_ranks, 2, name, is_offloaded)


def test_no_parameter_is_updated_and_no_gradient_lost_if_a_hook_raises() -> None:
    model, optimizer, copies = on_host(SGD, lr=1.0, momentum=0.9)
    calls: list[int] = []

    def refuse(*_: Any) -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise KeyError("the second step")

    optimizer.register_step_pre_hook(refuse)
    add_gradients(model)
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError, match="the second step"):
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    assert copies.num_to_device == NUM_PARAMETERS


def test_states_stream_again_after_a_step_that_raised() -> None:
    model, optimizer, copies = on_host(Failing, lr=1.0, momentum=0.9)
    for number in range(4):
        add_gradients(model)
        if number == 1:
            with pytest.raises(KeyError, match="the second step"):
                optimizer.step()
        else:
            optimizer.step()
        assert all(p.grad is not None for p in model.parameters())
    # In the third step states are on the device already, where the second left them.
    assert copies.num_to_device == 2 * NUM_PARAMETERS
    assert len(copies.works) == 3 * NUM_PARAMETERS


def test_groups_of_parameters_take_time_linear_in_the_parameters() -> None:
    model, optimizer, _ = on_host(SGD, lr=1.0, momentum=0.9)
    add_gradients(model)
    with mock.patch.object(hook, "StandIns", wraps=hook.StandIns) as made:
        optimizer.step()
    assert [len(call.args[1]) for call in made.call_args_list] == [1] * NUM_PARAMETERS
    assert all(len(call.args[0].state) for call in made.call_args_list)


def test_host_waits_for_the_last_copy_where_the_last_group_has_no_states() -> None:
    first, last = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer, copies = SGD([first, last], lr=0.1, momentum=0.9), OnHost()
    first.grad = torch.ones(2)
    optimizer.step()
    host = HostStates(optimizer, [first, last], [[0], [1]], copies)
    for index in range(2):
        host.enter(index)
        host.leave(index)
    host.finish()
    assert [work.is_synchronized for work in copies.works] == [True]
