"""The rows of benchmarks/overlap.py that are ours, as pipelines of passes."""

from __future__ import annotations

from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import PassPipeline
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.megatron.planner import plan_megatron

PARTITION = (
    "split-addmm,add-pending-sums,propagate-shardings,insert-collectives,unroll-time-axes,"
    "cse,dce,merge-collectives"
)
DELETE = "delete-redundant-collectives"
SPLIT = "split-batch{n=2}"
ROWS: dict[str, tuple[str, str, str]] = {
    "blocking": ("", "", "blocking"),
    "blocking+delete": ("", DELETE, "blocking"),
    "sub-batch": (SPLIT, "", "sub-batch"),
    "cross-pass": (SPLIT, "", "cross-pass"),
    "cross-pass+delete": (SPLIT, DELETE, "cross-pass"),
    "list+delete": (SPLIT, DELETE, "list"),
}
"""Name: passes before partitioning, passes after recomputation, schedule."""


def pipeline(name: str, program: Program, cluster: str) -> Program:
    """The program of one of our rows."""
    before, after, schedule = ROWS[name]
    mesh = program.mesh
    assert mesh is not None
    plan = ApplyPlanPass.of(plan_megatron(program, mesh))
    recompute = 'rematerialize{policy="layer"}'
    overlap = f'overlap-communication{{schedule="{schedule}" cluster="{cluster}"}}'
    spec = [before, PARTITION, recompute, after, "start-collectives", overlap]
    return PassPipeline([plan, ",".join(filter(None, spec))]).run(program)
