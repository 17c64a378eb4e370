"""Grouped products and the routing around them, captured as eager computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.backends.reference.reference import run_reference, values_of
from shardweave.driver.checking.check import run_eager
from shardweave.ir.capture.capture import capture

grouped_mm = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]

ENDS = torch.tensor([2, 2, 5, 8], dtype=torch.int32)


@torch.library.custom_op("torchtitan::deterministic_scatter_add", mutates_args=())
def deterministic_scatter_add(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    """As torchtitan registers it."""
    return out.scatter_add(0, index, src)


@deterministic_scatter_add.register_fake
def _(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return torch.empty_like(out)


def _keep_index(ctx: Any, inputs: Any, output: object) -> None:
    ctx.save_for_backward(inputs[1])


def _gradients(ctx: Any, grad: Tensor) -> object:
    (index,) = ctx.saved_tensors
    return grad, None, torch.gather(grad, 0, index)


deterministic_scatter_add.register_autograd(_gradients, setup_context=_keep_index)


class Products(nn.Module):
    """A product of each kind of layout, of weights that are as wide as kernels want them."""

    def __init__(self, left: tuple[int, ...], right: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(left, dtype=dtype))
        self.right = nn.Parameter(torch.randn(right, dtype=dtype))
        self.register_buffer("ends", ENDS if 2 in (len(left), len(right)) else None)

    def forward(self, x: Tensor) -> Tensor:
        ends: Any = self.ends
        return (grouped_mm(self.left, self.right, offs=ends) * x).float().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("left", "right"),
    [((8, 16), (4, 16, 24)), ((4, 16, 24), (24, 8)), ((16, 8), (8, 24)), ((4, 8, 16), (4, 16, 8))],
)
def test_each_layout_equals_eager(
    left: tuple[int, ...], right: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model, x = Products(left, right, dtype), torch.ones((), dtype=dtype)
    program = capture(model, kwargs={"x": x})
    results = run_reference(program, values_of(program, model, {"x": x}))
    wanted = run_eager(model, {"x": x})
    torch.testing.assert_close(results["output", "0"].item(), wanted.loss)
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(results["grad", name], gradient, msg=name)


class Sorted(nn.Module):
    """Rows taken in an order and added to where they came from, by one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.table = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))

    def forward(self, order: Tensor) -> Tensor:
        rows = F.silu(self.table[order - 6 if self.way == "from the end" else order])
        zeros, column = torch.zeros_like(self.table), order[:, None].expand(-1, 4)
        if self.way == "op":
            added = torch.ops.torchtitan.deterministic_scatter_add(zeros, column, rows)
        elif self.way == "onto":
            added = (zeros + 1).scatter_add(0, column, rows)
        else:
            added = zeros.scatter_add(0, column, rows)
        return added.square().sum()


@pytest.mark.parametrize("way", ["op", "plain", "onto", "from the end"])
def test_rows_are_added_to_where_they_came_from(way: str) -> None:
    torch.manual_seed(0)
    model, order = Sorted(way), torch.tensor([3, 0, 0, 5, 3, 1, 0])
    program = capture(model, kwargs={"order": order})
    results = run_reference(program, values_of(program, model, {"order": order}))
    wanted = run_eager(model, {"order": order})
    assert results["output", "0"].item() == pytest.approx(wanted.loss, rel=1e-12)
    torch.testing.assert_close(results["grad", "table"], wanted.gradients["table"])
    assert ("aten.scatter_add" in str(program)) == (way == "onto")
