"""Which ATen ops a generated kernel can hold, and which of them fit in one kernel together.

A kernel computes every element of a *space*, which is seen as rows by columns:

- pointwise: all that leaves the kernel has the same number of elements.
- rows: each row of C elements is reduced (softmax, layer norm); what leaves has the elements of
  the space, or one for each row.
- columns: each column is reduced over all rows (gradients of biases). With row reductions the
  columns are the C of a row (gradients of a norm's weight).
- matmul: the space is a matrix product; pointwise ops follow it, or precede one operand.
- lookups: rows are added up where their indices are equal (the gradient of a lookup), and to a
  table, if one is there; pointwise ops precede that. The rows of the space are the indices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, cast

from xdsl.ir import Attribute, Operation, SSAValue

from shardweave.ir.aten import AtenOp
from shardweave.ir.facts import LOOKUP_GRADIENT, facts_of
from shardweave.ir.literals import to_python
from shardweave.ir.storage import outside
from shardweave.ir.strides import dense_strides, expected_strides
from shardweave.ir.types import dtype_of_value, num_elements, shape_of

Family = Literal["pointwise", "rows", "columns", "matmul", "lookups"]
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

WHOLE_ROW = 16384
"""Elements of a row that one program holds at once; longer rows are read in parts, once for each
reduction. A kernel that reduces rows and columns needs whole rows."""

FEW_ROWS = 16
"""Rows that one program of a kernel of columns holds at once, so that its sums are whole."""

GROUP = 16
"""Elements that are a multiple of 16 bytes, what a thread reads at once, of every dtype."""

FEW_ASIDE = 65536
"""Elements of what the first programs of a kernel of rows compute beside their rows, such as tables
of cosines: it takes no launch then."""

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


def is_kernel_alone(op: Operation) -> bool:
    """Whether an op that no other joins has a kernel all the same: what joins parts computes it, or
    it adds up rows by index, for which the library takes several launches."""
    if op.name == LOOKUP_GRADIENT and role_of(op) is not None:
        return isinstance(space_of([op], op.results), IterationSpace)
    return sums_few_rows(op)


def sum_of_few_rows(members: Collection[Operation]) -> AtenOp | None:
    """The reduction of a kernel that is nothing but that of a few rows, if it is.

    What is looked up at 0, 1, 2, .. to the last row is the table, and its gradient the operand:
    that of a table of positions is the sum over the batch.
    """
    plain = [op for op in members if role_of(op) != "view"]
    sums = [op for op in plain if isinstance(op, AtenOp) and sums_few_rows(op)]
    ranges = {_range_of_all_rows(op) for op in plain if op.name == LOOKUP_GRADIENT}
    if len(sums) != 1 or None in ranges:
        return None
    others = [op for op in plain if op not in sums and op.name != LOOKUP_GRADIENT]
    return sums[0] if ranges.issuperset(others) else None


def _range_of_all_rows(gradient: Operation) -> Operation | None:
    """The range that the indices of a lookup's gradient are, if it is that of all its rows."""
    if not isinstance(gradient, AtenOp) or gradient.value("padding_idx") >= 0:
        return None
    owner = outside(gradient.operands[1]).owner
    while isinstance(owner, AtenOp) and facts_of(owner).view == "reshape":
        owner = outside(owner.operands[0]).owner
    if not isinstance(owner, AtenOp) or owner.name != "aten.arange.start_step":
        return None
    shown = owner.value("start"), owner.value("step"), shape_of(owner.results[0])[0]
    return owner if shown == (0, 1, shape_of(gradient.results[0])[0]) else None


@dataclass(frozen=True)
class IterationSpace:
    """What a kernel's programs share out among them: `rows` times `columns` elements.

    aside: elements of values that have nothing to do with the rows, computed by the first programs.
    """

    family: Family
    rows: int
    columns: int
    reduces_columns: bool = False
    reduces_rows: bool = False
    aside: int = 0

    @property
    def holds_columns(self) -> bool:
        """Whether each program has all rows of its columns, and reduces them whole."""
        return self.family == "columns" and self.rows <= FEW_ROWS


