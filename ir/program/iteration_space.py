"""Iteration spaces: the elements that a generated kernel computes, and the ops that fit in one.

A kernel computes every element of a *space*, which is seen as rows by columns:

- pointwise: all values that the kernel writes have the same number of elements.
- rows: each row of C elements is reduced (softmax, layer norm); a written value has the elements of
  the space, or one for each row.
- columns: each column is reduced over all rows (gradients of biases). With row reductions the
  columns are the C of a row (gradients of a norm's weight).
- matmul: the space is a matrix product; pointwise ops follow it, or precede one operand.
- lookups: rows are added up where their indices are equal (the gradient of a lookup), and to a
  table, if one is there; pointwise ops precede that. The rows of the space are the indices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, num_elements, shape_of
from shardweave.ir.ops.fusible import (
    FEW_ROWS,
    Reduction,
    column_results,
    reductions_of,
    role_of,
    sums_few_rows,
)
from shardweave.ir.ops.records.indexing import LOOKUP_GRADIENT
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.storage import outside

Family = Literal["pointwise", "rows", "columns", "matmul", "lookups"]

WHOLE_ROW = 16384
"""Elements of a row that one program holds at once; longer rows are read in parts, once for each
reduction. A kernel that reduces rows and columns needs whole rows."""

FEW_ASIDE = 65536
"""Most elements of a side value, such as a table of cosines, that the first programs of a rows
kernel compute beside their rows, which saves a launch."""

_ASIDE = ("pointwise", "view", "move")
"""The roles of ops that may compute side values."""


@dataclass(frozen=True)
class IterationSpace:
    """The elements that a kernel's program instances divide among them: `rows` times `columns`.

    aside: number of elements of a side value, unrelated to the rows, that the first instances
    compute; or 0.
    """

    family: Family
    rows: int
    columns: int
    reduces_columns: bool = False
    reduces_rows: bool = False
    aside: int = 0

    @property
    def holds_columns(self) -> bool:
        """True if each program instance has all rows of its columns, and reduces whole columns."""
        return self.family == "columns" and self.rows <= FEW_ROWS


def space_of(ops: Collection[Operation], escaping: Iterable[SSAValue]) -> IterationSpace | str:
    """The space of a kernel that computes `ops` and writes `escaping`, or why it has none."""
    members, written = [op for op in ops if isinstance(op, AtenOp)], list(escaping)
    space = _space_of(members, written)
    beside = computed_aside(members, written) if isinstance(space, str) else set[SSAValue]()
    if not beside:
        return space
    owners = {value.owner for value in ancestors(beside, members)}
    rows = _space_of(
        [op for op in members if op not in owners], [v for v in written if v not in beside]
    )
    if isinstance(rows, str) or rows.family != "rows":
        return space
    if rows.reduces_columns or rows.columns > WHOLE_ROW:
        return space
    return replace(rows, aside=max(map(num_elements, beside)))


def computed_aside(members: Collection[AtenOp], written: Iterable[SSAValue]) -> set[SSAValue]:
    """Find the side values of a kernel: of at most `FEW_ASIDE` elements, all of one size, computed
    by pointwise ops, views and moves from which no other written value is computed."""
    values = list(written)
    beside: dict[SSAValue, set[SSAValue]] = {}
    for value in values:
        if num_elements(value) <= FEW_ASIDE:
            needed = ancestors([value], members)
            if all(isinstance(v.owner, AtenOp) and role_of(v.owner) in _ASIDE for v in needed):
                beside[value] = needed
    if len({num_elements(value) for value in beside}) != 1:
        return set()
    others = ancestors((value for value in values if value not in beside), members)
    is_apart = all(others.isdisjoint(needed) for needed in beside.values())
    return set(beside) if is_apart else set()


def ancestors(values: Iterable[SSAValue], members: Collection[Operation]) -> set[SSAValue]:
    """Results of `members` that `values` are computed from, including results in `values`."""
    inside = set(members)
    reached: set[SSAValue] = set()
    pending = list(values)
    while pending:
        value = pending.pop()
        if value.owner in inside and value not in reached:
            reached.add(value)
            assert isinstance(value.owner, Operation)
            pending += value.owner.operands
    return reached


def is_kernel_alone(op: Operation) -> bool:
    """True if an op gets a kernel even if no other is fused with it: a sum of a few rows, or the
    gradient of a lookup, for which the library takes several launches."""
    if op.name == LOOKUP_GRADIENT and role_of(op) is not None:
        return isinstance(space_of([op], op.results), IterationSpace)
    return sums_few_rows(op)


def sum_of_few_rows(members: Collection[Operation]) -> AtenOp | None:
    """The reduction in a kernel that only sums a few rows; None for other kernels.

    A lookup at all rows 0, 1, 2, .. is the identity, and so is its gradient: the gradient of a
    table of positions is a sum over the batch.
    """
    plain = [op for op in members if role_of(op) != "view"]
    sums = [op for op in plain if isinstance(op, AtenOp) and sums_few_rows(op)]
    ranges = {_range_of_all_rows(op) for op in plain if op.name == LOOKUP_GRADIENT}
    if len(sums) != 1 or None in ranges:
        return None
    others = [op for op in plain if op not in sums and op.name != LOOKUP_GRADIENT]
    return sums[0] if ranges.issuperset(others) else None


def _range_of_all_rows(gradient: Operation) -> Operation | None:
    """The op that makes a lookup gradient's indices, if they are 0, 1, .. for all rows; or None."""
    if not isinstance(gradient, AtenOp) or gradient.value("padding_idx") >= 0:
        return None
    owner = outside(gradient.operands[1]).owner
    while isinstance(owner, AtenOp) and spec_of(owner).view == "reshape":
        owner = outside(owner.operands[0]).owner
    if not isinstance(owner, AtenOp) or owner.name != "aten.arange.start_step":
        return None
    shown = owner.value("start"), owner.value("step"), shape_of(owner.results[0])[0]
    return owner if shown == (0, 1, shape_of(gradient.results[0])[0]) else None


