"""Lookups in tables, and their gradients."""

from __future__ import annotations

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, num_elements, shape_of
from shardweave.ir.ops.spec import OpSpec, family, result_shape

LOOKUP_GRADIENT = "aten.embedding_dense_backward"
"""The op that adds up gradient rows of equal index."""

MOST_INDICES = 16384
"""Most indices of a lookup's gradient in a kernel, which compares all pairs of them: 2 GiB from the
cache at most, less than 1 ms on an H100."""


def _picks_one(op: AtenOp) -> bool:
    table, index = (shape_of(value) for value in op.operands[:2])
    is_last = op.value("dim") % len(table) == len(table) - 1
    return is_last and index[-1:] == (1,) and table[:-1] == index[:-1]


def _has_few_indices(op: AtenOp) -> bool:
    """True if a kernel can hold a lookup's gradient: few indices, floats, no frequency scaling."""
    is_float = dtype_of_value(op.results[0]).is_floating_point
    few = num_elements(op.operands[1]) <= MOST_INDICES
    return few and is_float and not op.value("scale_grad_by_freq")


SPECS = (
    OpSpec(
        "aten.embedding",
        rule="embedding",
        is_lookup=True,
        has_indices=True,
        is_direct=True,
        role="move",
    ),
    OpSpec(
        LOOKUP_GRADIENT,
        rule="embedding_dense_backward",
        has_indices=True,
        role="lookup gradient",
        fits=_has_few_indices,
        derived={"num_weights": lambda op: result_shape(op)[0]},
    ),
    OpSpec(
        "aten.gather",
        rule="gather",
        is_lookup=True,
        has_indices=True,
        is_direct=True,
        role="move",
        fits=_picks_one,
    ),
    OpSpec(
        "aten.scatter_add",
        rule="scatter",
        has_indices=True,
        overwrites=True,
        is_direct=True,
        role="move",
        fits=_picks_one,
    ),
    *family("scatter.src scatter.value", rule="scatter", has_indices=True, overwrites=True),
    *family("masked_scatter _unsafe_index_put", overwrites=True),
    OpSpec("aten.index_select", rule="index_select", is_lookup=True, has_indices=True),
    OpSpec(
        "aten.index_select_backward",
        rule="index_select_backward",
        has_indices=True,
        derived={"self_sizes": result_shape},
    ),
    OpSpec("aten.index.Tensor", rule="index", is_lookup=True, has_indices=True),
    *family(
        """
        index_add index_copy index_reduce index_fill.int_Scalar index_fill.int_Tensor
        scatter.reduce scatter.value_reduce scatter_reduce.two
        """,
        rule="indexed_dim",
        has_indices=True,
        overwrites=True,
    ),
    OpSpec("aten.bucketize.Tensor", rule="among_boundaries"),
    OpSpec("aten.isin.Tensor_Tensor", rule="among_boundaries", needs_contiguous=True),
    OpSpec("aten.searchsorted.Tensor", rule="searchsorted"),
    *family("segment_reduce _segment_reduce_backward", rule="segments"),
    OpSpec("aten.index_put", rule="index", has_indices=True, overwrites=True),
    *family(
        "nll_loss2d_backward _embedding_bag _embedding_bag_backward",
        needs_contiguous=True,
    ),
)
