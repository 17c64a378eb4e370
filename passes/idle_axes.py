"""Whether the annotations of a program leave axes of its mesh idle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr
from xdsl.ir import Attribute

from shardweave.ir.attributes import ShardingAttr
from shardweave.ir.mesh import Axis
from shardweave.ir.program import Program
from shardweave.passes.notes import note


def note_idle_axes(program: Program) -> None:
    """Say which axes no annotation of a global program names, before it is propagated."""
    idle = idle_axes(program)
    if idle:
        axes = " and ".join(f"{axis.name}={axis.size}" for axis in idle)
        note(
            f"no value is annotated over {axes}, so that its devices all compute the same; run "
            "apply-plan or plan-<planner> (plan-megatron) first, or annotate arguments."
        )


def idle_axes(program: Program) -> tuple[Axis, ...]:
    """The axes of devices that no sharding in the program names. Linear in the ops."""
    used: set[str] = set()
    for attribute in _annotations(program):
        for one in _shardings(attribute):
            used.update(axis.data for axes in (*one.dims, one.unreduced) for axis in axes)
    axes = program.mesh.space_axes if program.mesh else ()
    return tuple(axis for axis in axes if axis.size > 1 and axis.name not in used)


def _annotations(program: Program) -> Iterator[Attribute]:
    yield from (slot.attributes for slot in (*program.arguments, *program.results))
    yield from (value for op in program.ops for value in op.properties.values())


def _shardings(attribute: Attribute) -> Iterator[ShardingAttr]:
    """The shardings that an annotation holds."""
    if isinstance(attribute, ShardingAttr):
        yield attribute
    elif isinstance(attribute, DictionaryAttr):
        yield from (one for one in attribute.data.values() if isinstance(one, ShardingAttr))
    elif isinstance(attribute, ArrayAttr):
        data = cast("ArrayAttr[Attribute]", attribute).data
        yield from (one for one in data if isinstance(one, ShardingAttr))
