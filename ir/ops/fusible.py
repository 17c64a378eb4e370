"""Which ATen ops a generated kernel can hold, and as what.

Pointwise ops, views and moves make elements of others; reductions are of rows or of columns
(`reductions_of`). Which of them fit in one kernel together: `ir.program.iteration_space`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast

from xdsl.ir import Attribute, Operation, SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.literals import to_python
from shardweave.ir.dialects.types import dtype_of_value, num_elements, shape_of
from shardweave.ir.ops.facts import LOOKUP_GRADIENT, facts_of
from shardweave.ir.ops.strides import dense_strides, expected_strides

Role = Literal["pointwise", "view", "move", "reduce", "matmul", "lookup gradient"]

POINTWISE = frozenset(
    f"aten.{name}"
    for name in (
        "_to_copy", "abs", "add.Scalar", "add.Tensor", "arange.start_step", "bitwise_and.Tensor",
        "bitwise_not", "bitwise_or.Tensor", "cos", "div.Scalar", "div.Scalar_mode", "div.Tensor",
        "eq.Scalar", "eq.Tensor", "exp",
        "ge.Scalar", "ge.Tensor", "gelu", "gelu_backward", "gt.Scalar", "gt.Tensor", "le.Scalar",
        "le.Tensor", "log", "logical_and", "logical_not", "logical_or", "lt.Scalar", "lt.Tensor",
        "masked_fill.Scalar", "maximum", "minimum", "mul.Scalar", "mul.Tensor", "ne.Scalar",
        "ne.Tensor", "neg", "pow.Tensor_Scalar", "reciprocal", "relu", "rsqrt", "sigmoid",
        "sigmoid_backward", "silu", "silu_backward", "sin", "sqrt", "sub.Scalar", "sub.Tensor",
        "tanh", "tanh_backward", "threshold_backward", "where.self", "full",
    )
)  # fmt: skip
MOVES = frozenset(
    f"aten.{name}"
    for name in (
        "slice.Tensor", "select.int", "slice_backward", "select_backward", "cat", "embedding",
        "gather", "scatter_add", "constant_pad_nd",
    )
)  # fmt: skip
"""Ops whose elements are those of an operand, found by an index."""

TRIGONOMETRIC = frozenset({"aten.sin", "aten.cos"})
"""Pointwise ops whose argument reduction takes many instructions and registers."""

MATMULS = frozenset({"aten.mm", "aten.addmm"})
LAYER_NORM, LAYER_NORM_BACKWARD = "aten.native_layer_norm", "aten.native_layer_norm_backward"
_TRAILING = frozenset({"aten._softmax", "aten._safe_softmax", "aten._softmax_backward_data"})
_OVER_DIMS = frozenset({"aten.sum.dim_IntList", "aten.amax", "aten.amin"})
_REDUCTIONS = _TRAILING | _OVER_DIMS | {LAYER_NORM, LAYER_NORM_BACKWARD}

ROLES: dict[str, Role] = {
    **dict.fromkeys(POINTWISE, "pointwise"),
    **dict.fromkeys(MOVES, "move"),
    **dict.fromkeys(_REDUCTIONS, "reduce"),
    **dict.fromkeys(MATMULS, "matmul"),
    LOOKUP_GRADIENT: "lookup gradient",
}  # type: ignore[dict-item]
"""Of the ops that a kernel may hold, beside the layouts of the op facts."""

MAX_OPS = 96
MAX_NUMEL = 2**31 - 2**17
"""Elements of a value, so that 32 bits hold the places of a last block that reaches beyond it."""

MAX_VALUES = 32
"""Inputs and outputs of one kernel."""

ONE_PROGRAM = 65536
"""Elements that are reduced to one number by one program, which reads a quarter of a MiB in about
the time that a launch takes, 3 us; more are the library's, which sends many programs."""

FEW_ROWS = 16
"""Rows that one program of a kernel of columns holds at once, so that its sums are whole."""

GROUP = 16
"""Elements that are a multiple of 16 bytes, what a thread reads at once, of every dtype."""

MOST_INDICES = 16384
"""Of the gradient of a lookup in a kernel, which compares them each with each: 2 GiB out of the
cache at most, less than 1 ms on an H100."""

_UNARY_POWERS = frozenset({-3, -2, -1, -0.5, 0.5, 1, 2, 3, 4})


def role_of(op: Operation) -> Role | None:
    """What an op is to a kernel; None if no kernel can hold it."""
    role = "view" if facts_of(op).is_layout else ROLES.get(op.name)
    if role is None or not isinstance(op, AtenOp):
        return None
    if not all(0 < num_elements(value) <= MAX_NUMEL for value in (*op.operands, *op.results)):
        return None
    special = _SPECIAL.get(op.name)
    return role if special is None or special(op) else None


def _picks_one(op: AtenOp) -> bool:
    """gather and scatter_add of one element for each row."""
    table, index = (shape_of(value) for value in op.operands[:2])
    is_last = op.value("dim") % len(table) == len(table) - 1
    return is_last and index[-1:] == (1,) and table[:-1] == index[:-1]


def _is_last_dim(op: AtenOp) -> bool:
    rank = len(shape_of(op.results[0]))
    return op.value("dim") % rank == rank - 1


def _divides_integers(op: AtenOp) -> bool:
    """A division of integers by a positive one, down to a whole number."""
    is_integer = all(not dtype_of_value(v).is_floating_point for v in (*op.operands, *op.results))
    other = op.value("other")
    return is_integer and isinstance(other, int) and other > 0 and bool(op.value("rounding_mode"))


