"""A generated kernel: its source, its parameters, and the facts that a launch needs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import torch
from xdsl.ir import SSAValue

from shardweave.backends.programs import free_name
from shardweave.backends.triton.source.formulas import computed_in, type_text
from shardweave.backends.triton.source.region import Region
from shardweave.backends.triton.source.writer import Writer, short_name
from shardweave.ir.dialects.annotations import ANNOTATIONS, properties_without
from shardweave.ir.dialects.literals import to_python
from shardweave.ir.dialects.syntax import STRUCTURE
from shardweave.ir.program.iteration_space import Family

Kind = Literal["sum", "max", "min"]
"""The kind of a reduction."""

Config = dict[str, int]
"""Values of the constexpr parameters, and num_warps and num_stages."""

LAUNCH = ("num_warps", "num_stages", "programs")
"""Keys of a configuration that are not parameters of the kernel."""

HEADER = '''\
"""A kernel of the family '{family}'.

Written by shardweave. Computes
{ops}
"""

import triton
import triton.language as tl


@triton.jit
def {name}(
    {parameters},
):
'''


@dataclass(frozen=True)
class KernelSource:
    """A Triton function as text, with the data to compile and launch it.

    source: a Python module with one Triton function, `name`. pointers: the types of the pointer
    parameters, which come first. sizes: values of the integer parameters, by name, in order.
    asserts: whether it contains device assertions. fixed: values of constexpr parameters that are
    not tuned. constants: names of all constexpr parameters. configs: values of the others to tune.
    """

    name: str
    source: str
    pointers: tuple[str, ...]
    sizes: dict[str, int]
    asserts: bool
    fixed: dict[str, int]
    constants: tuple[str, ...]
    configs: tuple[Config, ...]

    @cached_property
    def key(self) -> str:
        """A hash of the source, equal for kernels with equal source."""
        return hashlib.sha256(self.source.encode()).hexdigest()[:16]

    @cached_property
    def pointer_names(self) -> tuple[str, ...]:
        """The names of the pointer parameters, in order."""
        head = re.search(rf"^def {self.name}\(\n(.*?)\n\):", self.source, re.DOTALL | re.MULTILINE)
        assert head is not None
        names = [line.strip().rstrip(",") for line in head[1].splitlines()]
        return tuple(names[: len(self.pointers)])


@dataclass(frozen=True)
class Kernel(KernelSource):
    """The kernel of a region. Its pointers are the region's inputs, then its stored values.

    partial: maps indices of stored values that each program leaves as a partial result, to be
    joined by `joining.finishing_kernel`, to the kind of reduction. overwrites: index of the input
    that the kernel changes in place and returns as its result, if any.
    """

    region: Region
    partial: Mapping[int, Kind]
    overwrites: int | None = None

    @property
    def family(self) -> Family:
        return self.region.space.family

    @property
    def partial_dtypes(self) -> tuple[torch.dtype, ...]:
        region = self.region
        return tuple(computed_in(region.dtype_of(region.stored[n])) for n in self.partial)


class KernelDraft:
    """A kernel under construction. outputs: the parameter of each stored value. strides: of each
    input, in elements."""

    def __init__(self, region: Region, strides: Sequence[Sequence[int]]) -> None:
        taken: set[str] = set()
        pointers = {v: free_name(f"{short_name(v)}_ptr", taken) for v in region.inputs}
        self.region = region
        self.outputs = {v: free_name(f"out_{short_name(v)}_ptr", taken) for v in region.stored}
        self.writer = Writer(pointers, dict(zip(region.inputs, strides, strict=True)))

    def kernel(
        self,
        sizes: dict[str, int],
        configs: Sequence[Config],
        partial: Mapping[int, Kind] = MappingProxyType({}),
        fixed: Mapping[str, int] = MappingProxyType({}),
        overwrites: int | None = None,
    ) -> Kernel:
        """Finish the kernel from the statements written. The arguments are as in `Kernel`."""
        region = self.region
        words = dict.fromkeys(op.name.split(".")[1].strip("_") for op in region.ops)
        core = [w for w in words if w not in ("view", "permute", "expand", "full", "to_copy")]
        name = f"{region.space.family}_" + "_".join(core[:4])
        constants = (*fixed, *(key for key in configs[0] if key not in LAUNCH))
        parameters = [
            *self.writer.pointers.values(),
            *self.outputs.values(),
            *sizes,
            *(f"{constant}: tl.constexpr" for constant in constants),
        ]
        head = HEADER.format(
            family=region.space.family,
            ops="\n".join(f"    {line}" for line in _op_lines(region)),
            name=name,
            parameters=",\n    ".join(parameters),
        )
        source = head + "\n".join(self.writer.lines) + "\n"
        return Kernel(
            name, source, self._pointer_types(partial), sizes, self.writer.requires, dict(fixed),
            constants, tuple(configs), region, partial, overwrites,
        )  # fmt: skip

    def _pointer_types(self, partial: Iterable[int]) -> tuple[str, ...]:
        dtypes = [self.region.dtype_of(v) for v in (*self.region.inputs, *self.region.stored)]
        for number in partial:
            place = len(self.region.inputs) + number
            dtypes[place] = computed_in(dtypes[place])
        return tuple(pointer_type(type_text(dtype)) for dtype in dtypes)


def pointer_type(text: str) -> str:
    """Return Triton's pointer type of a dtype's text: `*fp32` for `tl.float32`."""
    names = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    word = text.removeprefix("tl.")
    return "*" + names.get(word, word.replace("uint", "u").replace("int", "i"))


def _op_lines(region: Region) -> list[str]:
    """List the ops as text without names and layers, so that equal bodies have equal sources."""
    numbers: dict[SSAValue, str] = {v: f"%{short_name(v)}" for v in region.inputs}
    lines: list[str] = []
    for op in region.ops:
        words = [numbers[value] for value in op.operands]
        words += [
            f"{name} = {to_python(value)}"
            for name, value in properties_without(op, *ANNOTATIONS, STRUCTURE).items()
        ]
        given = ", ".join(words)
        for result in op.results:
            numbers[result] = f"%{len(numbers)}"
        made = ", ".join(numbers[result] for result in op.results)
        lines.append(f"{made} = {op.name}({given})")
    return lines
