"""Rules of convolutions, pools and upsampling: sample and channel dims pass, spatial dims do not.

A convolution's channels are `(g c)` on the input's side and `(g o)` on the output's, with g
groups; g is named only where there are several.
"""

from __future__ import annotations

from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.sharding.rules.base import Notation, Rule, rule
from shardweave.ir.sharding.rules.dims import dividing


@rule
def window(op: AtenOp) -> Rule:
    """`... . . -> ... . .`: each plane, line or volume is computed by itself."""
    dims = spec_of(op).notation
    operands, results = (", ".join([dims] * len(v)) for v in (op.operands, op.results))
    return Notation(op, f"{operands} -> {results}").rule()


@rule
def patches(op: AtenOp) -> Rule:
    """`n ... -> n ...`: only samples (n) can be sharded: patches merge channels and positions."""
    ranks = [len(shape_of(value)) for value in (*op.operands, *op.results)]
    is_batch = min(ranks) > 2
    given, made = (("n" if is_batch else ".") + " ." * (rank - 1) for rank in ranks)
    return Notation(op, f"{given} -> {made}").rule()


@rule
def convolution(op: AtenOp) -> Rule:
    """`n c ., o c ., o -> n o .`: shards of c give partial sums; not with a bias, added by each."""
    inputs, weight, bias, outputs = _convolution_dims(op, op.operands[1])
    has_bias = op.tensor("bias") is not None
    operands = [inputs, weight, bias] if has_bias else [inputs, weight]
    return _grouped(op, operands, [outputs], is_c_lost=has_bias)


@rule
def convolution_backward(op: AtenOp) -> Rule:
    """`n o ., n c ., o c . -> n c ., o c ., o`; results that `output_mask` leaves out are absent.

    o reduces in the input's gradient, n in the others. The bias gradient is complete on each
    shard of c, not a term of a sum, so c cannot be cut where it is wanted.
    """
    inputs, weight, bias, outputs = _convolution_dims(op, op.operands[2])
    mask = op.value("output_mask")
    results = [dims for dims, wanted in zip([inputs, weight, bias], mask, strict=True) if wanted]
    return _grouped(op, [outputs, inputs, weight], results, is_c_lost=mask[2])


def _convolution_dims(op: AtenOp, weight: SSAValue) -> tuple[str, str, str, str]:
    """Notation for the dims of input, weight, bias and output."""
    spatial = " ." * (len(shape_of(weight)) - 2)
    c, o = ("c", "o") if op.value("groups") == 1 else ("(g c)", "(g o)")
    # A transposed convolution's weight has the input's channels first.
    channels = f"{c} o" if op.value("transposed") else f"{o} c"
    return f"n {c}{spatial}", f"{channels}{spatial}", o, f"n {o}{spatial}"


def _grouped(op: AtenOp, operands: list[str], results: list[str], *, is_c_lost: bool) -> Rule:
    groups = op.value("groups")
    text = f"{', '.join(operands)} -> {', '.join(results)}"
    return Notation(op, text, {"g": groups}).rule(
        reductions={"c": None} if is_c_lost else {},
        # Every text starts with `n (g ..)`, so g is factor 1.
        localize=dividing("groups", 1) if groups > 1 else None,
    )


@rule
def grid_sampler(op: AtenOp) -> Rule:
    """`n c ., n . -> n c .`: samples and channels can be sharded, planes and grid points cannot."""
    planes, places = _sampled(op)
    return Notation(op, f"{planes}, {places} -> {planes}").rule()


@rule
def grid_sampler_backward(op: AtenOp) -> Rule:
    """`n c ., n c ., n . -> n c ., n .`: shards of c give partial sums of the grid's gradient."""
    planes, places = _sampled(op)
    mask = op.value("output_mask")
    both = [planes, places]
    # The kernel always gives the gradient of places.
    kept = both if len(op.results) > 1 else [d for d, w in zip(both, mask, strict=True) if w]
    results = ", ".join(kept)
    return Notation(op, f"{planes}, {planes}, {places} -> {results}").rule()


def _sampled(op: AtenOp) -> tuple[str, str]:
    spatial = " ." * (len(shape_of(op.operands[0])) - 2)
    return f"n c{spatial}", f"n{spatial} ."
