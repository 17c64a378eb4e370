"""Canonical forms compute what torch computes, and leave none of what they replace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.backends.reference.reference import run_reference, values_of
from shardweave.ir.capture.capture import capture
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import run_passes

Function = Callable[..., Tensor]


class Apply(nn.Module):
    """A function of a weight and the inputs."""

    def __init__(self, function: Function, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self.weight, *inputs)


def captured_equal(function: Function, shape: tuple[int, ...], *inputs: Tensor) -> Program:
    """Capture a loss, compare it and the weight's gradient with eager, return the program."""
    return model_captured_equal(Apply(function, shape), *inputs)


def model_captured_equal(model: nn.Module, *inputs: Tensor) -> Program:
    program = capture(model, list(inputs))
    values = values_of(program, model, {f"arg{i}": value for i, value in enumerate(inputs)})
    results = run_reference(program, values)
    loss = model(*inputs)
    loss.backward()
    torch.testing.assert_close(results["output", "0"], loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(results["grad", name], parameter.grad, msg=name)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(results.get(("buffer", name), buffer), buffer, msg=name)
    return program


def names(program: Program) -> set[str]:
    return {op.name for op in program.ops}


def labels(*values: int) -> Tensor:
    return torch.tensor(values)


# Means and losses: sums over the global batch, divided by global counts.


@pytest.mark.parametrize(
    "function",
    [
        lambda w: w.mean(),
        lambda w: w.mean(0).square().sum(),
        lambda w: w.mean((-1, 0), keepdim=True).exp().sum(),
        lambda w: w.var(1).sum(),
        lambda w: w.var((0, 1), correction=0),
        lambda w: w.std(0, unbiased=False).sum(),
    ],
)
def test_mean_is_a_sum_and_a_division_by_the_global_extent(function: Function) -> None:
    program = captured_equal(function, (4, 6))
    assert not {name for name in names(program) if "mean" in name or "var" in name}
    assert "aten.sum.dim_IntList" in names(program)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "target",
    [labels(1, 0, 4, 2), labels(1, -100, 4, -100), labels(-100, -100, -100, 3)],
    ids=["all", "half-ignored", "one-left"],
)
def test_cross_entropy_divides_by_the_number_of_rows_that_count(
    target: Tensor, reduction: str
) -> None:
    program = captured_equal(
        lambda w, y: F.cross_entropy(w, y, reduction=reduction).sum(), (4, 5), target
    )
    assert not {name for name in names(program) if "nll" in name or "softmax" in name}


@pytest.mark.parametrize(
    "function",
    [
        lambda w, y: F.cross_entropy(w, y, ignore_index=2),
        lambda w, y: F.cross_entropy(w, y, label_smoothing=0.1),
        lambda w, y: F.nll_loss(F.log_softmax(w, 1), y),
        lambda w, y: F.cross_entropy(w.T.contiguous().T, y),
        lambda w, y: F.cross_entropy(w.view(2, 2, 5).transpose(1, 2), y.view(2, 2)),
        lambda w, y: F.cross_entropy(w.view(1, 4, 1, 5).permute(0, 3, 1, 2), y.view(1, 4, 1)),
        lambda w, y: F.cross_entropy(w[0], y[0]),
    ],
    ids=["ignore", "smoothing", "nll", "strided", "three-dims", "image", "one-row"],
)
def test_losses_of_all_shapes_and_options(function: Function) -> None:
    captured_equal(function, (4, 5), labels(1, 0, 4, 2))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_squared_distance(reduction: str) -> None:
    program = captured_equal(
        lambda w, y: F.mse_loss(w.tanh(), y, reduction=reduction).sum(),
        (4, 5),
        torch.randn(4, 5, dtype=torch.float64),
    )
    assert not {name for name in names(program) if "mse" in name}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "loss",
    [
        lambda *a, **k: F.huber_loss(*a, delta=0.7, **k),
        F.huber_loss,
        lambda *a, **k: F.smooth_l1_loss(*a, beta=0.7, **k),
        F.smooth_l1_loss,
    ],
)
def test_distance_that_is_squared_up_to_a_limit(loss: Function, reduction: str) -> None:
    far = torch.tensor([[0.0, 0.2, -0.6, 0.69, 3.0]], dtype=torch.float64).repeat(4, 1)
    program = captured_equal(lambda w, y: loss(w, y, reduction=reduction).sum(), (4, 5), far)
    assert not {name for name in names(program) if "huber" in name or "smooth" in name}


