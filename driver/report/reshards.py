"""The reshards of a step: where the global program moves data between shards, and why."""

from __future__ import annotations

from xdsl.ir import SSAValue
from xdsl.passes import ModulePass

from shardweave.ir.dialects.annotations import phase_of, sharding_attrs_of
from shardweave.ir.dialects.dist import ReshardOp
from shardweave.ir.inspect.outline import fold, layers_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.sharding.flow import is_propagated
from shardweave.passes.notes import note, unheard
from shardweave.passes.observers import Observer
from shardweave.passes.pipeline import run_passes
from shardweave.planners.lowering.partition import partition
from shardweave.planners.lowering.stages.choose import with_pipeline
from shardweave.planners.plan.plan import Plan

Row = tuple[str, ...]
"""Layer, phase, value, shards before, shards after, why."""

LOWERING = "insert-collectives,unroll-time-axes,cse,dce,merge-collectives"


def reshards_of(program: Program) -> list[Row]:
    """The reshards of a propagated program in order; of equal layers, only the first layer's."""
    texts = {slot.value: str(slot.sharding_attr) for slot in program.arguments}
    for op in program.ops:
        texts |= dict(zip(op.results, map(str, sharding_attrs_of(op) or ()), strict=False))

    def shards(value: SSAValue) -> str:
        return texts[value].removeprefix("#dist.sharding")[1:-1]

    return [
        (
            layer.name,
            phase_of(op),
            f"%{op.value.name_hint or '-'}",
            shards(op.value),
            shards(op.resharded),
            op.why,
        )
        for layer in fold(layers_of(program))
        for op in layer.first.members
        if isinstance(op, ReshardOp)
    ]


class _Reshards(Observer):
    """Notes the reshards before they are lowered."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def before(self, pass_: ModulePass, program: Program) -> None:
        if pass_.name == "insert-collectives":
            self.rows = reshards_of(program)


def local_with_reshards(program: Program, plan: Plan | None) -> tuple[Program, list[Row]]:
    """Lower a program by the plan, if needed, to each rank's; return it and the global reshards."""
    noted = _Reshards()
    if not program.is_local and is_propagated(program):
        with unheard():
            program = run_passes(program, LOWERING, observer=noted)
    elif plan is not None and not program.is_local:
        mesh = program.mesh or Mesh(**plan.mesh)
        plan = with_pipeline(plan, program, mesh)
        program = partition(program, mesh, plan, observer=noted, tell=note)
    return program, noted.rows
