"""Sample calls of the pointwise ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardweave.tests.ir.rules.sharded_op import Sample, sample
from shardweave.tests.ir.rules.tensors import above_one, booleans, integers, normal, unit

ANYWHERE = """
    abs asinh atan ceil cos cosh elu erf erfc exp exp2 expm1 floor frac gelu hardsigmoid hardswish
    hardtanh isinf isnan leaky_relu logical_not mish nan_to_num neg reciprocal relu relu6 round
    sgn sigmoid sign signbit silu sin sinh softplus square tan tanh trunc
""".split()
"""Ops of one operand and no other argument, defined everywhere."""

WITHIN_ONE = "acos asin atanh erfinv logit".split()
ABOVE_ONE = "acosh digamma lgamma log log10 log1p log2 rsqrt sqrt".split()

COMPLEX = torch.complex(normal(4, 6), normal(4, 6))

UNARY = (
    *(sample(name, COMPLEX) for name in "_conj _conj_physical angle conj_physical exp neg".split()),
    *(sample(name, normal(4, 6)) for name in ANYWHERE),
    *(sample(name, unit(4, 6)) for name in WITHIN_ONE),
    *(sample(name, above_one(4, 6)) for name in ABOVE_ONE),
    sample("_neg_view", normal(4, 6)),
    sample("abs", normal(2, 1, 6)),
    sample("exp", normal()),
    sample("bitwise_not", integers(4, 6)),
    sample("round.decimals", normal(4, 6), decimals=1),
    sample("clamp", normal(4, 6), -0.5, 0.5),
    sample("clamp_min", normal(4, 6), 0.1),
    sample("clamp_max", normal(4, 6), 0.1),
    sample("_to_copy", normal(4, 6).float(), dtype=torch.float64),
    sample("_to_copy", normal(4, 6), dtype=torch.float32),
    sample("_to_copy", integers(4, 6), dtype=torch.float64),
    sample("fill.Scalar", normal(4, 6), 2.0),
    sample("fill.Tensor", normal(4, 6), normal()),
    sample("gelu", normal(4, 6), approximate="tanh"),
    sample("celu", normal(4, 6), 0.7),
    sample("threshold", normal(4, 6), 0.1, 0.2),
)

WITH_NUMBER = """
    add.Scalar sub.Scalar rsub.Scalar mul.Scalar div.Scalar fmod.Scalar remainder.Scalar
    pow.Tensor_Scalar copysign.Scalar eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar
""".split()

OF_TWO = """
    add.Tensor sub.Tensor mul.Tensor div.Tensor fmod.Tensor remainder.Tensor pow.Tensor_Tensor
    atan2 hypot copysign.Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor
    minimum maximum fmin fmax logical_and logical_or logical_xor logaddexp xlogy.Tensor heaviside
    floor_divide
""".split()

OF_TWO_INTEGERS = """
    bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor
    bitwise_right_shift.Tensor
""".split()

WITH_INTEGER = """
    bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar bitwise_left_shift.Tensor_Scalar
    bitwise_right_shift.Tensor_Scalar
""".split()


def _broadcast(name: str, left: Any, right: Any) -> Iterator[Sample]:
    """Operands of equal shapes, and broadcast to each other."""
    yield sample(name, left(4, 6), right(4, 6))
    yield sample(name, left(4, 1, 6), right(2, 1))


BINARY = (
    *(sample(name, normal(4, 6), 2.0) for name in WITH_NUMBER),
    *(one for name in OF_TWO for one in _broadcast(name, normal, above_one)),
    *(one for name in ("complex", "polar") for one in _broadcast(name, normal, normal)),
    *(one for name in OF_TWO_INTEGERS for one in _broadcast(name, integers, integers)),
    *(sample(name, integers(4, 6), 3) for name in WITH_INTEGER),
    sample("add.Tensor", normal(4, 6), normal(6), alpha=3),
    sample("add.Tensor", integers(4, 6), integers(4, 1)),
    sample("sub.Tensor", normal(6), normal(4, 6), alpha=0.5),
    sample("div.Scalar", integers(4, 6), 4),
    sample("div.Scalar_mode", normal(4, 6), 0.3, rounding_mode="floor"),
    sample("div.Tensor_mode", normal(4, 6), above_one(6), rounding_mode="trunc"),
    sample("pow.Scalar", 2.0, normal(4, 6)),
    sample("remainder.Scalar_Tensor", 5.0, above_one(4, 6)),
    sample("copy", normal(4, 6), normal(6)),
    sample("_prelu_kernel", normal(2, 4, 6), normal(1, 4, 1)),
)

TERNARY = (
    sample("where.self", booleans(4, 6), normal(4, 6), normal(4, 6)),
    sample("where.self", booleans(4, 1), normal(6), normal(2, 4, 6)),
    sample("where.self", booleans(4, 6), normal(4, 6), normal()),
    sample("masked_fill.Scalar", normal(4, 6), booleans(4, 6), -1.0),
    sample("masked_fill.Scalar", normal(2, 4, 6), booleans(4, 1), -1.0),
    sample("masked_fill.Scalar", normal(4, 6), booleans(4, 6), 0),
    sample("masked_fill.Tensor", normal(4, 6), booleans(6), normal()),
    sample("clamp.Tensor", normal(4, 6), None, normal(6)),
    sample("clamp.Tensor", normal(4, 6), normal(4, 1), normal(4, 6)),
    sample("clamp_min.Tensor", normal(4, 6), normal(6)),
    sample("clamp_max.Tensor", normal(4, 6), normal(4, 6)),
    sample("addcmul", normal(4, 6), normal(6), normal(4, 1), value=0.5),
    sample("addcdiv", normal(4, 6), normal(4, 6), above_one(6)),
    sample("lerp.Scalar", normal(4, 6), normal(4, 6), 0.3),
    sample("lerp.Tensor", normal(4, 6), normal(4, 6), unit(6)),
)

OF_GRADIENT_AND_VALUE = """
    gelu_backward hardsigmoid_backward hardswish_backward mish_backward sigmoid_backward
    silu_backward tanh_backward
""".split()

BACKWARD = (
    *(sample(name, normal(4, 6), normal(4, 6)) for name in OF_GRADIENT_AND_VALUE),
    sample("elu_backward", normal(4, 6), 1.0, 1.0, 1.0, False, normal(4, 6)),
    sample("hardtanh_backward", normal(4, 6), normal(4, 6), -1.0, 1.0),
    sample("leaky_relu_backward", normal(4, 6), normal(4, 6), 0.1, False),
    sample("logit_backward", normal(4, 6), unit(4, 6)),
    sample("native_dropout_backward", normal(4, 6), booleans(4, 6), 1.25),
    sample("_prelu_kernel_backward", normal(2, 4, 6), normal(2, 4, 6), normal(1, 4, 1)),
    sample("softplus_backward", normal(4, 6), normal(4, 6), 1.0, 20.0),
    sample("threshold_backward", normal(4, 6), normal(4, 6), 0),
)

BY_TAG = (
    *(sample(name, normal(4, 6)) for name in ("sinc", "hardshrink", "special_i0e", "isfinite")),
    sample("logaddexp2", normal(4, 6), normal(6)),
    sample("special_xlog1py", normal(4, 1), normal(4, 6).abs()),
    sample("gcd", integers(4, 6), integers(4, 6)),
    sample("frexp.Tensor", normal(4, 6)),
    sample("polygamma", 1, normal(4, 6).abs()),
)
"""Ops without a record of their own, which torch tags as pointwise."""

POINTWISE = (*UNARY, *BINARY, *TERNARY, *BACKWARD, *BY_TAG)
