"""Joins of partial reductions: within a kernel, or by a second kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shardweave.backends.triton.source.alignment import pitch, row_period
from shardweave.backends.triton.source.formulas import computed_in, converted, number, type_text
from shardweave.backends.triton.source.source import (
    Config,
    Kernel,
    KernelSource,
    Kind,
    pointer_type,
)
from shardweave.ir.ops.fusible import GROUP
from shardweave.ir.program.iteration_space import IterationSpace

FINISHING: Config = {"BLOCK_P": 16, "BLOCK_C": 64, "num_warps": 4}
"""The configuration of the kernel that joins partial results."""

_WITH_GAPS: Config = FINISHING | {"BLOCK_P": 8}
"""The same for rows with masked gaps between them: larger blocks would spill on sm_80."""

_NAN = "propagate_nan=tl.PropagateNan.ALL"
_JOIN = {
    "sum": "{a} + {b}",
    "max": f"tl.maximum({{a}}, {{b}}, {_NAN})",
    "min": f"tl.minimum({{a}}, {{b}}, {_NAN})",
}

_HEAD = '''\
"""Joins the parts of results that the programs of other kernels left.

Written by shardweave.
"""

import triton
import triton.language as tl


@triton.jit
def {name}(
    {parameters},
):
    block = {block}
'''

_RESULT = """\
    num_blocks = tl.cdiv(n_cols_{number}, BLOCK_C)
    pitch = tl.cdiv(n_cols_{number}, {group}) * {group}
    if (block >= 0) & (block < num_blocks):
        col = (block * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
        in_col = col < n_cols_{number}
        total = tl.full([BLOCK_P, BLOCK_C], {start}, {dtype})
        for first in range(0, n_parts_{number}, BLOCK_P):
            part = (first + tl.arange(0, BLOCK_P))[:, None]
            is_in = (part < n_parts_{number}) & (col < pitch)
            place = part * pitch + col
            each = {each}
            total = {joined}
        found = {reduced}
        tl.store(out_{number}_ptr + col, {found}, mask=in_col)
    block -= num_blocks
"""

_BESIDE = """\
{kernel}

{joining}

@triton.jit
def {name}(
    {parameters},
):
    if tl.program_id(0) < num_before:
        {kernel_name}({own})
    else:
        {joining_name}({others})
"""


@dataclass(frozen=True)
class PartialResult:
    """A reduction's partial result: each program instance leaves a row of `num_columns` elements.

    Rows begin at multiples of 16 bytes; the elements in the gaps are undefined. dtype: the rows'
    dtype. target: dtype of the joined result. in_memory: whether the rows are an existing tensor,
    which no kernel writes.
    """

    kind: Kind
    num_parts: int
    num_columns: int
    dtype: torch.dtype
    target: torch.dtype
    in_memory: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_parts, pitch(self.num_columns)

    @property
    def has_gaps(self) -> bool:
        return self.num_columns % GROUP != 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def identity_of(kind: Kind, dtype: torch.dtype) -> str:
    """Return the neutral element of a sum, maximum or minimum of a dtype, as Triton text."""
    if kind == "sum":
        return "0"
    if dtype == torch.bool:
        return str(kind == "min")
    if dtype.is_floating_point:
        return number(math.inf if kind == "min" else -math.inf)
    return number(torch.iinfo(dtype).max if kind == "min" else torch.iinfo(dtype).min)


def joined_blocks(kind: Kind, a: str, b: str) -> str:
    """Return the Triton text that reduces two blocks to one, element by element."""
    return _JOIN[kind].format(a=a, b=b)


def reduced_block(kind: Kind, block: str, axis: int, *, keeps_nan: bool) -> str:
    """Return the Triton text that reduces a block along axis 1 (rows) or 0 (columns) to size 1.

    keeps_nan: whether a maximum over NaN is NaN, as in ATen; Triton's `max` ignores NaN. `block`
    must then be the name of a variable.
    """
    rest = f"axis={axis})" + ("[:, None]" if axis else "[None, :]")
    if not keeps_nan or kind == "sum":
        return f"tl.{kind}({block}, {rest}"
    is_nan = f"tl.max(({block} != {block}).to(tl.int32), {rest} > 0"
    return f'tl.where({is_nan}, float("nan"), tl.{kind}({block}, {rest})'


def partial_results_of(kernel: Kernel, config: Config) -> list[PartialResult]:
    """List the partial results of a kernel at a configuration, in order of `kernel.partial`."""
    if not kernel.partial:
        return []
    region = kernel.region
    num_parts = num_partial(region.space, config)
    pairs = zip(kernel.partial.items(), kernel.partial_dtypes, strict=True)
    return [
        PartialResult(
            kind, num_parts, region.space.columns, dtype, region.dtype_of(region.stored[number])
        )
        for (number, kind), dtype in pairs
    ]


def num_partial(space: IterationSpace, config: Config) -> int:
    """Number of rows of partial results that a reduction over the rows of a space leaves."""
    count = min(-(-space.rows // config["BLOCK_R"]), config["programs"])
    period = row_period(space)
    return -(-count // period) * period


def finishing_kernel(results: Sequence[PartialResult], *, behind: bool = False) -> KernelSource:
    """Write the kernel that joins partial results, each in the order of its rows.

    Its parameters are the partial results of each result, then the results in their target dtypes.
    behind: whether its program instances follow the `num_before` instances of another kernel.
    """
    count = range(len(results))
    parameters = [f"parts_{n}_ptr" for n in count] + [f"out_{n}_ptr" for n in count]
    sizes: dict[str, int] = {}
    for place, parts in enumerate(results):
        sizes |= {f"n_parts_{place}": parts.num_parts, f"n_cols_{place}": parts.num_columns}
    constants = ("BLOCK_P", "BLOCK_C")
    first = ["num_before"] if behind else []
    parameters += [*sizes, *first, *(f"{constant}: tl.constexpr" for constant in constants)]
    name = "finish_" + "_".join(dict.fromkeys(parts.kind for parts in results))
    block = "tl.program_id(0)" + (" - num_before" if behind else "")
    source = _HEAD.format(name=name, parameters=",\n    ".join(parameters), block=block)
    source += "".join(_joining_of(place, parts) for place, parts in enumerate(results))
    dtypes = [parts.dtype for parts in results] + [parts.target for parts in results]
    types = tuple(pointer_type(type_text(dtype)) for dtype in dtypes)
    has_gaps = any(parts.has_gaps for parts in results)
    config = _WITH_GAPS if has_gaps else FINISHING
    return KernelSource(name, source, types, sizes, False, {}, constants, (config,))


def with_joining(
    kernel: Kernel, config: Config, num_programs: int, results: Sequence[PartialResult]
) -> tuple[Kernel, int]:
    """Extend a kernel by program instances that join the partial results of earlier kernels.
    num_programs: number of the kernel's instances at `config`. Returns the new kernel and its
    number of instances.

    Its pointers are the kernel's, then `finishing_kernel`'s.
    """
    joining = finishing_kernel(results, behind=True)
    own, others = kernel.pointer_names, joining.pointer_names
    renamed = {constant: f"JOIN_{constant}" for constant in joining.constants}
    sizes = kernel.sizes | joining.sizes | {"num_before": num_programs}
    constants = (*kernel.constants, *renamed.values())
    source = _BESIDE.format(
        kernel=kernel.source,
        joining=joining.source[joining.source.index("@triton.jit") :],
        name=f"{kernel.name}_and_finish",
        parameters=",\n    ".join(
            [*own, *others, *sizes, *(f"{constant}: tl.constexpr" for constant in constants)]
        ),
        kernel_name=kernel.name,
        own=", ".join([*own, *kernel.sizes, *kernel.constants]),
        joining_name=joining.name,
        others=", ".join([*others, *joining.sizes, "num_before", *renamed.values()]),
    )
    (alone,) = joining.configs
    threads = 32 * config["num_warps"]
    tall = max(alone["BLOCK_P"], 4 * threads // alone["BLOCK_C"])  # each reads four numbers at once
    blocks = alone | {"BLOCK_P": tall}
    both = config | {renamed[constant]: blocks[constant] for constant in joining.constants}
    made = replace(
        kernel, name=f"{kernel.name}_and_finish", source=source,
        pointers=(*kernel.pointers, *joining.pointers), sizes=sizes, constants=constants,
        configs=(both,),
    )  # fmt: skip
    return made, num_programs + finishing_grid(results)[0]


def finishing_grid(results: Sequence[PartialResult]) -> tuple[int]:
    """Return the grid of the joining kernel: one instance for each block of a result's columns."""
    return (sum(-(-parts.num_columns // FINISHING["BLOCK_C"]) for parts in results),)


def _joining_of(place: int, parts: PartialResult) -> str:
    """Return the statements that join one result. place: its index among the results."""
    dtype = computed_in(parts.target)
    outside = identity_of(parts.kind, parts.dtype)
    each = f"tl.load(parts_{place}_ptr + place, mask=is_in, other={outside})"
    if parts.has_gaps:  # what lies between rows is read with them
        each = f"tl.where(in_col, {each}, {outside})"
    return _RESULT.format(
        number=place,
        group=GROUP,
        start=identity_of(parts.kind, dtype),
        each=each if parts.dtype == dtype else f"{each}.to({type_text(dtype)})",
        dtype=type_text(dtype),
        joined=joined_blocks(parts.kind, "total", "each"),
        reduced=reduced_block(parts.kind, "total", axis=0, keeps_nan=dtype.is_floating_point),
        found=converted("found", dtype, parts.target),
    )
