"""Gradients of inputs go to the inputs, as in eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardweave.ir.capture.capture import capture
from shardweave.tests.compiled import compile_copy, step_of_copy

F64 = torch.float64


class Scaled(nn.Module):
    """A linear map of the sum of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=F64)

    def forward(self, x: Tensor, offset: Tensor) -> Tensor:
        return self.linear(x + offset).square().mean()


def inputs() -> tuple[Tensor, Tensor]:
    """The first requires a gradient."""
    return torch.randn(4, 4, dtype=F64, requires_grad=True), torch.randn(4, 4, dtype=F64)


@pytest.mark.parametrize(
    ("backend", "mesh"), [("reference", "data=2,tensor=2"), ("distributed", "")]
)
def test_gradients_of_inputs_are_added_to_theirs(backend: str, mesh: str) -> None:
    model = Scaled()
    step = compile_copy(model, inputs(), mesh=mesh or None, backend=backend)
    for _ in range(2):
        ours, other = inputs()
        eagers = ours.detach().clone().requires_grad_()
        for _ in range(2):
            loss = step(ours, other)
            expected = model(eagers, other)
            expected.backward()
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        assert other.grad is None
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, eagers.grad, rtol=1e-12, atol=1e-15)


def test_input_that_requires_a_gradient_only_later_gets_it() -> None:
    x, offset = inputs()
    model = Scaled()
    step = compile_copy(model, (x.detach(), offset), backend="reference")
    step(x.detach(), offset)
    step(x, offset)
    eagers = x.detach().clone().requires_grad_()
    model(eagers, offset).backward()
    torch.testing.assert_close(x.grad, eagers.grad, rtol=1e-12, atol=1e-15)


def test_given_program_without_the_gradient_of_an_input_refuses_one_that_requires_it() -> None:
    x, offset = inputs()
    model = Scaled()
    step = step_of_copy(capture(model, (x.detach(), offset)), model)
    with pytest.raises(ValueError, match="input 'x' requires a gradient, but the example"):
        step(x, offset)


def test_backward_goes_on_into_what_made_the_inputs() -> None:
    """As into a generator in front of a discriminator, through two inputs that share a graph."""

    def front() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(4, 4, dtype=F64)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4, dtype=F64)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return (self.fc(a) * b).square().mean()

    x, model = torch.randn(4, 4, dtype=F64), Both()
    step = compile_copy(model, (x, x), mesh="data=2", backend="reference")
    ours, theirs = front(), front()
    hidden = ours(x)
    step(hidden, hidden.sin(), loss_scale=2.0)
    hidden = theirs(x)
    (2 * model(hidden, hidden.sin())).backward()
    for own, parameter in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, parameter.grad, rtol=1e-12, atol=1e-14)
