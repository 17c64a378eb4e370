"""Float8 products as torchao writes them: scales by the largest number of a tensor or of each row,
bfloat16 or float32 results, gradients in another kind of float8."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.passes.notes import PlanNote
from shardweave.planners.cost.model import CostModel
from shardweave.planners.cost.presets import find_cluster
from shardweave.tests.torch_versions import new_torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _in_float8(x: Tensor, dtype: torch.dtype, dims: int | None) -> tuple[Tensor, Tensor]:
    """A matrix in float8, and what its numbers are times; `dims` gives each its own."""
    largest = x.abs().max() if dims is None else x.abs().amax(dims, keepdim=True)
    limit = torch.finfo(dtype).max
    scale = limit / largest.clamp(min=1e-12)
    return (x * scale).clamp(-limit, limit).to(dtype), scale.reciprocal().float()


BY_ROW = new_torch("CPUs multiply float8 with one scale for a tensor alone", (2, 12))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_row = by_row
        return _scaled(x, E4M3, weight.t(), E4M3, by_row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        to_input = _scaled(grad, E5M2, weight, E4M3, ctx.by_row)
        return to_input, _scaled(grad.t(), E5M2, x, E4M3, ctx.by_row), None


def _scaled(
    left: Tensor, left_dtype: torch.dtype, right: Tensor, right_dtype: torch.dtype, by_row: bool
) -> Tensor:
    left, left_scale = _in_float8(left, left_dtype, 1 if by_row else None)
    right, right_scale = _in_float8(right, right_dtype, 0 if by_row else None)
    dense = right.t().contiguous().t()
    return torch.ops.aten._scaled_mm.default(
        left.contiguous(), dense, left_scale, right_scale, out_dtype=torch.float32
    )


class Float8Linear(nn.Linear):
    by_row = False

    def forward(self, x: Tensor) -> Tensor:
        product = _Product.apply(x, self.weight, self.by_row)
        return product if self.bias is None else product + self.bias


class Network(nn.Module):
    def __init__(self, by_row: bool) -> None:
        super().__init__()
        self.up, self.down = Float8Linear(32, 64, bias=False), Float8Linear(64, 32)
        self.up.by_row = self.down.by_row = by_row

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


@pytest.mark.parametrize("by_row", [False, pytest.param(True, marks=BY_ROW)])
@pytest.mark.parametrize("mesh", ["data=2", "tensor=2", "data=2,tensor=2"])
def test_scales_are_those_of_all_shards_and_products_run_on_shards(mesh: str, by_row: bool) -> None:
    torch.manual_seed(0)
    model, x = Network(by_row), torch.randn(16, 32)
    eager = copy.deepcopy(model)
    expected = eager(x)
    expected.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanNote)
        step = sw.compile(model, (x,), mesh=mesh, backend="reference", zero=0)
    loss = step(x)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    for (name, parameter), other in zip(eager.named_parameters(), step.parameters(), strict=True):
        found, wanted = sw.full_tensor(other.grad), parameter.grad
        assert wanted is not None
        assert wanted.norm() > 0
        # A number that is rounded the other way in float8 would be seen.
        assert (found - wanted).norm() <= 1e-5 * wanted.norm(), name


def test_text_with_float8_is_read_back() -> None:
    text = str(sw.capture(Network(by_row=False), (torch.randn(16, 32),)))
    assert {"f8E4M3FN", "f8E5M2"} <= set(re.findall(r"f8E\w+", text))
    assert str(sw.parse(text)) == text


def test_products_in_float8_have_the_peak_of_float8() -> None:
    program = sw.capture(Network(by_row=False), (torch.randn(16, 32),))
    product = next(op for op in program.ops if op.name == "aten._scaled_mm")
    assert CostModel(find_cluster("h100-pod")).op_time_s(product) > 0
    with pytest.raises(ValueError, match="has no peak FLOP/s for that dtype"):
        CostModel(find_cluster("dgx-a100")).op_time_s(product)
