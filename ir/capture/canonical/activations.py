"""Activations of two halves or of two branches, written out."""

from __future__ import annotations

from xdsl.ir import SSAValue

from shardweave.ir.capture.builder import ImportBuilder
from shardweave.ir.capture.canonical.base import Call, Result, form, normalized
from shardweave.ir.capture.canonical.layout import sliced
from shardweave.ir.dialects.types import shape_of


def log_sigmoid_of(b: ImportBuilder, source: SSAValue) -> SSAValue:
    """min(x, 0) - log(1 + exp(-|x|))."""
    power = b.call("aten.exp", b.call("aten.neg", b.call("aten.abs", source)))
    below = b.call("aten.clamp", source, max=0.0)
    return b.call("aten.sub.Tensor", below, b.call("aten.log1p", power))


@form("aten.log_sigmoid_forward")
def _log_sigmoid(call: Call) -> Result:
    """The result; the buffer that eager keeps for backward is not kept."""
    return [log_sigmoid_of(call.builder, call["self"]), None]


@form("aten.log_sigmoid_backward")
def _log_sigmoid_backward(call: Call) -> Result:
    """grad * sigmoid(-x)."""
    b = call.builder
    slope = b.call("aten.sigmoid", b.call("aten.neg", call["self"]))
    return b.call("aten.mul.Tensor", call["grad_output"], slope)


@form("aten.glu")
def _glu(call: Call) -> Result:
    """The first half, times the sigmoid of the second."""
    first, second = _halves(call)
    return call.builder.call("aten.mul.Tensor", first, call.builder.call("aten.sigmoid", second))


@form("aten.glu_backward")
def _glu_backward(call: Call) -> Result:
    b = call.builder
    first, second = _halves(call)
    gate = b.call("aten.sigmoid", second)
    grad = call["grad_output"]
    of_gate = b.call("aten.mul.Tensor", grad, first)
    parts = [b.call("aten.mul.Tensor", grad, gate), b.call("aten.sigmoid_backward", of_gate, gate)]
    return b.call("aten.cat", parts, dim=normalized(call["dim"], len(call.shape)))


def _halves(call: Call) -> tuple[SSAValue, SSAValue]:
    source = call["self"]
    shape = list(shape_of(source))
    dim = normalized(call["dim"], len(shape))
    shape[dim] //= 2
    size = tuple(shape)
    first, second = (sliced(call, source, dim, start, 1, size) for start in (0, shape[dim]))
    return first, second
