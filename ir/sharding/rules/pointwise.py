"""Rules of pointwise ops: one table of names, one rule."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.sharding.rules.base import Rule, named_rule, rule
from shardweave.ir.sharding.rules.dims import broadcast, passing

UNARY = """
    abs acos acosh asin asinh atan atanh bitwise_not ceil celu cos cosh digamma elu erf erfc
    erfinv exp exp2 expm1 floor frac gelu hardsigmoid hardswish hardtanh isinf isnan leaky_relu
    lgamma log log10 log1p log2 logical_not logit mish nan_to_num neg reciprocal relu relu6
    round round.decimals rsqrt sgn sigmoid sign signbit silu sin sinh softplus sqrt square tan
    tanh threshold trunc clamp clamp_min clamp_max _to_copy fill.Scalar fill.Tensor
    angle conj_physical _conj _conj_physical _neg_view
""".split()

BINARY = """
    add.Scalar add.Tensor sub.Scalar sub.Tensor rsub.Scalar mul.Scalar mul.Tensor
    div.Scalar div.Scalar_mode div.Tensor div.Tensor_mode floor_divide
    fmod.Scalar fmod.Tensor remainder.Scalar remainder.Tensor remainder.Scalar_Tensor
    pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor atan2 hypot copysign.Scalar copysign.Tensor
    eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor
    gt.Scalar gt.Tensor ge.Scalar ge.Tensor minimum maximum fmin fmax
    logical_and logical_or logical_xor logaddexp xlogy.Tensor heaviside copy _prelu_kernel
    complex polar
    bitwise_and.Scalar bitwise_and.Tensor bitwise_or.Scalar bitwise_or.Tensor
    bitwise_xor.Scalar bitwise_xor.Tensor
    bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar
    bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar
""".split()

TERNARY = """
    where.self masked_fill.Scalar masked_fill.Tensor clamp.Tensor clamp_min.Tensor clamp_max.Tensor
    addcmul addcdiv lerp.Scalar lerp.Tensor
""".split()

BACKWARD = """
    elu_backward gelu_backward hardsigmoid_backward hardswish_backward hardtanh_backward
    leaky_relu_backward logit_backward native_dropout_backward sigmoid_backward silu_backward
    mish_backward softplus_backward tanh_backward threshold_backward _prelu_kernel_backward
""".split()

CHECKED = frozenset(
    f"aten.{name}"
    for name in """
    div.Tensor_mode floor_divide fmod.Tensor remainder.Tensor remainder.Scalar_Tensor
    pow.Tensor_Tensor pow.Scalar
    """.split()
)
"""Ops of whole numbers that refuse some values of their last operand."""

LINEAR = {
    "aten.add.Tensor": (0, 1),
    "aten.sub.Tensor": (0, 1),
    "aten.neg": (0,),
    "aten.mul.Scalar": (0,),
    "aten.div.Scalar": (0,),
    "aten.where.self": (1, 2),
}
"""The operands in which an op is linear, where that saves a reduction.

A product with a tensor is left out on purpose: sums are reduced before it.
"""

SCALING = {"aten.mul.Tensor": (0, 1), "aten.div.Tensor": (0,)}
"""The operands that an op scales by another, in shards if that is how its result is wanted."""


@rule(*(f"aten.{name}" for name in (*UNARY, *BINARY, *TERNARY, *BACKWARD)))
def pointwise(op: AtenOp) -> Rule:
    """`i j, i j -> i j` for any rank; operands are right-aligned, broadcast dims whole."""
    shape = shape_of(op.results[0])
    names, factors = passing(shape)
    operands = [broadcast(shape_of(operand), shape, names) for operand in op.operands]
    if op.name in CHECKED and not dtype_of_value(op.operands[-1]).is_floating_point:
        # Padding may be 0, or anything.
        factors.update((n, replace(factors[n], even=True)) for dim in operands[-1] for n in dim)
    return named_rule(factors, operands, [names] * len(op.results), linear=_linear(op))


def _linear(op: AtenOp) -> tuple[int, ...]:
    if op.name == "aten.masked_fill.Scalar":
        return (0,) if op.value("value") == 0 else ()
    if op.name == "aten.div.Tensor":  # by one number, as that of a mean
        return () if shape_of(op.operands[1]) else (0,)
    if op.name != "aten._to_copy":
        return LINEAR.get(op.name, ())
    given, wanted = dtype_of_value(op.operands[0]), dtype_of_value(op.results[0])
    # Terms rounded to a narrower type before they are added would lose digits of the sum.
    exact = given.is_floating_point and torch.promote_types(given, wanted) == wanted
    return (0,) if exact else ()