def _space_of(members: list[AtenOp], written: list[SSAValue]) -> IterationSpace | str:
    if any(op.name == LOOKUP_GRADIENT for op in members):
        reducing = sum_of_few_rows(members)
        if reducing is not None:
            return _reduction_space([reducing], list(reductions_of(reducing)), reducing.results)
        return _lookup_space(members, written)
    matmuls = [op for op in members if spec_of(op).role == "matmul"]
    reductions = [r for op in members if role_of(op) == "reduce" for r in reductions_of(op)]
    if matmuls:
        return _matmul_space(members, matmuls, reductions, written)
    if not written:
        return "nothing leaves it"
    if reductions:
        return _reduction_space(members, reductions, written)
    numel = num_elements(written[0])
    if any(num_elements(value) != numel for value in written):
        return "the values that it writes differ in size"
    return IterationSpace("pointwise", 1, numel)


def _lookup_space(members: list[AtenOp], written: list[SSAValue]) -> IterationSpace | str:
    gradient = next(op for op in members if op.name == LOOKUP_GRADIENT)
    (made,) = gradient.results
    last = [op for op in members if any(v is made for v in op.operands)]
    before = [op for op in members if op is not gradient and op not in last]
    if any(role_of(op) not in ("pointwise", "view") for op in before):
        return "only pointwise ops precede the gradient of a lookup"
    if _num_read_whole(gradient, before) > 1:
        return "the rows added by a lookup's gradient need at most one input of their size"
    count, (num_rows, width) = num_elements(gradient.operands[1]), shape_of(made)
    is_added = len(last) == 1 and _adds_to_table(last[0], made, members)
    if is_added and written == list(last[0].results):
        return IterationSpace("lookups", count, width)
    if last or written != [made]:
        return "the gradient of a lookup may only be added to a table"
    if num_rows < count:  # of 8,192 tokens of two types one program would add up most
        return "a program would add up many rows of equal indices"
    return IterationSpace("lookups", count, width)


def _num_read_whole(gradient: AtenOp, before: list[AtenOp]) -> int:
    """Count the values read for a lookup's gradient that have its operand's size."""
    inside = {value for op in before for value in op.results}
    numel = num_elements(gradient.operands[0])
    read = {v for op in (gradient, *before) for v in op.operands if v not in inside}
    return sum(num_elements(v) == numel and dtype_of_value(v).is_floating_point for v in read)


def _adds_to_table(op: AtenOp, made: SSAValue, members: list[AtenOp]) -> bool:
    """True if an op adds `made` to a value of its shape and dtype from outside the kernel."""
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
        return "a matrix product's kernel writes only values of the product's size"
    facts = spec_of(product).product
    assert facts is not None
    needed = ancestors([product.operands[index] for index in facts.factors], members)
    before = [op for op in members if not needed.isdisjoint(op.results)]
    after = [op for op in members if op not in before and op is not product]
    if any(role_of(op) not in ("pointwise", "view") or op.name == "aten.permute" for op in after):
        return "only pointwise ops follow a matrix product"
    if any(len(op.operands) != 1 or role_of(op) not in ("pointwise", "view") for op in before):
        return "only pointwise ops of one operand precede a matrix product"
    if any(r in written for op in before for r in op.results):
        return "an op before a matrix product would be computed more than once"
    return IterationSpace("matmul", rows, columns)


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
        return "no op reads the results of its reductions"
    allowed = {numel, numel // size} if "row" in over else {numel}
    if any(num_elements(value) not in allowed and value not in columns for value in written):
        return "a value that it writes has neither the size of its space nor one element a row"
    family: Family = "rows" if "row" in over else "columns"
    return IterationSpace(family, numel // size, size, reduces_columns, "row" in over)