def space_of(ops: Collection[Operation], escaping: Iterable[SSAValue]) -> IterationSpace | str:
    """The space of a kernel that computes `ops` and writes `escaping`, or why there is none."""
    members, written = [op for op in ops if isinstance(op, AtenOp)], list(escaping)
    found = _space_of(members, written)
    beside = computed_aside(members, written) if isinstance(found, str) else set[SSAValue]()
    if not beside:
        return found
    owners = {value.owner for value in ancestors(beside, members)}
    rows = _space_of(
        [op for op in members if op not in owners], [v for v in written if v not in beside]
    )
    if isinstance(rows, str) or rows.family != "rows":
        return found
    if rows.reduces_columns or rows.columns > WHOLE_ROW:
        return found
    return replace(rows, aside=max(map(num_elements, beside)))


def computed_aside(members: Collection[AtenOp], written: Iterable[SSAValue]) -> set[SSAValue]:
    """What a kernel writes that has nothing to do with its rows: few elements, all of one size, of
    pointwise ops that nothing else needs."""
    needed = {value: {v.owner for v in ancestors([value], members)} for value in written}
    beside = {
        value
        for value, ops in needed.items()
        if num_elements(value) <= FEW_ASIDE
        and all(isinstance(op, AtenOp) and role_of(op) in _ASIDE for op in ops)
    }
    for value, ops in needed.items():
        if value not in beside and any(ops & needed[other] for other in beside):
            return set()
    return beside if len({num_elements(value) for value in beside}) == 1 else set()


_ASIDE = ("pointwise", "view", "move")


def ancestors(values: Iterable[SSAValue], members: Collection[Operation]) -> set[SSAValue]:
    """Results of members that some values, of theirs, are computed from, and these."""
    inside = set(members)
    found: set[SSAValue] = set()
    pending = list(values)
    while pending:
        value = pending.pop()
        if value.owner in inside and value not in found:
            found.add(value)
            assert isinstance(value.owner, Operation)
            pending += value.owner.operands
    return found


def _space_of(members: list[AtenOp], written: list[SSAValue]) -> IterationSpace | str:
    if any(op.name == LOOKUP_GRADIENT for op in members):
        reducing = sum_of_few_rows(members)
        if reducing is not None:
            return _reduction_space([reducing], list(reductions_of(reducing)), reducing.results)
        return _lookup_space(members, written)
    matmuls = [op for op in members if op.name in MATMULS]
    reductions = [r for op in members if role_of(op) == "reduce" for r in reductions_of(op)]
    if matmuls:
        return _matmul_space(members, matmuls, reductions, written)
    if not written:
        return "nothing leaves it"
    if reductions:
        return _reduction_space(members, reductions, written)
    numel = num_elements(written[0])
    if any(num_elements(value) != numel for value in written):
        return "what leaves it differs in size"
    return IterationSpace("pointwise", 1, numel)


def _lookup_space(members: list[AtenOp], written: list[SSAValue]) -> IterationSpace | str:
    gradient = next(op for op in members if op.name == LOOKUP_GRADIENT)
    (made,) = gradient.results
    last = [op for op in members if any(v is made for v in op.operands)]
    before = [op for op in members if op is not gradient and op not in last]
    if any(role_of(op) not in ("pointwise", "view") for op in before):
        return "only pointwise ops precede the gradient of a lookup"
    if _num_read_whole(gradient, before) > 1:
        return "what the gradient of a lookup adds up is computed of one value of its size"
    count, (num_rows, width) = num_elements(gradient.operands[1]), shape_of(made)
    is_added = len(last) == 1 and _adds_to_table(last[0], made, members)
    if is_added and written == list(last[0].results):
        return IterationSpace("lookups", count, width)
    if last or written != [made]:
        return "the gradient of a lookup is only added to what is there"
    if num_rows < count:  # of 8,192 tokens of two types one program would add up most
        return "a program would add up many rows of equal indices"
    return IterationSpace("lookups", count, width)


