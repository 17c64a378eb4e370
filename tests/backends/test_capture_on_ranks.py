"""Assigned buffers, hooks, gradients of inputs and indices out of range, on real processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardweave as sw
from shardweave.tests.spawn import run_ranks

F64 = torch.float64
ROWS = 8


class Smoothed(nn.Module):
    """A table and a linear map whose gradient is clamped, scaled by an average of what they gave."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, 4, dtype=F64)
        self.linear = nn.Linear(4, 4, dtype=F64)
        self.register_buffer("average", torch.ones(4, dtype=F64))
        self.linear.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))

    def forward(self, ids: Tensor, offset: Tensor) -> Tensor:
        y = self.linear(self.table(ids) + offset)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean((0, 1))
        return (y * self.average).square().mean()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, ROWS, (4, 3), generator=generator)
    return ids, torch.randn(4, 3, 4, dtype=F64, generator=generator).requires_grad_()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def three_steps(mesh: str) -> list[dict[str, Tensor]]:
    """What each step gives: loss, gradients, that of the input, and the buffer."""
    plan = {"table.weight": '[{"tensor"}, {}]'} if "tensor" in mesh else None
    step = sw.compile(Smoothed(), batch(0), mesh=mesh, plan=plan, backward="in_call")
    found: list[dict[str, Tensor]] = []
    for number in range(3):
        ids, offset = batch(number)
        step.zero_grad()
        loss = step(ids, offset)
        grads = {n: whole(p.grad) for n, p in step.named_parameters() if p.grad is not None}
        buffers = {n: whole(b).clone() for n, b in step.named_buffers()}
        assert offset.grad is not None
        found.append({"loss": whole(loss), "offset": whole(offset.grad)} | grads | buffers)
    if "tensor" in mesh:
        ids, offset = batch(0)
        ids[0, 0] = ROWS
        with pytest.raises((IndexError, RuntimeError), match="out of range"):
            step(ids, offset)
    return found


@pytest.mark.parametrize("mesh", ["data=2", "tensor=2"])
def test_captured_state_hooks_and_gradients_of_inputs_equal_eager(mesh: str) -> None:
    by_rank = run_ranks(three_steps, 2, mesh)
    model = Smoothed()
    for number in range(3):
        ids, offset = batch(number)
        model.zero_grad()
        loss = model(ids, offset)
        loss.backward()
        assert offset.grad is not None
        expected = {"loss": loss.detach(), "offset": offset.grad, "average": model.average}
        expected |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for found in by_rank:
            assert set(found[number]) == set(expected)
            for name, tensor in expected.items():
                torch.testing.assert_close(
                    found[number][name], tensor, rtol=1e-9, atol=1e-12, msg=f"{number} {name}"
                )
