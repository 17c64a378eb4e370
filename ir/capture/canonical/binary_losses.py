"""Losses of two classes, of each element alone, written out: their sums may then be cut."""

from __future__ import annotations

from xdsl.ir import SSAValue

from shardweave.ir.capture.canonical.arithmetic import log_sigmoid_of
from shardweave.ir.capture.canonical.base import Call, Result, form
from shardweave.ir.capture.canonical.losses import reduced, spread
from shardweave.ir.dialects.types import shape_of

_LEAST_LOG = -100.0
_LEAST_SLOPE = 1e-12
"""As torch bounds the logarithm of a probability, and the divisor of its gradient."""


@form("aten.binary_cross_entropy")
def _binary_cross_entropy(call: Call) -> Result:
    """(t - 1) log(1 - p) - t log p, logarithms being at least -100."""
    b = call.builder
    source, target = call["self"], call["target"]
    others = b.call("aten.log1p", b.call("aten.neg", source))
    own, others = (
        b.call("aten.clamp", log, min=_LEAST_LOG) for log in (b.call("aten.log", source), others)
    )
    rest = b.call("aten.sub.Scalar", target, other=1.0)
    rows = b.call(
        "aten.sub.Tensor",
        b.call("aten.mul.Tensor", rest, others),
        b.call("aten.mul.Tensor", target, own),
    )
    return reduced(call, _weighted(call, rows))


@form("aten.binary_cross_entropy_backward")
def _binary_cross_entropy_backward(call: Call) -> Result:
    """(p - t) / (p (1 - p)), the divisor being at least 1e-12."""
    b = call.builder
    source = call["self"]
    error = b.call("aten.sub.Tensor", source, call["target"])
    rest = b.call("aten.rsub.Scalar", source, other=1.0)
    slope = b.call("aten.clamp", b.call("aten.mul.Tensor", rest, source), min=_LEAST_SLOPE)
    grad = spread(call, shape_of(source))
    grad = b.call("aten.mul.Tensor", error, grad)
    return _weighted(call, b.call("aten.div.Tensor", grad, slope))


@form("aten.binary_cross_entropy_with_logits")
def _binary_cross_entropy_with_logits(call: Call) -> Result:
    """(1 - t) x - (1 + (w - 1) t) log sigmoid(x), with w the weight of positives."""
    b = call.builder
    source, target = call["self"], call["target"]
    log = log_sigmoid_of(b, source)
    positive = call.arguments.get("pos_weight")
    if positive is not None:
        more = b.call("aten.sub.Scalar", positive, other=1.0)
        scale = b.call("aten.add.Scalar", b.call("aten.mul.Tensor", more, target), other=1.0)
        log = b.call("aten.mul.Tensor", scale, log)
    rest = b.call("aten.rsub.Scalar", target, other=1.0)
    rows = b.call("aten.sub.Tensor", b.call("aten.mul.Tensor", rest, source), log)
    return reduced(call, _weighted(call, rows))


@form("aten.soft_margin_loss")
def _soft_margin_loss(call: Call) -> Result:
    """log(1 + exp(-t x))."""
    return reduced(call, call.builder.call("aten.log1p", _odds(call)))


@form("aten.soft_margin_loss_backward")
def _soft_margin_loss_backward(call: Call) -> Result:
    """-t z / (1 + z), with z = exp(-t x)."""
    b = call.builder
    odds = _odds(call)
    share = b.call("aten.div.Tensor", odds, b.call("aten.add.Scalar", odds, other=1.0))
    slope = b.call("aten.mul.Tensor", b.call("aten.neg", call["target"]), share)
    return b.call("aten.mul.Tensor", slope, spread(call, shape_of(slope)))


def _odds(call: Call) -> SSAValue:
    b = call.builder
    product = b.call("aten.mul.Tensor", call["self"], call["target"])
    return b.call("aten.exp", b.call("aten.neg", product))


def _weighted(call: Call, rows: SSAValue) -> SSAValue:
    weight = call.arguments.get("weight")
    return rows if weight is None else call.builder.call("aten.mul.Tensor", rows, weight)