def _counts_up(op: AtenOp) -> bool:
    """A range of integers, upwards."""
    given = (op.value("start"), op.value("step"))
    is_integer = not dtype_of_value(op.results[0]).is_floating_point
    return is_integer and all(isinstance(value, int) for value in given) and given[1] > 0


def padded_dim(op: AtenOp) -> tuple[int, int] | None:
    """The only dim that a padding makes longer, and by how much before; None if it is another."""
    pad: list[int] = op.value("pad")
    pairs = list(zip(pad[::2], pad[1::2], strict=True))
    wide = [number for number, pair in enumerate(pairs) if pair != (0, 0)]
    if len(wide) != 1 or min(pairs[wide[0]]) < 0:
        return None
    return len(shape_of(op.results[0])) - 1 - wide[0], pairs[wide[0]][0]


def _is_few_indices(op: AtenOp) -> bool:
    """Of a lookup's gradient, whose rows are not scaled by how often there is an index."""
    is_float = dtype_of_value(op.results[0]).is_floating_point
    few = num_elements(op.operands[1]) <= MOST_INDICES
    return few and is_float and not op.value("scale_grad_by_freq")


_SPECIAL: dict[str, Callable[[AtenOp], bool]] = {
    "aten.arange.start_step": _counts_up,
    "aten.constant_pad_nd": lambda op: padded_dim(op) is not None,
    "aten.div.Scalar_mode": _divides_integers,
    "aten.pow.Tensor_Scalar": lambda op: op.value("exponent") in _UNARY_POWERS,
    "aten.gather": _picks_one,
    "aten.scatter_add": _picks_one,
    "aten.slice.Tensor": lambda op: op.value("step") == 1,
    "aten.slice_backward": lambda op: op.value("step") == 1,
    LOOKUP_GRADIENT: _is_few_indices,
    "aten.addmm": lambda op: op.value("beta") == 1 and op.value("alpha") == 1,
    **dict.fromkeys(_OVER_DIMS, lambda op: bool(reductions_of(op))),
    **dict.fromkeys(_TRAILING, _is_last_dim),
}
"""What else must hold of an op for a kernel to hold it."""


@dataclass(frozen=True)
class Reduction:
    """A reduction of a space of `numel` elements: of its rows or its columns, `size` long rows."""

    over: Literal["row", "column"]
    numel: int
    size: int


def reductions_of(op: AtenOp) -> tuple[Reduction, ...]:
    """The reductions that an op makes; none if it reduces neither trailing nor leading dims."""
    attributes = tuple(op.properties.get(name) for name in ("dim", "output_mask"))
    return _reductions(
        op.name,
        tuple(shape_of(value) for value in op.operands),
        tuple(shape_of(value) for value in op.results),
        attributes,
    )


Shapes = tuple[tuple[int, ...], ...]


@cache
def _reductions(
    name: str, operands: Shapes, results: Shapes, attributes: tuple[Attribute | None, ...]
) -> tuple[Reduction, ...]:
    numel = math.prod(operands[0])
    if name in _TRAILING:
        return (Reduction("row", numel, operands[0][-1]),)
    if name == LAYER_NORM:
        return (Reduction("row", numel, numel // math.prod(results[1])),)
    if name == LAYER_NORM_BACKWARD:
        size = numel // math.prod(operands[2])
        mask = cast("list[bool]", to_python(cast(Attribute, attributes[1])))
        found = [Reduction("row", numel, size)] if mask[0] else []
        return (*found, *([Reduction("column", numel, size)] if mask[1] or mask[2] else []))
    return _reductions_of_dims(operands[0], attributes[0])


def _reductions_of_dims(shape: tuple[int, ...], dim: Attribute | None) -> tuple[Reduction, ...]:
    given = cast("list[int]", to_python(dim)) if dim is not None else []
    dims = sorted(d % len(shape) for d in given) if shape else []
    kept = [d for d in range(len(shape)) if d not in dims and shape[d] != 1]
    cut = [d for d in dims if shape[d] != 1]
    numel = math.prod(shape)
    size = math.prod(shape[d] for d in cut)
    if not cut:
        return ()
    if not kept:
        return (Reduction("row", numel, numel),) if numel <= ONE_PROGRAM else ()
    if min(cut) > max(kept):
        return (Reduction("row", numel, size),)
    if max(cut) < min(kept):
        return (Reduction("column", numel, numel // size),)
    return ()


def column_results(op: AtenOp) -> list[SSAValue]:
    """The results of an op that are reductions of columns."""
    if op.name == LAYER_NORM_BACKWARD:
        first = int(bool(op.value("output_mask")[0]))
        return list(op.results[first:])
    found = reductions_of(op) if role_of(op) == "reduce" else ()
    return list(op.results) if any(r.over == "column" for r in found) else []


def sums_few_rows(op: Operation) -> bool:
    """Whether an op reduces a few rows, dense in memory, to columns.

    What joins the parts that kernels leave does just that, so that the op needs no kernel.
    """
    if op.name not in _OVER_DIMS or not isinstance(op, AtenOp):
        return False
    rows = op.operands[0]
    is_dense = expected_strides(rows) == dense_strides(shape_of(rows))
    return is_dense and any(
        r.over == "column" and r.numel // r.size <= FEW_ROWS and r.size % GROUP == 0
        for r in reductions_of(op)
    )
