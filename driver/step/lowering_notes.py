"""Notes on a program that was lowered: what has no effect, is idle, or is left whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import ops_of_parts
from shardweave.ir.sharding.rules import notes_on_rules
from shardweave.ir.suggest import did_you_mean
from shardweave.planners.lowering.apply_plan import zero_axes
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.zero import BATCH_AXES, DATA_AXIS


def unread(program: Program) -> list[str]:
    """A note for each input that the model does not read."""
    return [
        f"input '{slot.name}' has no effect: the model does not read it"
        for slot in program.arguments
        if slot.kind == "input" and slot.value.first_use is None
    ]


def idle_axes(program: Program, notes: Sequence[str]) -> list[str]:
    """A note for each mesh axis that shards nothing, unless the plan's own notes name it."""
    mesh = program.mesh
    if mesh is None or not program.is_local:
        return []
    used = {axis for op in ops_of_parts(program) for axis in getattr(op, "axes", ())}
    for slot in (*program.arguments, *program.results):
        used |= program.sharding_of_slot(slot).axes
    known = [*(name for name in (*BATCH_AXES, "tensor") if name not in mesh.names), *used]
    said = [note for note in notes if note.startswith("axis ")]
    return [
        f"axis '{axis.name}' of the mesh is idle: nothing is sharded over it, and its "
        f"{axis.size} ranks all compute the same; {did_you_mean(axis.name, known)}"
        "give its devices to another axis, or a plan that uses it"
        for axis in mesh.space_axes
        if axis.size > 1
        and axis.name not in used
        and not any(f"'{axis.name}'" in note for note in said)
    ]


_FEW = 0.01
"""Fraction of parameter bytes, usually norms, that ZeRO may leave replicated without a note."""


def undivided(program: Program, plan: Plan | None) -> list[str]:
    """A note if ZeRO leaves many bytes of a local program's parameters replicated."""
    if plan is None or not plan.zero:
        return []
    mesh = program.needed_mesh()
    axes = [axis for axis in zero_axes(program) if mesh.size(axis) > 1]
    if not axes:
        return [
            f"zero={plan.zero} divides nothing: the mesh {mesh} has one replica; "
            f"give axis '{DATA_AXIS}' more devices"
        ]
    sizes: dict[str, int] = {}
    whole: list[str] = []
    for slot in program.arguments:
        if slot.kind == "param":
            sharding = program.sharding_of_slot(slot)
            shape = sharding.global_shape(shape_of(slot.value))
            sizes[slot.name] = math.prod(shape) * dtype_of_value(slot.value).itemsize
            whole += [slot.name] if sharding.axes.isdisjoint(axes) else []
    left, total = sum(sizes[name] for name in whole), sum(sizes.values())
    if left <= _FEW * total:
        return []
    return [
        f"zero={plan.zero} leaves {len(whole)} of {len(sizes)} parameters, {left / total:.0%} of "
        f"their bytes, whole on each rank, such as '{max(whole, key=sizes.__getitem__)}': none of "
        f"their dims divides by {' or '.join(f'{axis}={mesh.size(axis)}' for axis in axes)}"
    ]


def without_rules(program: Program, local: Program) -> list[str]:
    """A note for each kind of op of a global program that each device computes in full."""
    mesh = local.mesh
    return [] if mesh is None or mesh.num_devices == 1 else notes_on_rules(program.ops)
