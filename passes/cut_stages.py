from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram
from shardweave.planners.pipelines.stages import cut_stages
from shardweave.planners.plan_parts import PIPELINE_SCHEDULES


@dataclass(frozen=True)
class CutStagesPass(PassOnProgram):
    """Cut the step into functions of pipeline stages, and make `@step` the schedule that runs them.

    Stages are those of the attribute `dist.stages`, which `apply-plan` writes, or else as equal as
    whole blocks allow. Micro-batches are the time axis that is left; without one the step runs on
    the whole batch. `schedule` orders them; `chunks` is how many stages each coordinate of the
    stage axis has. `zero` says what becomes of parameters that are stored in shards: with 1 and 2
    they are gathered once in a step, with 3 for each pass of a micro-batch; their gradients are
    scattered once with 1, and for each micro-batch with 2 and 3. Schedule `list` orders for a
    `cluster`, a preset's name or a YAML file. `shares` puts stages at several coordinates of the
    stage axis, each of which runs so many micro-batches, as `8/5,3` for two stages.

    Requires: a local program whose only time axis is that of micro-batches, as `split-batch{axis=
    micro}` makes it. Ensures: a staged program, in which nobody waits for what comes later;
    numerics unchanged.
    """

    name = "cut-stages"
    schedule: str = PIPELINE_SCHEDULES[0]
    chunks: int = 0
    zero: int = 3
    cluster: str = ""
    shares: str = ""

    def run(self, program: Program) -> None:
        mesh = program.mesh
        if mesh is not None and mesh.num_stages == 1 and not mesh.time_names:
            note(
                "the mesh has neither stages nor micro-batches; give it an axis stage=2, or "
                "leave the pass out."
            )
        cut_stages(program, self.schedule, self.chunks, self.zero, self.cluster, self.shares)
