"""Hooks: those that change gradients are part of the step, those that cannot be are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from shardweave.ir.capture.capture import CaptureError, capture
from shardweave.tests.eager import assert_three_steps_equal_eager, rows


class Net(nn.Module):
    """Two linear maps and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, dtype=torch.float64)
        self.b = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).square().sum()


class Scaling:
    """A hook with a number of its own."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.calls = 0

    def scaled(self, grad: Tensor) -> Tensor:
        return grad * self.factor

    def counted(self, grad: Tensor) -> Tensor:
        self.calls += 1
        return grad * self.calls


def _doubled_in_place(grad: Tensor) -> None:
    grad.mul_(2)


def _scaled(factor: float, grad: Tensor) -> Tensor:
    return grad * factor


def _normed(grad: Tensor) -> Tensor:
    return grad / (grad.norm() + 1e-6)


def _on_weight(*hooks: Callable[[Tensor], Tensor | None]) -> Callable[[Net], None]:
    def register(net: Net) -> None:
        for hook in hooks:
            net.a.weight.register_hook(hook)

    return register


def _masked(net: Net) -> None:
    net.a.weight.register_hook(lambda grad: grad * net.mask + 0.1 * net.b.weight.detach())


def _tied(net: Net) -> None:
    net.b.weight = net.a.weight
    net.a.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))


def _removed(net: Net) -> None:
    net.a.weight.register_hook(lambda grad: grad * 2).remove()


@pytest.mark.parametrize(
    "register",
    [
        _on_weight(lambda grad: grad * 2),
        _on_weight(lambda grad: None),
        _on_weight(_doubled_in_place),
        _on_weight(lambda grad: grad * 2, lambda grad: grad.clamp(-0.1, 0.1)),
        _on_weight(Scaling(3.0).scaled, partial(_scaled, 0.5)),
        _masked,
        _tied,
        _removed,
        lambda net: net.a.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,)),
        lambda net: net.a.register_forward_hook(lambda module, inputs, output: output * 2),
        lambda net: net.register_forward_hook(lambda module, inputs, output: output * 2),
        lambda net: net.register_state_dict_post_hook(lambda *args: None),
    ],
    ids=[
        "scaled", "nothing", "in-place", "two", "method-and-partial", "reads-buffer-and-parameter",
        "tied", "removed", "forward-pre", "forward", "forward-root", "state-dict",
    ],
)  # fmt: skip
def test_hooks_do_to_gradients_what_they_do_in_eager(register: Callable[[Net], Any]) -> None:
    net = Net()
    register(net)
    assert_three_steps_equal_eager(net)


@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "data=4"])
def test_hook_sees_the_gradient_of_the_whole_batch(mesh: str) -> None:
    net = Net()
    for parameter in net.parameters():
        parameter.register_hook(_normed)
    assert_three_steps_equal_eager(net, mesh=mesh)


def test_hook_on_an_activation_is_part_of_the_step() -> None:
    class Hooked(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x)
            hidden.register_hook(lambda grad: grad * 2)
            return self.b(torch.tanh(hidden)).square().sum()

    assert_three_steps_equal_eager(Hooked())


_CALLS: list[int] = []


def _appending(grad: Tensor) -> Tensor:
    _CALLS.append(1)
    return grad * len(_CALLS)


_GLOBAL = torch.ones(4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("register", "expected"),
    [
        (
            lambda net: net.a.register_full_backward_hook(lambda *args: None),
            r"^module 'a' \(test_hooks\.py:.*backward hook of a module .*register_hook",
        ),
        (
            lambda net: net.register_full_backward_pre_hook(lambda *args: None),
            r"^the model \(test_hooks\.py:.*backward hook of a module",
        ),
        (_on_weight(_appending), r"`_CALLS\.append\(1\)`\): forward changes `_CALLS`"),
        (_on_weight(Scaling(1.0).counted), r"`self\.calls \+= 1`\): forward changes"),
        (
            _on_weight(lambda grad: grad if grad.norm() < 1 else grad * 0),
            r"\(test_hooks\.py:.*Data-dependent branching.*torch\.where",
        ),
        (_on_weight(lambda grad: grad * _GLOBAL), "a tensor from outside the model"),
    ],
    ids=["backward", "backward-pre", "list", "object", "branch", "global"],
)
def test_hook_that_a_program_cannot_run_is_refused_with_its_line(
    register: Callable[[Net], Any], expected: str
) -> None:
    net = Net()
    register(net)
    with pytest.raises(CaptureError, match=expected):
        capture(net, rows())


def test_hook_that_forward_registers_anew_each_time_is_refused() -> None:
    class Hooking(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.a.weight.register_hook(lambda grad: grad * 2)
            return self.a(x).sum()

    with pytest.raises(
        CaptureError, match=r"registers a hook on 'a\.weight' each time that it runs"
    ):
        capture(Hooking(), rows())


def test_hook_of_all_modules_is_refused() -> None:
    handle = module_hooks.register_module_forward_hook(lambda module, inputs, output: None)
    try:
        with pytest.raises(CaptureError, match=r"\(test_hooks\.py:.*a global hook"):
            capture(Net(), rows())
    finally:
        handle.remove()
