"""Pointwise ops and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, is_float8, shape_of
from shardweave.ir.ops.spec import OpSpec, family, result_dtype

_UNARY_POWERS = frozenset({-3, -2, -1, -0.5, 0.5, 1, 2, 3, 4})


def _pointwise(names: str, **facts: Any) -> tuple[OpSpec, ...]:
    """Make records of pointwise ops, by default without a role in generated kernels."""
    return family(names, rule="pointwise", **facts)


def _fused(names: str, **facts: Any) -> tuple[OpSpec, ...]:
    return _pointwise(names, role="pointwise", **facts)


def _linear_in_cast(op: AtenOp) -> tuple[int, ...]:
    given, wanted = dtype_of_value(op.operands[0]), dtype_of_value(op.results[0])
    # Terms rounded to a narrower type before they are added would lose digits of the sum.
    exact = given.is_floating_point and not (is_float8(given) or is_float8(wanted))
    return (0,) if exact and torch.promote_types(given, wanted) == wanted else ()


def _linear_in_dividend(op: AtenOp) -> tuple[int, ...]:
    """The linear operands of a division: the dividend if the divisor is a scalar."""
    return () if shape_of(op.operands[1]) else (0,)


def _linear_if_zero(op: AtenOp) -> tuple[int, ...]:
    return (0,) if op.value("value") == 0 else ()


def _has_few_factors(op: AtenOp) -> bool:
    """True if a power takes only a few products, a root and a quotient."""
    return op.value("exponent") in _UNARY_POWERS


def _divides_integers(op: AtenOp) -> bool:
    """True if an op divides integers by a positive integer and rounds the quotient."""
    is_integer = all(not dtype_of_value(v).is_floating_point for v in (*op.operands, *op.results))
    other = op.value("other")
    return is_integer and isinstance(other, int) and other > 0 and bool(op.value("rounding_mode"))


_LINEAR = (
    # A product with a tensor is left out on purpose: sums are reduced before it.
    *_fused(
        "add.Tensor",
        linear=(0, 1),
        zero="all",
        sign=1,
        merge="sum",
        neutral=0,
        works_in_parts=True,
        is_direct=True,
    ),
    *_fused("sub.Tensor", linear=(0, 1), zero="all", sign=-1, neutral=0, is_direct=True),
    *_fused("mul.Scalar", linear=(0,), zero="all", works_in_parts=True),
    *_fused("div.Scalar", linear=(0,), zero="all"),
    *_fused("mul.Tensor", scaled=(0, 1), zero="any", neutral=1, counts=True, is_direct=True),
    *_fused(
        "div.Tensor",
        linear=_linear_in_dividend,
        scaled=(0,),
        zero="dividend",
        neutral=1,
        is_direct=True,
    ),
    *_fused("neg", linear=(0,), zero="all", is_direct=True),
    *_fused(
        "_to_copy",
        view="cast",
        linear=_linear_in_cast,
        zero="all",
        works_in_parts=True,
        derived={"dtype": result_dtype},
    ),
    *_fused("where.self", linear=(1, 2), zero="choices", mask=0, is_direct=True),
    *_fused("masked_fill.Scalar", linear=_linear_if_zero, zero="filled", mask=1),
)

_FUSED = (
    *_fused("abs relu sqrt tanh", zero="all", is_direct=True),
    *_fused("silu silu_backward tanh_backward threshold_backward minimum", zero="all"),
    *_fused("maximum", zero="all", merge="max"),
    *_fused("gelu gelu_backward", zero="all", costly="error function"),
    *_fused("sin", zero="all", costly="trigonometric", is_direct=True),
    *_fused("cos", costly="trigonometric", is_direct=True),
    *_fused("exp log reciprocal rsqrt sigmoid", is_direct=True),
    *_fused("sigmoid_backward add.Scalar sub.Scalar"),
    *_fused("pow.Tensor_Scalar", fits=_has_few_factors,
            is_direct=True),
    *_fused("div.Scalar_mode", fits=_divides_integers),
    *_fused("bitwise_not bitwise_and.Tensor bitwise_or.Tensor"),
    *_fused("logical_not logical_and logical_or", operands_as="bool"),
    *_fused(
        """
        eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor
        eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar
        """,
        operands_as="common",
    ),
)  # fmt: skip

SPECS = (
    *_LINEAR,
    *_FUSED,
    *_pointwise("erf", zero="all", is_direct=True),
    *_pointwise(
        """
        asin asinh atan atanh ceil elu expm1 floor leaky_relu log1p mish relu6 round sgn sign sinh
        square tan trunc elu_backward leaky_relu_backward
        """,
        zero="all",
    ),
    *_pointwise(
        """
        div.Tensor_mode floor_divide fmod.Tensor remainder.Tensor remainder.Scalar_Tensor
        pow.Tensor_Tensor pow.Scalar
        """,
        refuses_values=True,
    ),
    # Messages carry what is in memory, not what a tensor to be read as conjugated or negated holds.
    *_pointwise("_conj", runs_as="aten._conj_physical"),
    *_pointwise("_neg_view", runs_as="aten.neg"),
    *_pointwise("fill.Scalar fill.Tensor copy", overwrites=True),
    *_pointwise(
        """
        acos acosh celu cosh digamma erfc erfinv exp2 frac hardsigmoid hardswish hardtanh isinf
        isnan lgamma log10 log2 logit nan_to_num round.decimals signbit softplus threshold
        clamp clamp_min clamp_max clamp.Tensor clamp_min.Tensor clamp_max.Tensor
        angle conj_physical _conj_physical complex polar
        rsub.Scalar fmod.Scalar remainder.Scalar atan2 hypot copysign.Scalar copysign.Tensor
        fmin fmax logical_xor logaddexp xlogy.Tensor heaviside masked_fill.Tensor
        addcmul addcdiv lerp.Scalar lerp.Tensor
        bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar bitwise_xor.Tensor
        bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar
        bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar
        hardsigmoid_backward hardswish_backward hardtanh_backward logit_backward
        native_dropout_backward mish_backward softplus_backward
        _prelu_kernel _prelu_kernel_backward
        """
    ),
)
