from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.annotations import sharding_attrs_of, wanted_attrs_of
from shardweave.ir.attributes import ShardingAttr
from shardweave.ir.program import Program
from shardweave.ir.sharding.propagate import propagate
from shardweave.ir.sharding.rules import notes_on_rules
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class PropagateShardingsPass(PassOnProgram):
    """Give every op its sharding, and put a `dist.reshard` wherever a value changes shards.

    How it chooses is said in `ir.sharding.propagate`, how it places reshards in `place_reshards`.

    Requires: a global program with a mesh; wishes, if any, in `wanted` and `dist.used`. Ensures:
    every op has `sharding` and operands that fit it, every argument and result `dist.sharding`; no
    wish is left; numerics unchanged. A propagated program stays as it is. Linear in the ops.
    """

    name = "propagate-shardings"

    def run(self, program: Program) -> None:
        idle = _idle_axes(program)
        if idle:
            note(
                f"no value is annotated over {' and '.join(idle)}, so that its devices all compute "
                "the same; run apply-plan or plan-<planner> (plan-megatron) first, or annotate "
                "arguments."
            )
        if program.mesh is not None and program.mesh.num_devices > 1:
            for text in notes_on_rules(program.ops):
                note(text)
        propagate(program)


def _idle_axes(program: Program) -> list[str]:
    """The axes of devices, as `data=2`, that no annotation of the program names."""
    slots = (*program.arguments, *program.results)
    shardings = [
        a for s in slots for a in s.attributes.data.values() if isinstance(a, ShardingAttr)
    ]
    for op in program.ops:
        shardings += [*(sharding_attrs_of(op) or ()), *(wanted_attrs_of(op) or ())]
    used = {axis.data for s in shardings for axes in (*s.dims, s.unreduced) for axis in axes}
    axes = program.mesh.space_axes if program.mesh else ()
    return [f"{axis.name}={axis.size}" for axis in axes if axis.size > 1 and axis.name not in used]
