"""Kernels of a matrix product with pointwise ops around it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from xdsl.ir import SSAValue

from shardweave.backends.triton.formulas import computed_in, type_text
from shardweave.backends.triton.index import Base, of_base, unraveled
from shardweave.backends.triton.region import Region
from shardweave.backends.triton.source import Config, Kernel, Signature, render
from shardweave.backends.triton.values import Values
from shardweave.backends.triton.writer import Guards, Indices, Term, UnfitError
from shardweave.ir.aten import AtenOp
from shardweave.ir.fusible import MATMULS
from shardweave.ir.regions import VIEWS
from shardweave.ir.types import dtype_of_value, shape_of

_BLOCK_OF = """\
pid = tl.program_id(0)
blocks_m = tl.cdiv(m_size, BLOCK_M)
blocks_n = tl.cdiv(n_size, BLOCK_N)
# Programs that run at one time share few rows and columns, so that these stay in the cache.
group = GROUP_M * blocks_n
first_m = pid // group * GROUP_M
height = tl.minimum(blocks_m - first_m, GROUP_M)
block_m = first_m + pid % group % height
block_n = pid % group // height
row = (block_m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
col = (block_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
in_row = row < m_size
in_col = col < n_size"""

_STEP = """\
k_a = (start + tl.arange(0, BLOCK_K))[None, :]
k_b = (start + tl.arange(0, BLOCK_K))[:, None]
in_k_a = k_a < k_size
in_k_b = k_b < k_size"""

SYMBOLIC = 16
"""Sizes from here on are arguments wherever they are strides."""


def matmul_kernel(
    region: Region, strides: Sequence[Sequence[int]] | None = None, precision: str = "ieee"
) -> Kernel:
    """A block of the product for each program; pointwise ops before and after, in registers.

    precision: of float32 products, "ieee" or "tf32".
    """
    product = next(op for op in region.ops if op.name in MATMULS)
    left, right = product.operands[-2:]
    (m, k), n = shape_of(left), shape_of(right)[1]
    signature = Signature(region)
    writer = signature.writer(strides)
    writer.masks = {"row": "in_row", "col": "in_col", "k_a": "in_k_a", "k_b": "in_k_b"}
    sizes = {"m_size": m, "n_size": n, "k_size": k}
    symbols = {name: (size, name) for name, size in sizes.items() if size >= SYMBOLIC}
    values = Values(writer)
    for line in _BLOCK_OF.splitlines():
        writer.line(line)
    accumulator = torch.float64 if dtype_of_value(left) == torch.float64 else torch.float32
    writer.line(f"total = tl.zeros([BLOCK_M, BLOCK_N], {type_text(accumulator)})")
    row, col = (of_base(Base(b, s, frozenset({b}))) for b, s in (("row", m), ("col", n)))
    k_a, k_b = (of_base(Base(b, k, frozenset({b}))) for b in ("k_a", "k_b"))
    writer.line("for start in range(0, k_size, BLOCK_K):")
    writer.indent += "    "
    for line in _STEP.splitlines():
        writer.line(line)
    state = writer.state()
    # Of equal sizes each factor names its own, so that products of other sizes share the source.
    orders = {left: ("k_size", "m_size"), right: ("n_size", "k_size")}
    if writer.strides.get(right, (0,))[0] == 1:
        orders[right] = ("k_size", "n_size")
    factors: list[Term] = []
    for value, own in ((left, (row, k_a)), (right, (k_b, col))):
        writer.symbols = [symbols[name] for name in orders[value] if name in symbols]
        factors.append(_factor(values, value, own))
    writer.symbols = [symbols["n_size"]] if "n_size" in symbols else []
    a = _block(factors[0], "[BLOCK_M, BLOCK_K]")
    b = _block(factors[1], "[BLOCK_K, BLOCK_N]")
    if "k_a" not in factors[0].axes:  # read without k's mask, it would count for every k
        a = f"tl.where(in_k_a, {a}, 0)"
    writer.line(f'total = tl.dot({a}, {b}, total, input_precision="{precision}")')
    writer.indent = writer.indent[4:]
    writer.restore(state, erase=False)

    def result(op: AtenOp, value: SSAValue, indices: Indices, guards: Guards) -> Term:
        if indices != (row, col):
            raise UnfitError("the result of a matrix product is read out of order")
        both = frozenset({"row", "col"})
        dtype = computed_in(dtype_of_value(value))
        if op.name == "aten.mm":
            return Term("total", dtype, both)
        bias = op.operands[0]
        term = values.at(bias, values.broadcast(bias, indices), guards)
        return writer.assign("product", f"total + {term.name}", dtype, both, op.name)

    values.special = dict.fromkeys(MATMULS, result)
    for value, pointer in zip(region.stored, signature.outputs, strict=True):
        place = row * n + col
        own = unraveled(place, shape_of(value), writer.name_index)
        writer.store(pointer, value, place, values.at(value, own), frozenset({"row", "col"}))
    configs = _configs(dtype_of_value(left).itemsize)
    constants = ["BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M"]
    name, source = render(signature, writer, "matmul", list(sizes), constants)
    types = signature.types(())
    return Kernel(name, source, "matmul", region, types, sizes, (), {}, configs)


def _factor(values: Values, value: SSAValue, indices: Indices) -> Term:
    """A block of a factor, in the factor's own dtype: a product of halves wants halves."""
    dtype = dtype_of_value(value)
    values.writer.widens = not _is_loaded(value)
    term = values.at(value, indices)
    values.writer.widens = True
    if term.dtype == dtype:
        return term
    text = f"{term.name}.to({type_text(dtype)})"
    return values.writer.assign("factor", text, dtype, term.axes)


def _is_loaded(value: SSAValue) -> bool:
    """Whether nothing but views lies between an input and the factor."""
    while isinstance(value.owner, AtenOp) and value.owner.name in VIEWS:
        value = value.owner.operands[0]
    return not isinstance(value.owner, AtenOp)


def _block(term: Term, shape: str) -> str:
    """The factor's block; one that is a row, a column or a number fills it too."""
    return term.name if len(term.axes) == 2 else f"tl.broadcast_to({term.name}, {shape})"


def _configs(itemsize: int) -> tuple[Config, ...]:
    if itemsize == 2:
        table = ((128, 128, 64, 8, 3), (128, 64, 64, 4, 3), (64, 128, 64, 4, 3),
                 (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (64, 64, 64, 4, 3),
                 (128, 128, 32, 4, 4), (64, 32, 64, 4, 3))  # fmt: skip
    else:
        table = ((64, 64, 32, 4, 2), (128, 64, 16, 8, 2), (64, 32, 32, 4, 2), (32, 32, 32, 4, 2),
                 (128, 128, 16, 8, 2))  # fmt: skip
    return tuple(
        {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8, "num_warps": w, "num_stages": s}
        for m, n, k, w, s in table
    )
