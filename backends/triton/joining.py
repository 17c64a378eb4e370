"""How parts of a reduction are joined: in a kernel, and of what its programs leave, by another."""

from __future__ import annotations

import math

import torch

from shardweave.backends.triton.formulas import converted, number, type_text
from shardweave.backends.triton.source import Config, Kernel, KernelSource, Kind, pointer_type

_NAN = "propagate_nan=tl.PropagateNan.ALL"
_JOIN = {
    "sum": "{a} + {b}",
    "max": f"tl.maximum({{a}}, {{b}}, {_NAN})",
    "min": f"tl.minimum({{a}}, {{b}}, {_NAN})",
}

_HEAD = '''\
"""Joins the parts of results that the programs of another kernel left.

Written by shardweave.
"""

import triton
import triton.language as tl


@triton.jit
def {name}(
    {parameters},
):
    blocks_c = tl.cdiv(n_cols, BLOCK_C)
    result = tl.program_id(0) // blocks_c
    col = (tl.program_id(0) % blocks_c * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    in_col = col < n_cols
'''

_RESULT = """\
    if result == {number}:
        total = tl.full([BLOCK_P, BLOCK_C], {start}, {dtype})
        for first in range(0, n_parts, BLOCK_P):
            part = (first + tl.arange(0, BLOCK_P))[:, None]
            is_in = (part < n_parts) & in_col
            each = tl.load(parts_{number}_ptr + part * n_cols + col, mask=is_in, other={start})
            total = {joined}
        found = {reduced}
        tl.store(out_{number}_ptr + col, {found}, mask=in_col)
"""


def identity_of(kind: Kind, dtype: torch.dtype) -> str:
    """What changes no sum, maximum or minimum of a dtype."""
    if kind == "sum":
        return "0"
    if dtype == torch.bool:
        return str(kind == "min")
    if dtype.is_floating_point:
        return number(math.inf if kind == "min" else -math.inf)
    return number(torch.iinfo(dtype).max if kind == "min" else torch.iinfo(dtype).min)


def joined(kind: Kind, a: str, b: str) -> str:
    """Two blocks as one, element by element."""
    return _JOIN[kind].format(a=a, b=b)


def reduced(kind: Kind, block: str, axis: int, *, keeps_nan: bool) -> str:
    """The reduction of a block along its rows (1) or columns (0), as a block of one less.

    keeps_nan: whether the largest element of some with NaN is NaN, as in ATen; Triton's `max`
    passes over it. Then `block` is the name of a variable.
    """
    rest = f"axis={axis})" + ("[:, None]" if axis else "[None, :]")
    if not keeps_nan or kind == "sum":
        return f"tl.{kind}({block}, {rest}"
    is_nan = f"tl.max(({block} != {block}).to(tl.int32), {rest} > 0"
    return f'tl.where({is_nan}, float("nan"), tl.{kind}({block}, {rest})'


def finishing_kernel(kernel: Kernel, num_parts: int) -> KernelSource:
    """The kernel that joins all results which a kernel leaves in `num_parts` parts, in order.

    Its parameters are the parts of each, rows of as many columns as the kernel has, and then the
    results in their own dtypes. So a region with such results takes two launches, however many.
    """
    region = kernel.region
    pairs = list(zip(kernel.partial, kernel.partial_dtypes, strict=True))
    count = len(pairs)
    parameters = [f"parts_{n}_ptr" for n in range(count)] + [f"out_{n}_ptr" for n in range(count)]
    parameters += ["n_parts", "n_cols", "BLOCK_P: tl.constexpr", "BLOCK_C: tl.constexpr"]
    name = "finish_" + "_".join(dict.fromkeys(kernel.partial.values()))
    source = _HEAD.format(name=name, parameters=",\n    ".join(parameters))
    for place, (stored, dtype) in enumerate(pairs):
        target = region.dtype_of(region.stored[stored])
        source += _joining_of(place, kernel.partial[stored], dtype, target)
    targets = [region.dtype_of(region.stored[stored]) for stored in kernel.partial]
    types = [pointer_type(type_text(d)) for d in (*kernel.partial_dtypes, *targets)]
    config: Config = {"BLOCK_P": 16, "BLOCK_C": 64, "num_warps": 4}
    sizes = {"n_parts": num_parts, "n_cols": region.space.columns}
    return KernelSource(
        name, source, tuple(types), sizes, False, {}, ("BLOCK_P", "BLOCK_C"), (config,)
    )


def _joining_of(place: int, kind: Kind, dtype: torch.dtype, target: torch.dtype) -> str:
    """The statements that join the parts of one result."""
    text = reduced(kind, "total", axis=0, keeps_nan=dtype.is_floating_point)
    return _RESULT.format(
        number=place,
        start=identity_of(kind, dtype),
        dtype=type_text(dtype),
        joined=joined(kind, "total", "each"),
        reduced=text,
        found=converted("found", dtype, target),
    )