def test_gradient_of_a_cross_entropy_needs_no_sum_over_classes() -> None:
    program = captured_equal(lambda w, y: F.cross_entropy(w, y), (4, 5), labels(1, 0, 4, 2))
    sums = [op for op in program.ops if op.name == "aten.sum.dim_IntList"]
    over_classes = [op for op in sums if isinstance(op, AtenOp) and op.value("dim") == [1]]
    assert len(over_classes) == 1, "that of the softmax itself"
    live = run_passes(program, "dce")
    large = [op.name for op in live.ops if shape_of(op.results[0]) == (4, 5)]
    assert "aten.full" not in large
    assert large.count("aten.sub.Tensor") == 2, "those of the log probabilities"


def test_log_softmax_elsewhere_has_its_full_gradient() -> None:
    captured_equal(lambda w: (F.log_softmax(w, -1) * w.detach().exp()).sum(), (4, 5))


# Batch norm over the global batch.


class Normed(nn.Module):
    def __init__(self, norm: nn.Module, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
        self.norm = norm.double()

    def forward(self) -> Tensor:
        y = self.norm(self.weight)
        return (y * y * torch.arange(y.numel(), dtype=y.dtype).view(y.shape)).sum()


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm2d(3), (4, 3, 5, 2)),
        (nn.BatchNorm1d(3), (4, 3)),
        (nn.BatchNorm1d(3), (4, 3, 5)),
        (nn.BatchNorm2d(3, affine=False), (4, 3, 5, 2)),
        (nn.BatchNorm2d(3, momentum=0.3, eps=1e-2), (4, 3, 5, 2)),
        (nn.BatchNorm2d(3).eval(), (4, 3, 5, 2)),
    ],
    ids=["2d", "rows", "1d", "plain", "options", "eval"],
)
def test_batch_norm_is_sums_over_the_global_batch(norm: nn.Module, shape: tuple[int, ...]) -> None:
    program = model_captured_equal(Normed(norm, *shape))
    assert not {name for name in names(program) if "batch_norm" in name}


# Views, copies, slices, constants.


