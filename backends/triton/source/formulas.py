"""Triton formulas of the pointwise ATen ops.

Half-precision operands are widened to float32 when they are loaded, so that all arithmetic here
is in float32 (or float64), as in ATen's own kernels, and rounds once, when the result is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, dtype_word

Write = Callable[..., str]
"""Takes an op and its operands' variables, and returns a Triton expression."""


@dataclass(frozen=True)
class Formula:
    """The Triton text of an op. takes_numbers: whether an operand may be a literal number, which
    then has the dtype of the other operand."""

    write: Write
    takes_numbers: bool = False


FORMULAS: dict[str, Formula] = {}
"""Formulas by op name. The op's `OpSpec` gives the dtype of its operands (`operands_as`)."""


def formula(*names: str, takes_numbers: bool = False) -> Callable[[Write], Write]:
    """Return a decorator that registers a function as the formula of these pointwise ops."""

    def register(write: Write) -> Write:
        FORMULAS.update(dict.fromkeys(names, Formula(write, takes_numbers)))
        return write

    return register


def type_text(dtype: torch.dtype) -> str:
    return "tl.int1" if dtype == torch.bool else f"tl.{dtype_word(dtype)}"


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which kernels compute with `dtype`: float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def number(value: float | bool) -> str:
    """Return a Python number as Triton text."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value == 0 and math.copysign(1, value) < 0:  # Triton reads a written -0.0 as 0
        return "tl.full((), -2147483648, tl.int32).to(tl.float32, bitcast=True)"
    return f"({value!r})" if value < 0 else repr(value)


def rounded(value: float | bool, dtype: torch.dtype) -> float | bool:
    """Round a number to `dtype`, as a tensor of it would hold it."""
    return torch.tensor(value, dtype=dtype).item()


def _infix(symbol: str) -> Write:
    return lambda op, a, b: f"{a} {symbol} {b}"


def _with_other(symbol: str) -> Write:
    return lambda op, a: f"{a} {symbol} {number(op.value('other'))}"


def _compared_with_other(symbol: str) -> Write:
    """Compare as ATen does, with the number first rounded to the operand's dtype."""

    def write(op: AtenOp, a: str) -> str:
        other, dtype = op.value("other"), dtype_of_value(op.operands[0])
        return f"{a} {symbol} {number(rounded(other, dtype) if dtype.is_floating_point else other)}"

    return write


def _extreme(function: str) -> Write:
    """Maximum or minimum that keeps NaN, as in ATen; PTX's max and min would drop it."""
    return lambda op, a, b: f"{function}({a}, {b}, propagate_nan=tl.PropagateNan.ALL)"


@formula("aten.neg")
def _negative(op: AtenOp, a: str) -> str:
    """Negate. Triton's minus is 0 - a, which gives 0, not -0.0, for 0."""
    return f"{a} * -1.0" if dtype_of_value(op.results[0]).is_floating_point else f"-{a}"


@formula("aten.tanh")
def _tanh(op: AtenOp, a: str) -> str:
    """Compute 2 sigmoid(2 a) - 1; near 0, where this cancels, a convergent of Lambert's fraction.
    No library call, since it must run in the interpreter and on every target. For |a| < 0.4 the
    convergent has an error of at most 1e-17 (a^14 / (13!! 15!!))."""
    square = f"({a} * {a})"
    above = f"(135135.0 + {square} * (17325.0 + {square} * (378.0 + {square})))"
    below = f"(135135.0 + {square} * (62370.0 + {square} * (3150.0 + {square} * 28.0)))"
    far = f"2.0 * tl.sigmoid(2.0 * ({a})) - 1.0"
    return f"tl.where(tl.abs({a}) < 0.4, {a} * {above} / {below}, {far})"


def _call(function: str) -> Write:
    return lambda op, *given: f"{function}({', '.join(given)})"


def _sum(symbol: str) -> Write:
    def write(op: AtenOp, a: str, b: str) -> str:
        alpha = op.value("alpha")
        other = b if alpha == 1 else f"{b} * {number(alpha)}"
        return f"{a} {_sign(op, symbol)} {other}"

    return write


def _sum_with_other(symbol: str) -> Write:
    def write(op: AtenOp, a: str) -> str:
        return f"{a} {_sign(op, symbol)} {number(op.value('other') * op.value('alpha'))}"

    return write


def _sign(op: AtenOp, symbol: str) -> str:
    """Return the sign of a sum; truth values are united, since a sum of bits would carry over."""
    return "|" if dtype_of_value(op.results[0]) == torch.bool else symbol


@formula("aten.pow.Tensor_Scalar")
def _power(op: AtenOp, a: str) -> str:
    exponent = op.value("exponent")
    if exponent in (0.5, -0.5):
        return f"tl.sqrt({a})" if exponent > 0 else f"1.0 / tl.sqrt({a})"
    product = " * ".join([a] * abs(int(exponent)))
    return product if exponent > 0 else f"1.0 / ({product})"


_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def _gelu_inner(a: str) -> str:
    return f"{_SQRT_2_OVER_PI} * ({a} + {_CUBIC} * {a} * {a} * {a})"