def _num_read_whole(gradient: AtenOp, before: list[AtenOp]) -> int:
    """How many numbers of the size of a lookup's gradient are read for it."""
    inside = {value for op in before for value in op.results}
    numel = num_elements(gradient.operands[0])
    read = {v for op in (gradient, *before) for v in op.operands if v not in inside}
    return sum(num_elements(v) == numel and dtype_of_value(v).is_floating_point for v in read)


def _adds_to_table(op: AtenOp, made: SSAValue, members: list[AtenOp]) -> bool:
    """Whether an op adds what is made to a value of its shape and dtype from outside."""
    others = [value for value in op.operands if value is not made]
    return (
        op.name == "aten.add.Tensor"
        and op.value("alpha") == 1
        and len(others) == 1
        and others[0].type == made.type == op.results[0].type
        and others[0].owner not in members
    )


def _matmul_space(
    members: list[AtenOp],
    matmuls: list[AtenOp],
    reductions: list[Reduction],
    written: list[SSAValue],
) -> IterationSpace | str:
    if len(matmuls) > 1 or reductions:
        return "a matrix product shares its kernel with pointwise ops only"
    product = matmuls[0]
    if dtype_of_value(product.results[0]).itemsize == 8:
        return "tensor cores do not multiply float64"
    rows, columns = shape_of(product.results[0])
    if any(num_elements(value) != rows * columns for value in written):
        return "what leaves a matrix product's kernel has the product's elements"
    before = _before(product, members)
    after = [op for op in members if op not in before and op is not product]
    if any(role_of(op) not in ("pointwise", "view") or op.name == "aten.permute" for op in after):
        return "only pointwise ops follow a matrix product"
    if any(len(op.operands) != 1 or role_of(op) not in ("pointwise", "view") for op in before):
        return "only pointwise ops of one operand precede a matrix product"
    if any(r in written for op in before for r in op.results):
        return "what precedes a matrix product is computed more than once"
    return IterationSpace("matmul", rows, columns)


def _before(product: AtenOp, members: list[AtenOp]) -> set[AtenOp]:
    """The members that the product's factors are computed from."""
    inside = set(members)
    found: set[AtenOp] = set()
    facts = facts_of(product).product
    assert facts is not None
    pending = [product.operands[index].owner for index in facts.factors]
    while pending:
        owner = pending.pop()
        if isinstance(owner, AtenOp) and owner in inside and owner not in found:
            found.add(owner)
            pending += [value.owner for value in owner.operands]
    return found


def _reduction_space(
    members: list[AtenOp], reductions: list[Reduction], written: Sequence[SSAValue]
) -> IterationSpace | str:
    if len({(r.numel, r.size) for r in reductions}) != 1:
        return "its reductions are of different shapes"
    numel, size = reductions[0].numel, reductions[0].size
    over = {r.over for r in reductions}
    columns = {value for op in members for value in column_results(op)}
    reduces_columns = any(value in columns for value in written)
    if "row" in over and reduces_columns and size > WHOLE_ROW:
        return f"its rows are longer than {WHOLE_ROW} and it reduces columns too"
    if any(op.name == "aten.permute" for op in members):
        return "a kernel that reduces reads its dims in order"
    inside = set(members)
    if any(use.operation in inside for value in columns for use in value.uses):
        return "a sum over all rows is known only when the kernel ends"
    if "row" not in over and not reduces_columns:
        return "nobody reads what it reduces"
    allowed = {numel, numel // size} if "row" in over else {numel}
    if any(num_elements(value) not in allowed and value not in columns for value in written):
        return "what leaves it is neither of its space nor one for each row"
    family: Family = "rows" if "row" in over else "columns"
    return IterationSpace(family, numel // size, size, reduces_columns, "row" in over)
