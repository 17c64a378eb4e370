"""Kernels of a matrix product with pointwise ops around it."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.ir import SSAValue

from shardweave.backends.triton.source.formulas import computed_in, type_text
from shardweave.backends.triton.source.index import Base, of_base
from shardweave.backends.triton.source.region import Region
from shardweave.backends.triton.source.source import Config, Kernel, KernelDraft
from shardweave.backends.triton.source.values import Values
from shardweave.backends.triton.source.writer import Guards, Indices, Term, UnfitError
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.storage import layout_source

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
"""Least size of a dim that, where it is a stride, is a kernel parameter and not a literal."""


class MatmulTemplate:
    """Writes a product kernel: an instance computes a block, and pointwise ops on it in
    registers."""

    def __init__(self, region: Region, strides: Sequence[Sequence[int]], precision: str) -> None:
        self.region, self.precision = region, precision
        self.product = next(op for op in region.ops if spec_of(op).role == "matmul")
        self.left, self.right = self.product.operands[-2:]
        (m, k), n = shape_of(self.left), shape_of(self.right)[1]
        self.sizes = {"m_size": m, "n_size": n, "k_size": k}
        self.draft = KernelDraft(region, strides)
        self.writer = self.draft.writer
        self.writer.masks = {axis: f"in_{axis}" for axis in ("row", "col", "k_a", "k_b")}
        self.values = Values(self.writer)
        extents = {"row": m, "col": n, "k_a": k, "k_b": k}
        self.bases = {b: of_base(Base(b, size, frozenset({b}))) for b, size in extents.items()}

    def kernel(self) -> Kernel:
        self.writer.line(_BLOCK_OF)
        self._multiply()
        self._use_symbols("n_size")
        self.values.special = {self.product.name: self._result}
        place = self.bases["row"] * self.sizes["n_size"] + self.bases["col"]
        for value in self.region.stored:
            self.values.store(self.draft, value, place, frozenset({"row", "col"}))
        is_plain = len(self.region.ops) == 1
        return self.draft.kernel(self.sizes, _configs(dtype_of_value(self.left).itemsize, is_plain))

    def _use_symbols(self, *names: str) -> None:
        """Set the sizes to write as parameters where they are strides, in order of preference."""
        given = [(self.sizes[name], name) for name in names]
        self.writer.symbols = [(size, name) for size, name in given if size >= SYMBOLIC]

    def _multiply(self) -> None:
        writer = self.writer
        writer.line("total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)")
        with writer.block("for start in range(0, k_size, BLOCK_K):"):
            writer.line(_STEP)
            # Of equal sizes each factor names its own: products of other sizes share the source.
            self._use_symbols("k_size", "m_size")
            left = _factor(self.values, self.left, (self.bases["row"], self.bases["k_a"]))
            is_transposed = writer.strides.get(self.right, (0,))[0] == 1
            order = ("k_size", "n_size") if is_transposed else ("n_size", "k_size")
            self._use_symbols(*order)
            right = _factor(self.values, self.right, (self.bases["k_b"], self.bases["col"]))
            a, b = _block(left, "[BLOCK_M, BLOCK_K]"), _block(right, "[BLOCK_K, BLOCK_N]")
            # Read without k's mask, a factor would count for every k, and an infinite one make NaN.
            if "k_a" not in left.axes:
                a = f"tl.where(in_k_a, {a}, 0)"
            if "k_b" not in right.axes:
                b = f"tl.where(in_k_b, {b}, 0)"
            writer.line(f'total = tl.dot({a}, {b}, total, input_precision="{self.precision}")')

    def _result(self, op: AtenOp, value: SSAValue, indices: Indices, guards: Guards) -> Term:
        if indices != (self.bases["row"], self.bases["col"]):
            raise UnfitError("an op reads the result of a matrix product in another order")
        both = frozenset({"row", "col"})
        dtype = computed_in(dtype_of_value(value))
        if op.name == "aten.mm":
            return Term("total", dtype, both)
        bias = op.operands[0]
        term = self.values.at(bias, self.values.broadcast(bias, indices), guards)
        return self.writer.assign("product", f"total + {term.name}", dtype, both, op.name)


def _factor(values: Values, value: SSAValue, indices: Indices) -> Term:
    """Write a block of a factor in its own dtype: products of halves read halves."""
    dtype = dtype_of_value(value)
    # Nothing but views may lie between an input and the factor.
    values.writer.widens = isinstance(layout_source(value).owner, AtenOp)
    term = values.at(value, indices)
    values.writer.widens = True
    if term.dtype == dtype:
        return term
    text = f"{term.name}.to({type_text(dtype)})"
    return values.writer.assign("factor", text, dtype, term.axes)


def _block(term: Term, shape: str) -> str:
    """Return a factor's block as text, broadcast to `shape` if it is a row, column or number."""
    return term.name if len(term.axes) == 2 else f"tl.broadcast_to({term.name}, {shape})"


def _configs(itemsize: int, is_plain: bool) -> tuple[Config, ...]:
    """List configs to tune over, default first. is_plain: whether no op surrounds the product."""
    if itemsize == 2 and not is_plain:
        table = ((64, 64, 32, 8, 3), (128, 64, 32, 8, 3), (64, 128, 32, 8, 3), (64, 64, 64, 8, 3),
                 (128, 128, 32, 8, 3), (128, 128, 64, 8, 3), (64, 32, 64, 4, 3))  # fmt: skip
    elif itemsize == 2:
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
