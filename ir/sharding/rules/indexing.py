"""Rules of table lookups and their gradients: embedding, gather, scatter, index.

Where the table is sharded along the looked-up dim, each device looks up its own rows: indices
are shifted by the shard's first row, rows outside the shard give 0, and the results are summed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.mesh.placement import DimSharding, Reduction, is_even
from shardweave.ir.sharding.rules.base import (
    Factor,
    Localizer,
    Names,
    Rule,
    named_rule,
    replicated_rule,
    rule,
)
from shardweave.ir.sharding.rules.dims import broadcast, dim_of, passing


@rule
def embedding(op: AtenOp) -> Rule:
    """`v h, ... -> ... h`: shards of v give partial sums: one has a row, the others add zeros."""
    table, index = (shape_of(v) for v in op.operands)
    names, passed = passing(index)
    factors = {"v": Factor(table[0], contiguous=True), "h": Factor(table[1]), **passed}
    return named_rule(
        factors, [[("v",), ("h",)], names], [[*names, ("h",)]], localize=_localize_embedding
    )


def _localize_embedding(local: Localizer) -> Sequence[SSAValue]:
    table, index = local.operands
    if not local.placements[0]:
        return local.clone()
    rows = shape_of(local.op.operands[0])[0]
    index, outside = _shifted(local, index, shape_of(table)[0], rows=rows)
    return _zero_where(local, _as_column(local, outside), *local.clone([table, index]))


@rule
def embedding_dense_backward(op: AtenOp) -> Rule:
    """`... h, ... -> v h`: shards of `...` give partial sums; a shard of v adds its own rows."""
    gradient, index = (shape_of(v) for v in op.operands)
    if op.value("scale_grad_by_freq"):
        # Frequencies count all indices, and those of every row.
        names: Names = [()] * len(index)
        return named_rule({"h": Factor(gradient[-1])}, [[*names, ("h",)], names], [[(), ("h",)]])
    names, passed = passing(index)
    rows = shape_of(op.results[0])[0]
    factors = {"v": Factor(rows, contiguous=True), "h": Factor(gradient[-1]), **passed}
    return named_rule(
        factors,
        [[*names, ("h",)], names],
        [[("v",), ("h",)]],
        linear=(0,),
        localize=_localize_embedding_backward,
    )


def _localize_embedding_backward(local: Localizer) -> Sequence[SSAValue]:
    gradient, index = local.operands
    if not local.placements[0]:
        return local.clone()
    shape = shape_of(index)
    padding = local.op.value("padding_idx")
    shifted, dropped = _shifted(local, index, local.result_shape(0)[0])
    if padding >= 0:
        (is_padding,) = local.emit("aten.eq.Scalar", [index], (shape, torch.bool), other=padding)
        (dropped,) = local.emit("aten.logical_or", [dropped, is_padding], (shape, torch.bool))
    gradients = _zero_where(local, _as_column(local, dropped), gradient)
    return local.clone([*gradients, shifted], padding_idx=-1)


@rule
def gather(op: AtenOp) -> Rule:
    """`b v, b j -> b j` along the dim of v; shards of v give partial sums.

    Other dims can be sharded only where index and table are equally long.
    """
    table, index = (shape_of(v) for v in op.operands)
    if not table or not index:
        return replicated_rule(op)
    dim = dim_of(op, len(table))
    names, passed = passing(table, whole=_unequal(dim, table, index))
    result = list(names)
    names[dim], result[dim] = ("v",), ("j",)
    factors = {
        "v": Factor(table[dim], _sum_of_shards(op), contiguous=True),
        "j": Factor(index[dim]),
        **passed,
    }
    return named_rule(factors, [names, result], [result], linear=[0], localize=_localize_gather)


def _sum_of_shards(op: AtenOp) -> Reduction | None:
    """The reduction of results that lack a factor: "sum"; None for booleans, which do not add."""
    return None if dtype_of_value(op.operands[0]) == torch.bool else "sum"


def _unequal(dim: int, *shapes: tuple[int, ...]) -> list[int]:
    """List `dim` and all dims in which the shapes differ."""
    sizes = zip(*shapes, strict=True)
    return [d for d, size in enumerate(sizes) if d == dim or len(set(size)) > 1]


def _localize_gather(local: Localizer) -> Sequence[SSAValue]:
    table, index = local.operands
    if not local.placements[0]:
        return local.clone()
    dim = dim_of(local.op, len(shape_of(table)))
    rows = shape_of(local.op.operands[0])[dim]
    index, outside = _shifted(local, index, shape_of(table)[dim], rows=rows)
    return _zero_where(local, outside, *local.clone([table, index]))


@rule
def scatter(op: AtenOp) -> Rule:
    """`b v, b ., b . -> b v`: each shard of v takes the entries whose index falls into it.

    Other dims are factors only where index and source are as long as the result. scatter_add with
    index and source of one shape has the rule `b v, b j, b j -> b v`, where j reduces.
    """
    shapes = [shape_of(v) for v in op.operands]
    if not all(shapes):
        return replicated_rule(op)
    dim = dim_of(op, len(shapes[0]))
    names, passed = passing(shapes[0], whole=_unequal(dim, *shapes))
    result = list(names)
    result[dim] = ("v",)
    factors = {"v": Factor(shapes[0][dim], contiguous=True), **passed}
    # A source longer than the index has entries that no mask of the index covers.
    is_maskable = op.name == "aten.scatter_add" and shapes[1] == shapes[2]
    if not is_maskable:
        operands = [result, *[names] * (len(shapes) - 1)]
        return named_rule(factors, operands, [result], localize=_localize_scatter)
    entries = list(names)
    entries[dim] = ("j",)
    factors = {"v": factors["v"], "j": Factor(shapes[1][dim], _sum_of_shards(op)), **passed}
    return named_rule(factors, [result, entries, entries], [result], localize=_localize_scatter_add)


def _localize_scatter_add(local: Localizer) -> Sequence[SSAValue]:
    base, index, source = local.operands
    rows, entries = local.placements[:2]
    if entries:
        base = _once(local, base, entries)
    if not rows:
        return local.clone([base, index, source])
    dim = dim_of(local.op, len(shape_of(base)))
    index, outside = _shifted(local, index, shape_of(base)[dim])
    return local.clone([base, index, *_zero_where(local, outside, source)])


def _once(local: Localizer, value: SSAValue, placements: DimSharding) -> SSAValue:
    """Set a value to 0 on all shards except the first, so that it counts once in their sum."""
    shard = local.shard_index(placements)
    (is_other,) = local.emit("aten.ne.Scalar", [shard], ((), torch.bool), other=0)
    return _zero_where(local, is_other, value)[0]


def _localize_scatter(local: Localizer) -> Sequence[SSAValue]:
    """Write entries outside the shard to an extra row at its end, which is sliced off."""
    base, index, *source = local.operands
    if not local.placements[0]:
        return local.clone()
    shape, dtype = list(shape_of(base)), dtype_of_value(base)
    dim = dim_of(local.op, len(shape))
    size = shape[dim]
    index, _ = _shifted(local, index, size, outside=size)
    longer = [*shape[:dim], size + 1, *shape[dim + 1 :]]
    pad = [0, 0] * (len(shape) - 1 - dim) + [0, 1]
    (base,) = local.emit("aten.constant_pad_nd", [base], (longer, dtype), pad=pad)
    values = {n: local.op.value(n) for n in ("dim", "value") if local.op.signature.parameter(n)}
    (written,) = local.emit(local.op.name, [base, index, *source], (longer, dtype), **values)
    return local.emit("aten.slice.Tensor", [written], (shape, dtype), dim=dim, start=0)


def _shifted(
    local: Localizer, index: SSAValue, size: int, outside: int = 0, rows: int = 0
) -> tuple[SSAValue, SSAValue]:
    """Emit indices relative to the shard's first row, and a mask of those outside its `size` rows.

    Masked indices become `outside` or, if `rows` (the table's global size) is given, `_filler`
    rows: then an index outside the table stays out of range, and every rank raises torch's error.
    The looked-up dim is factor 0 of all rules of this file.
    """
    shape, dtype = shape_of(index), dtype_of_value(index)
    shard = local.shard_index(local.placements[0])
    (start,) = local.emit("aten.mul.Scalar", [shard], ((), torch.int64), other=size)
    if dtype != torch.int64:
        # An index of no dims would otherwise take on the type of its start.
        (start,) = local.emit("aten._to_copy", [start], ((), dtype))
    (shifted,) = local.emit("aten.sub.Tensor", [index, start], (shape, dtype))
    (below,) = local.emit("aten.lt.Scalar", [shifted], (shape, torch.bool), other=0)
    (above,) = local.emit("aten.ge.Scalar", [shifted], (shape, torch.bool), other=size)
    (is_outside,) = local.emit("aten.logical_or", [below, above], (shape, torch.bool))
    if not rows:
        filled = local.emit(
            "aten.masked_fill.Scalar", [shifted, is_outside], (shape, dtype), value=outside
        )
        return filled[0], is_outside
    if not is_even(local.placements[0], rows):
        (beyond,) = local.emit("aten.ge.Scalar", [index], (shape, torch.bool), other=rows)
        (is_outside,) = local.emit("aten.logical_or", [is_outside, beyond], (shape, torch.bool))
    filler = _filler(local, index, size, rows)
    (shifted,) = local.emit("aten.where.self", [is_outside, filler, shifted], (shape, dtype))
    return shifted, is_outside


def _filler(local: Localizer, index: SSAValue, size: int, rows: int) -> SSAValue:
    """Map valid rows of the table (of `rows`) to valid rows of the shard (of `size`), and invalid
    to invalid ones. If `size` divides `rows`, divides the index by the number of shards; else
    subtracts the number of rows that the shard lacks, stopping at 0."""
    type_ = shape_of(index), dtype_of_value(index)
    if rows % size == 0:
        return local.emit(
            "aten.div.Scalar_mode", [index], type_, other=rows // size, rounding_mode="floor"
        )[0]
    (less,) = local.emit("aten.sub.Scalar", [index], type_, other=rows - size)
    (negative,) = local.emit("aten.clamp_max", [index], type_, max=0)
    return local.emit("aten.maximum", [less, negative], type_)[0]


def _as_column(local: Localizer, mask: SSAValue) -> SSAValue:
    """Append a dim of size 1 to the mask."""
    (column,) = local.emit("aten.view", [mask], ((*shape_of(mask), 1), torch.bool))
    return column


def _zero_where(local: Localizer, mask: SSAValue, value: SSAValue) -> Sequence[SSAValue]:
    type_ = shape_of(value), dtype_of_value(value)
    return local.emit("aten.masked_fill.Scalar", [value, mask], type_, value=0)


@rule
def index_select(op: AtenOp) -> Rule:
    """`. h, j -> j h`"""
    table, index = (shape_of(v) for v in op.operands)
    if not table or not index:
        return replicated_rule(op)
    factors, whole, selected = _selection(op, table, index[0])
    return named_rule(factors, [whole, [("j",)]], [selected])


@rule
def index_select_backward(op: AtenOp) -> Rule:
    """`j h, j -> . h`: shards of j give partial sums: selected rows are added to their sources."""
    grad, index = (shape_of(v) for v in op.operands)
    if not grad or not index:
        return replicated_rule(op)
    factors, whole, selected = _selection(op, grad, index[0])
    return named_rule(factors, [selected, [("j",)]], [whole], linear=(0,))


def _selection(
    op: AtenOp, shape: Sequence[int], num_rows: int
) -> tuple[dict[str, Factor], Names, Names]:
    """Return factors, table's dims and selection's dims of an op that selects `num_rows` rows."""
    dim = dim_of(op, len(shape))
    whole, passed = passing(shape, whole=[dim])
    selected = list(whole)
    selected[dim] = ("j",)
    return {"j": Factor(num_rows), **passed}, whole, selected


@rule
def index(op: AtenOp) -> Rule:
    """`. h, j, j -> j h`: the dims of indices, which broadcast, and the unindexed dims pass.

    For index_put, `. h, ., ., . h -> . h`: only unindexed dims pass.
    """
    table, given = shape_of(op.operands[0]), op.tensor("indices")
    assert isinstance(given, list)
    indices = {d: index for d, index in enumerate(given) if index is not None}
    if any(dtype_of_value(v) in (torch.bool, torch.uint8) for v in indices.values()):
        # A mask takes as many entries as it has ones.
        return replicated_rule(op)
    is_put = op.name == "aten.index_put"
    shapes = [shape_of(v) for v in indices.values()]
    joint = np.broadcast_shapes(*shapes)
    names, passed = passing(table, whole=indices)
    whole = range(len(joint)) if is_put else ()
    joint_names, factors = passing(joint, whole=whole, prefix="i")
    operands = [names, *(broadcast(shape, joint, joint_names) for shape in shapes)]
    kept = [d for d in range(len(table)) if d not in indices]
    first, last = min(indices), max(indices)
    # As in numpy, the dims of adjacent indices replace the indexed dims; else they come first.
    at = first if last - first + 1 == len(indices) else 0
    selected = [*(names[d] for d in kept[:at]), *joint_names, *(names[d] for d in kept[at:])]
    if is_put:
        shape = [*(table[d] for d in kept[:at]), *joint, *(table[d] for d in kept[at:])]
        operands.append(broadcast(shape_of(op.operands[-1]), shape, selected))
    linear = () if is_put else (0,)
    return named_rule(passed | factors, operands, [names if is_put else selected], linear=linear)


@rule
def indexed_dim(op: AtenOp) -> Rule:
    """`. h, ., . h -> . h`: the dim that is written by index cannot be sharded.

    Other dims can, where all operands are equally long.
    """
    shapes = [shape_of(v) for v in op.operands]
    rank = len(shapes[0])
    if not rank:
        return replicated_rule(op)
    alike = [shape for shape in shapes if len(shape) == rank]
    names, factors = passing(shapes[0], whole=_unequal(dim_of(op, rank), *alike))
    operands = [names if len(shape) == rank else [()] * len(shape) for shape in shapes]
    return named_rule(factors, operands, [names])
