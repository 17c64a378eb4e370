"""Matrix products, convolutions and factorisations."""

from __future__ import annotations

import math

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import num_elements, shape_of
from shardweave.ir.library import grouped
from shardweave.ir.ops.spec import OpSpec, Product, family


def _convolution_flops(op: AtenOp) -> int:
    """Count FLOPs: a result element sums over the kernel and the input channels of its group."""
    return 2 * num_elements(op.results[0]) * math.prod(shape_of(op.operands[1])[1:])


def _convolution_backward_flops(op: AtenOp) -> int:
    grad, _, weight = op.operands[:3]
    forward = 2 * num_elements(grad) * math.prod(shape_of(weight)[1:])
    return forward * sum(bool(wanted) for wanted in op.value("output_mask")[:2])


def _bias_sizes(op: AtenOp) -> list[int] | None:
    return list(shape_of(op.results[-1])) if op.value("output_mask")[2] else None


def _grouped_flops(op: AtenOp) -> int:
    """Count FLOPs as if rows were spread evenly over all groups; a local op may have fewer groups.
    Ragged rows all belong to the op's own groups."""
    rows, other = op.operands[:2]
    own = 1 if is_ragged(op) else shape_of(op.operands[2])[0] / op.value("groups")
    return round(2 * shape_of(rows)[0] * shape_of(rows)[1] * shape_of(other)[-1] * own)


def is_ragged(op: AtenOp) -> bool:
    """True if a grouped product has ragged rows: the rows of a device's own groups, however
    many."""
    return op.tensor("bounds") is not None


SPECS = (
    OpSpec(
        "aten.mm",
        notation="i k, k j -> i j",
        zero="any",
        product=Product((0, 1), weight=1),
        works_in_parts=True,
        is_direct=True,
        role="matmul",
    ),
    OpSpec(
        "aten.bmm",
        notation="b i k, b k j -> b i j",
        zero="any",
        product=Product((0, 1), weight=1),
        is_direct=True,
    ),
    OpSpec(
        grouped.GROUPED_MM,
        rule="grouped",
        notation="i k, e k j, e, e -> i j",
        zero="any",
        product=Product((0, 1), weight=1),
        grouped="rows",
        flops=_grouped_flops,
    ),
    OpSpec(
        grouped.GROUPED_OUTER,
        rule="grouped",
        notation="i k, i j, e, e -> e k j",
        zero="any",
        grouped="matrices",
        flops=_grouped_flops,
    ),
    OpSpec(grouped.ROW_BOUNDS),
    OpSpec(grouped.ROW_ROUTES),
    OpSpec(grouped.OWN_ROWS, rule="ragged_rows", ragged="begin"),
    OpSpec(grouped.ALL_ROWS, rule="ragged_rows", ragged="end"),
    OpSpec("aten._scaled_mm", rule="scaled_product", product=Product((0, 1), weight=1)),
    OpSpec("aten.mv", notation="i k, k -> i", zero="any"),
    OpSpec("aten.dot", notation="k, k ->", zero="any"),
    OpSpec(
        "aten.addmm",
        rule="added_product",
        notation="i k, k j -> i j",
        product=Product((1, 2), weight=2, addend=0, plain="aten.mm"),
        works_in_parts=True,
        is_direct=True,
        role="matmul",
        fits=lambda op: op.value("beta") == 1 and op.value("alpha") == 1,
    ),
    OpSpec("aten.addmv", rule="added_product", notation="i k, k -> i"),
    OpSpec(
        "aten.baddbmm",
        rule="added_product",
        notation="b i k, b k j -> b i j",
        product=Product((1, 2), addend=0),
        is_direct=True,
    ),
    OpSpec(
        "aten.convolution",
        rule="convolution",
        product=Product((0, 1), weight=1),
        flops=_convolution_flops,
    ),
    OpSpec(
        "aten.convolution_backward",
        rule="convolution_backward",
        derived={"bias_sizes": _bias_sizes},
        flops=_convolution_backward_flops,
    ),
    # Factors are those of the matrix as memory has it.
    *family("_linalg_det _linalg_slogdet", rule="matrices", needs_contiguous=True),
    *family(
        """
        linalg_inv_ex linalg_cholesky_ex _linalg_solve_ex _linalg_svd linalg_qr linalg_lu
        linalg_lu_factor_ex linalg_lu_solve linalg_solve_triangular triangular_solve
        cholesky_inverse cholesky_solve _linalg_eigh linalg_eig linalg_matrix_exp lu_unpack
        linalg_ldl_factor_ex linalg_ldl_solve linalg_householder_product geqrf ormqr
        """,
        rule="matrices",
    ),
    *family("_pdist_forward _pdist_backward", needs_contiguous=True),
    *family("_cdist_forward _cdist_backward", rule="distances"),
    OpSpec("aten.linalg_cross", rule="cross"),
)