@formula("aten.gelu")
def _gelu(op: AtenOp, a: str) -> str:
    if op.value("approximate") == "tanh":
        # 0.5 (1 + tanh(u)) is sigmoid(2 u).
        return f"{a} * tl.sigmoid(2.0 * ({_gelu_inner(a)}))"
    return f"0.5 * {a} * (1.0 + tl.erf({a} * {_SQRT_HALF}))"


@formula("aten.gelu_backward")
def _gelu_backward(op: AtenOp, grad: str, a: str) -> str:
    if op.value("approximate") == "tanh":
        half = f"tl.sigmoid(2.0 * ({_gelu_inner(a)}))"
        slope = f"{2 * _SQRT_2_OVER_PI} * (1.0 + {3 * _CUBIC} * {a} * {a})"
        return f"{grad} * {half} * (1.0 + {a} * (1.0 - {half}) * {slope})"
    density = f"{1 / math.sqrt(2 * math.pi)} * tl.exp(-0.5 * {a} * {a})"
    return f"{grad} * (0.5 * (1.0 + tl.erf({a} * {_SQRT_HALF})) + {a} * {density})"


@formula("aten.silu_backward")
def _silu_backward(op: AtenOp, grad: str, a: str) -> str:
    gate = f"tl.sigmoid({a})"
    return f"{grad} * {gate} * (1.0 + {a} * (1.0 - {gate}))"


@formula("aten.threshold_backward")
def _threshold_backward(op: AtenOp, grad: str, a: str) -> str:
    dtype = dtype_of_value(op.results[0])  # operands are brought to it first
    threshold = rounded(op.value("threshold"), dtype)
    zero = "0.0" if dtype.is_floating_point else "0"
    return f"tl.where({a} <= {number(threshold)}, {zero}, {grad})"


@formula("aten.masked_fill.Scalar")
def _masked_fill(op: AtenOp, a: str, mask: str) -> str:
    value = rounded(op.value("value"), dtype_of_value(op.results[0]))
    return f"tl.where({mask}, {number(value)}, {a})"


@formula("aten.div.Scalar_mode")
def _whole_quotient(op: AtenOp, a: str) -> str:
    """Divide integers by a positive one, by `rounding_mode`; Triton's `//`, `%` round towards 0."""
    other = op.value("other")
    if op.value("rounding_mode") == "trunc":
        return f"{a} // {other}"
    return f"({a} - ({a} % {other} + {other}) % {other}) // {other}"


formula("aten._to_copy")(lambda op, a: a)
formula("aten.abs")(_call("tl.abs"))
formula("aten.cos")(_call("tl.cos"))
formula("aten.exp")(_call("tl.exp"))
formula("aten.log")(_call("tl.log"))
formula("aten.sigmoid")(_call("tl.sigmoid"))
formula("aten.sin")(_call("tl.sin"))
formula("aten.sqrt")(_call("tl.sqrt"))
formula("aten.rsqrt")(lambda op, a: f"1.0 / tl.sqrt({a})")
formula("aten.reciprocal")(lambda op, a: f"1.0 / {a}")
formula("aten.relu")(lambda op, a: f"tl.where({a} < 0, 0, {a})")
formula("aten.silu")(lambda op, a: f"{a} * tl.sigmoid({a})")
formula("aten.sigmoid_backward")(lambda op, g, y: f"{g} * {y} * (1.0 - {y})")
formula("aten.tanh_backward")(lambda op, g, y: f"{g} * (1.0 - {y} * {y})")
formula("aten.add.Tensor", takes_numbers=True)(_sum("+"))
formula("aten.sub.Tensor", takes_numbers=True)(_sum("-"))
formula("aten.mul.Tensor", takes_numbers=True)(_infix("*"))
formula("aten.div.Tensor", takes_numbers=True)(_infix("/"))
formula("aten.add.Scalar")(_sum_with_other("+"))
formula("aten.sub.Scalar")(_sum_with_other("-"))
formula("aten.mul.Scalar")(_with_other("*"))
formula("aten.div.Scalar")(_with_other("/"))
formula("aten.maximum")(_extreme("tl.maximum"))
formula("aten.minimum")(_extreme("tl.minimum"))
formula("aten.where.self")(lambda op, mask, a, b: f"tl.where({mask}, {a}, {b})")
formula("aten.bitwise_and.Tensor", "aten.logical_and")(_infix("&"))
formula("aten.bitwise_or.Tensor", "aten.logical_or")(_infix("|"))
formula("aten.bitwise_not", "aten.logical_not")(lambda op, a: f"~{a}")
for _name, _symbol in zip("eq ne lt le gt ge".split(), "== != < <= > >=".split(), strict=True):
    formula(f"aten.{_name}.Tensor")(_infix(_symbol))
    formula(f"aten.{_name}.Scalar")(_compared_with_other(_symbol))


def common_dtype(dtypes: list[torch.dtype]) -> torch.dtype:
    """Return the dtype in which operands of these dtypes are compared."""
    return computed_in(reduce(torch.promote_types, dtypes))


def converted(name: str, source: torch.dtype, target: torch.dtype) -> str:
    return name if source == target else f"{name}.to({type_text(target)})"


def literal(value: Any, dtype: torch.dtype) -> str:
    """Return the value of a `full` op of a dtype as Triton text."""
    return number(rounded(value, dtype))
