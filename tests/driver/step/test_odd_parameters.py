"""Parameters that a step meets in odd ways: later, never, without rows, or on one process alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.passes.notes import PlanNote
from shardweave.tests.compiled import compile_copy

F64 = torch.float64


class _Heads(nn.Module):
    """Two heads, one of which a call uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8, dtype=F64)
        self.heads = nn.ModuleDict({n: nn.Linear(8, k, dtype=F64) for n, k in (("a", 3), ("b", 4))})

    def forward(self, x: Tensor, task: str) -> Tensor:
        return self.heads[task](self.body(x).relu()).square().mean()


def test_parameters_that_a_later_call_uses_first_have_eagers_gradients_under_zero() -> None:
    model, x = _Heads(), torch.randn(8, 6, dtype=F64)
    eager = copy.deepcopy(model)
    step = compile_copy(model, (x, "a"), mesh="data=2", zero=3, backend="reference")
    ours, theirs = (torch.optim.AdamW(m.parameters(), 0.1) for m in (step, eager))
    for task in "abba":
        ours.zero_grad()
        theirs.zero_grad()
        loss = eager(x, task)
        torch.testing.assert_close(step(x, task).detach(), loss.detach())
        loss.backward()
        ours.step()
        theirs.step()
    for name, value in step.full_state_dict().items():
        torch.testing.assert_close(value, eager.state_dict()[name])


class _Prompt(nn.Module):
    """A parameter without rows, beside a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=F64)
        self.none = nn.Parameter(torch.empty(0, 6, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.none, self.linear(x)]).square().mean()


@pytest.mark.parametrize("mesh", ["data=2", "data=4", "data=2,tensor=2"])
def test_parameter_without_elements_is_not_divided(mesh: str) -> None:
    model, x = _Prompt(), torch.randn(8, 6, dtype=F64)
    eager = copy.deepcopy(model)
    step = compile_copy(model, (x,), mesh=mesh, zero=3, backend="reference")
    loss = eager(x)
    torch.testing.assert_close(step(x).detach(), loss.detach())
    loss.backward()
    assert step.full_gradients()["none"].shape == (0, 6)
    torch.testing.assert_close(step.full_gradients()["linear.weight"], eager.linear.weight.grad)


@pytest.mark.parametrize("mesh", ["data=1", "tensor=1"])
def test_zero_on_one_process_is_a_note(mesh: str) -> None:
    model, x = _Prompt(), torch.randn(2, 6, dtype=F64)
    with pytest.warns(PlanNote, match="zero=3 divides nothing: the mesh .* has one replica"):
        step = compile_copy(model, (x,), mesh=mesh, zero=3, backend="reference")
    torch.testing.assert_close(step(x).detach(), model(x).detach())


class _Convolution(nn.Module):
    """Attention whose queries, keys and values are one convolution of size 1."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Conv2d(8, 12 * heads, 1, bias=False, dtype=F64)
        self.out = nn.Conv2d(4 * heads, 8, 1, bias=False, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        parts = self.qkv(x).reshape(n, 3, self.heads, 4, -1).permute(1, 0, 2, 4, 3).unbind(0)
        mixed = F.scaled_dot_product_attention(*(part.contiguous() for part in parts))
        return self.out(mixed.permute(0, 1, 3, 2).reshape(n, -1, h, w)).square().mean()


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_fused_projection_by_a_convolution_is_planned_for_any_number_of_heads(heads: int) -> None:
    model, x = _Convolution(heads), torch.randn(4, 8, 2, 2, dtype=F64)
    eager = copy.deepcopy(model)
    step = compile_copy(model, (x,), mesh="tensor=2", backend="reference")
    loss = eager(x)
    loss.backward()
    torch.testing.assert_close(step(x).detach(), loss.detach())
    torch.testing.assert_close(step.full_gradients()["qkv.weight"], eager.qkv.weight.grad)


class _NoRows(nn.Module):
    """A linear map of a batch, and of none of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean() + self.linear(x[:0]).sum()


def test_slice_without_rows_is_planned_and_exact() -> None:
    model, x = _NoRows(), torch.randn(8, 6, dtype=F64)
    step = compile_copy(model, (x,), mesh="tensor=2", backend="reference")
    torch.testing.assert_close(step(x).detach(), model(x).detach())
