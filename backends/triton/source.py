"""A generated kernel: its source, its parameters, and what a launch needs to know of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from xdsl.ir import SSAValue

from shardweave.backends.triton.formulas import type_text
from shardweave.backends.triton.region import Region
from shardweave.backends.triton.writer import Writer, short_name
from shardweave.ir.annotations import ANNOTATIONS, properties_without
from shardweave.ir.fusible import Family
from shardweave.ir.literals import to_python
from shardweave.ir.strides import dense_strides
from shardweave.ir.syntax import STRUCTURE
from shardweave.ir.types import dtype_of_value, shape_of

Config = dict[str, int]
"""Values of the constexpr parameters, and num_warps and num_stages."""

HEADER = '''\
"""{summary}

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
class Kernel:
    """A kernel and how this region calls it.

    source: a Python module with one Triton function, `name`. pointers: the types of the pointer
    parameters, inputs first. sizes: values of the integer parameters, by name, in order.
    partial: numbers of the stored values that come as one sum per program, to be added up.
    fixed: constexpr parameters that the region decides.
    """

    name: str
    source: str
    family: Family
    region: Region
    pointers: tuple[str, ...]
    sizes: dict[str, int]
    partial: tuple[int, ...]
    fixed: dict[str, int]
    configs: tuple[Config, ...]

    @property
    def key(self) -> str:
        """Equal for kernels with equal source."""
        return hashlib.sha256(self.source.encode()).hexdigest()[:16]

    @property
    def constants(self) -> list[str]:
        launch = ("num_warps", "num_stages", "programs")
        return [*self.fixed, *(key for key in self.configs[0] if key not in launch)]


@dataclass
class KernelSignature:
    """The parameters of a kernel while it is written."""

    region: Region
    pointers: dict[SSAValue, str] = field(default_factory=lambda: dict[SSAValue, str]())
    outputs: list[str] = field(default_factory=lambda: list[str]())

    def __post_init__(self) -> None:
        taken: set[str] = set()
        for value in self.region.inputs:
            self.pointers[value] = _free(f"{short_name(value)}_ptr", taken)
        for value in self.region.stored:
            self.outputs.append(_free(f"out_{short_name(value)}_ptr", taken))

    def writer(self, strides: Sequence[Sequence[int]] | None) -> Writer:
        """A writer that loads inputs with these strides; dense ones if None."""
        given = strides or [dense_strides(shape_of(value)) for value in self.region.inputs]
        return Writer(self.pointers, dict(zip(self.region.inputs, given, strict=True)))

    def types(self, partial: Sequence[int]) -> tuple[str, ...]:
        """The pointer types of all pointer parameters, as Triton writes them in signatures."""
        found = [pointer_type(type_text(dtype_of_value(v))) for v in self.region.inputs]
        for number, value in enumerate(self.region.stored):
            text = type_text(dtype_of_value(value))
            is_half = text in ("tl.float16", "tl.bfloat16")
            found.append(pointer_type("tl.float32" if number in partial and is_half else text))
        return tuple(found)


def pointer_type(text: str) -> str:
    """`*fp32` of `tl.float32`."""
    names = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    word = text.removeprefix("tl.")
    return "*" + names.get(word, word.replace("uint", "u").replace("int", "i"))


def render(
    signature: KernelSignature,
    writer: Writer,
    family: Family,
    sizes: Sequence[str],
    constants: Sequence[str],
) -> tuple[str, str]:
    """Name and source of the module."""
    region = signature.region
    words = dict.fromkeys(op.name.split(".")[1].strip("_") for op in region.ops)
    core = [w for w in words if w not in ("view", "permute", "expand", "full", "to_copy")]
    name = f"{family}_" + "_".join(core[:4])
    parameters = [
        *signature.pointers.values(),
        *signature.outputs,
        *sizes,
        *(f"{constant}: tl.constexpr" for constant in constants),
    ]
    text = HEADER.format(
        summary=f"A kernel of the family '{family}'.",
        ops="\n".join(f"    {line}" for line in _op_lines(region)),
        name=name,
        parameters=",\n    ".join(parameters),
    )
    return name, text + "\n".join(writer.lines) + "\n"


def _op_lines(region: Region) -> list[str]:
    """The ops without names and layers, so that equal bodies have equal sources."""
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


def _free(word: str, taken: set[str]) -> str:
    found, count = word, 1
    while found in taken:
        count += 1
        found = f"{word}{count}"
    taken.add(found)
    return found