@pytest.mark.parametrize(
    "function",
    [
        lambda w: w.t().reshape(3, 8).unsqueeze(0).squeeze().flatten().square().sum(),
        lambda w: w.transpose(0, -1).permute(1, 0).clone().detach().mul(w).sum(),
        lambda w: torch.cat(w.split(2, dim=1), 0).exp().sum(),
        lambda w: torch.cat(w.chunk(4, dim=-1)[1:3]).exp().sum(),
        lambda w: torch.stack([w[0], w[-1], w[1]], -1).exp().sum(),
        lambda w: sum(row.exp().sum() for row in w.unbind(0)),
        lambda w: w[1:-1:2, -3:].exp().sum() + w[..., None].exp().sum(),
        lambda w: (w.repeat(2, 3) * torch.arange(144).view(8, 18)).sum(),
        lambda w: (w.expand(2, 4, 6) * torch.arange(48).view(2, 4, 6)).sum(),
        lambda w: (w.float().double() + w.to(torch.float64)).square().sum(),
        lambda w: (torch.zeros_like(w) + w.new_ones(4, 6) + torch.full((), 2.0)).mul(w).sum(),
        lambda w: (w * torch.arange(1, 13, 2)).sum(),
        lambda w: w.index_select(1, torch.arange(6) // 2).exp().sum(),
        lambda w: w[torch.arange(5) // 2].exp().sum() + w[:, torch.arange(2)].exp().sum(),
        lambda w: w.masked_fill(w > 0, 2.0).exp().sum() + torch.where(w > 0, w, 0.0).exp().sum(),
        lambda w: (w + 0).mul(1).sub(0).div(1).add(w, alpha=3).square().sum(),
    ],
)
def test_shapes_and_copies(function: Function) -> None:
    program = captured_equal(function, (4, 6))
    gone = (
        "t",
        "transpose",
        "unsqueeze",
        "squeeze",
        "reshape",
        "split",
        "chunk",
        "stack",
        "unbind",
    )
    gone += ("clone", "detach", "alias", "zeros", "zeros_like", "new_ones", "repeat", "flatten")
    assert not {name for name in names(program) if name.split(".")[1] in gone}


def test_views_of_views_are_folded() -> None:
    program = captured_equal(
        lambda w: w.view(2, 12).view(24).view(4, 6).t().t().exp().sum(), (4, 6)
    )
    assert not names(program) & {"aten.view", "aten.permute"}


def test_adding_zero_and_multiplying_by_one_are_nothing() -> None:
    program = captured_equal(lambda w: (w + 0).mul(1).sub(0).div(1).exp().sum(), (4, 6))
    assert not names(program) & {"aten.add.Scalar", "aten.sub.Scalar", "aten.div.Scalar"}


def test_change_of_dtype_is_one_op_and_none_to_the_same() -> None:
    program = captured_equal(lambda w: (w.double().to(torch.float64) * w.float()).sum(), (4, 6))
    casts = [op for op in program.ops if op.name == "aten._to_copy"]
    assert {str(op.result_types[0]) for op in casts} <= {"tensor<4x6xf32>", "tensor<4x6xf64>"}


@pytest.mark.parametrize(
    "function",
    [
        lambda mask: mask[torch.arange(2)[:, None, None], torch.arange(3)[None, :, None],
                          torch.arange(4)],
        lambda mask: mask[torch.arange(2)[:, None, None, None], torch.arange(3)[:, None],
                          torch.arange(4)],
    ],
    ids=["every-dim", "with-a-new-dim"],
)  # fmt: skip
def test_lookup_that_counts_every_dim_in_order_is_a_view(function: Function) -> None:
    program = captured_equal(
        lambda w, mask: (w * function(mask)).sum(), (2, 3, 4), torch.randn(2, 3, 4).double()
    )
    assert "aten.index.Tensor" not in names(program)


@pytest.mark.parametrize(
    "function",
    [
        lambda mask: mask[torch.arange(2)[:, None], torch.arange(1, 3), torch.arange(2)],
        lambda mask: mask[torch.arange(1, -1, -1)[:, None, None], torch.arange(3)[None, :, None],
                          torch.arange(4)],
        lambda mask: mask[torch.arange(0, 4, 2)[:, None, None] // 2,
                          torch.arange(3)[None, :, None], torch.arange(4)],
        lambda mask: mask[torch.arange(2)[None, :], torch.arange(2)[:, None]],
        lambda mask: mask[:, torch.arange(3)],
    ],
    ids=["offset", "reversed", "computed", "swapped", "some-dims"],
)  # fmt: skip
def test_other_lookups_stay_lookups(function: Function) -> None:
    mask = torch.randn(2, 3, 4).double()
    captured_equal(lambda w, mask: (w[0, 0, 0] * function(mask)).exp().sum(), (2, 3, 4), mask)


def test_python_numbers_become_arguments_and_not_tensors() -> None:
    program = captured_equal(lambda w: (2 * w + 1 - w / 4).square().sum(), (4, 6))
    assert {"aten.mul.Scalar", "aten.add.Scalar", "aten.div.Scalar"} <= names(program)
    assert "aten.full" not in names(program)


def test_heads_merged_with_samples_and_taken_apart_again_stay_apart() -> None:
    """As in `nn.MultiheadAttention`: there heads could not be cut, for samples are more major."""

    def heads(w: Tensor, x: Tensor) -> Tensor:
        rows = (x @ w).view(5, 2 * 7, 3).transpose(0, 1)  # 5 positions of 2 samples
        return rows.reshape(2, 7, 5, 3).square().sum(dim=(0, 2, 3)).log().sum()

    program = captured_equal(heads, (4, 21), torch.randn(5, 2, 4, dtype=torch.float64))
    shapes = {shape_of(op.results[0]) for op in program.ops}
    assert (5, 2, 7, 3) in shapes
    assert not any(14 in shape for shape in shapes)
