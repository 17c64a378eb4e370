"""What a run's fullest device holds: as the simulator counts it, with what its framework adds."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from shardweave.benchmarks.runs.frameworks import framework_of
from shardweave.benchmarks.runs.rows import MeasuredRun
from shardweave.ir.dialects.annotations import layer_of
from shardweave.ir.program.program import Program
from shardweave.planners.cost.memory import memory_over_time
from shardweave.planners.cost.workload import Workload
from shardweave.planners.predict.pipeline.simulation import PipelineSimulation, StageResult

HALF = 2
"""Bytes of a number of 16 bits."""


def fullest(run: MeasuredRun, found: PipelineSimulation) -> tuple[float, float]:
    """Bytes of the device that takes the largest share of its memory, and those that it has."""
    held = framework_of(run.framework, run.source).held_bytes
    each = [(_bytes_of(run, stage) + held, float(stage.memory_bytes)) for stage in found.stages]
    return max(each, key=lambda row: row[0] / row[1])


def _bytes_of(run: MeasuredRun, stage: StageResult) -> float:
    """With gradients as the framework adds them up, where it trains in bf16, and the optimizer's
    state divided over the devices that share a sequence too."""
    parts = dict(stage.memory_parts)
    if run.precision.endswith(("bf16", "bfloat16", "fp8")):
        kept = framework_of(run.framework, run.source).gradient_bytes / HALF
        parts["gradients"] *= kept
    if run.zero and run.data > 1:
        parts["optimizer"] /= run.context
    return sum(parts.values())


def with_workspace(work: Workload, program: Program) -> Workload:
    """The blocks of a program with what each holds for a while as their workspace.

    It is the most that lives while ops of a block run, without what it and the blocks before keep
    for the backward pass: of a block that is computed again also what its passes hand each other.
    Linear in the ops.
    """
    places = {layer: index for index, one in enumerate(work.blocks) for layer in one.layers}
    kept = list(accumulate(one.kept_bytes for one in work.blocks))
    most = [0] * len(work.blocks)
    last = 0
    _, *alive = memory_over_time(program)
    for op, parts in zip(program.ops, alive, strict=True):
        last = places.get(layer_of(op), last)
        size = parts["activations"] + parts["communication"] - kept[last]
        most[last] = max(most[last], size)
    blocks = [
        replace(one, workspace_bytes=size) for one, size in zip(work.blocks, most, strict=True)
    ]
    return replace(work, blocks=tuple(blocks))
