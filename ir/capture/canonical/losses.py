"""Losses in their exact global form.

A normalised loss divides a sum over the batch by a count of the batch. Both are written out,
so that each device may hold part of the batch, or part of the classes, and only sums and
maxima cross the network: the logits never do.
"""

from __future__ import annotations

import torch
from xdsl.ir import SSAValue

from shardweave.ir.capture.canonical.base import Call, Result, form, normalized
from shardweave.ir.capture.canonical.grouped import is_zeros
from shardweave.ir.dialects.aten import maker
from shardweave.ir.dialects.types import dtype_of_value, shape_of

_NONE, _MEAN, _SUM = 0, 1, 2


@form("aten._log_softmax")
def _log_softmax(call: Call) -> Result:
    """Compute x - max - log sum exp(x - max)."""
    b = call.builder
    if 0 in call.shape:
        return b.full(call.shape, 0, call.dtype)
    source = b.cast(call["self"], call.dtype)
    dim = normalized(call["dim"], len(call.shape))
    highest = b.call("aten.amax", source, dim=[dim], keepdim=True)
    shifted = b.call("aten.sub.Tensor", source, highest)
    total = b.sum(b.call("aten.exp", shifted), [dim], True)
    return b.call("aten.sub.Tensor", shifted, b.call("aten.log", total))


@form("aten._log_softmax_backward_data")
def _log_softmax_backward(call: Call) -> Result:
    """Compute grad - exp(output) * sum(grad).

    If a negative log likelihood follows, `grad` has one nonzero entry per row, so that its sum over
    classes is known without a reduction (or a collective, if classes are sharded). That entry is
    then scattered into the result, and `grad` itself, nearly all zeros, is never made.
    """
    b = call.builder
    grad, output = call["grad_output"], call["output"]
    dim = normalized(call["dim"], len(call.shape))
    power = b.call("aten.exp", output)
    row_gradient = _row_gradient(grad, dim)
    if row_gradient is None:
        rest = b.call("aten.mul.Tensor", power, b.sum(grad, [dim], True))
        return b.cast(b.call("aten.sub.Tensor", grad, rest), call["input_dtype"])
    index, total = row_gradient
    rest = b.call("aten.mul.Tensor", power, b.call("aten.neg", total))
    result = b.call("aten.scatter_add", rest, index, total, dim=dim)
    return b.cast(result, call["input_dtype"])


def _row_gradient(grad: SSAValue, dim: int) -> tuple[SSAValue, SSAValue] | None:
    """Return index and entries of a `grad` that scatters one entry per row into zeros, or None."""
    scatter = maker(grad, "aten.scatter_add")
    if scatter is None or not is_zeros(scatter.operands[0]) or scatter.value("dim") != dim:
        return None
    _, index, source = scatter.operands
    return (index, source) if shape_of(source)[dim] == 1 else None


def _target_column(call: Call, classes_dim: int) -> tuple[SSAValue, SSAValue]:
    """Return targets (0 for ignored rows) and a mask of counted rows; class dims have size 1."""
    b = call.builder
    target = call["target"]
    shape = shape_of(target)
    column = b.view(target, (*shape[:classes_dim], 1, *shape[classes_dim:]))
    counts = b.call("aten.ne.Scalar", column, other=call["ignore_index"])
    zero = b.full((), 0, dtype_of_value(target))
    return b.call("aten.where.self", counts, column, zero), counts


def _row_weights(call: Call, index: SSAValue, counts: SSAValue, like: torch.dtype) -> SSAValue:
    """Return each row's weight: its target class's (1 without weights), or 0 for ignored rows."""
    b = call.builder
    weight = call.arguments.get("weight")
    if weight is None:
        return b.cast(counts, like)
    rows = b.call("aten.embedding", b.view(weight, (*shape_of(weight), 1)), index)
    return b.call("aten.where.self", counts, b.view(rows, shape_of(index)), b.full((), 0.0, like))


def _weighted(call: Call, rows: SSAValue, weights: SSAValue) -> SSAValue:
    is_weighted = call.arguments.get("weight") is not None
    return call.builder.call("aten.mul.Tensor", rows, weights) if is_weighted else rows


@form("aten.nll_loss_forward", "aten.nll_loss2d_forward")
def _nll_loss(call: Call) -> Result:
    """Compute -sum of w[target] log p[target] over counted rows; a mean divides by sum of w."""
    b = call.builder
    source = call["self"]
    dim = 1 if len(shape_of(source)) > 1 else 0
    index, counts = _target_column(call, dim)
    picked = b.call("aten.gather", source, index, dim=dim)
    column = b.view(call["target"], shape_of(counts))
    ignored = b.call("aten.eq.Scalar", column, other=call["ignore_index"])
    # Linear in `picked`, so that ranks with shards of the classes can sum locally first.
    rows = b.call("aten.masked_fill.Scalar", b.call("aten.neg", picked), ignored, value=0.0)
    rank = len(shape_of(rows))
    weights = _row_weights(call, index, counts, call.dtype)
    rows = _weighted(call, rows, weights)
    total_weight = b.sum(weights, range(rank))
    if call["reduction"] == _NONE:
        return [b.view(rows, call.shape), total_weight]
    loss = b.sum(rows, range(rank))
    if call["reduction"] == _MEAN:
        loss = b.call("aten.div.Tensor", loss, total_weight)
    return [loss, total_weight]


@form("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def _nll_loss_backward(call: Call) -> Result:
    """Scatter -w grad (for a mean, divided by sum of w) to each counted row's target class."""
    b = call.builder
    grad = call["grad_output"]
    dim = 1 if len(call.shape) > 1 else 0
    index, counts = _target_column(call, dim)
    column_shape = shape_of(index)
    if call["reduction"] == _NONE:
        grad = b.view(grad, column_shape)
    elif call["reduction"] == _MEAN:
        grad = b.call("aten.div.Tensor", grad, call["total_weight"])
    zero = b.full((), 0.0, call.dtype)
    rows = b.call("aten.where.self", counts, b.call("aten.neg", grad), zero)
    rows = _weighted(call, rows, _row_weights(call, index, counts, call.dtype))
    zeros = b.full(call.shape, 0.0, call.dtype)
    return b.call("aten.scatter_add", zeros, index, rows, dim=dim)
