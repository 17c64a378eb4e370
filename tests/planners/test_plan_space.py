"""Points of the plan space that could not be lowered: each stands for a kind."""

from __future__ import annotations

import pytest

from shardweave.benchmarks.fuzz_plans import maker_of, program_of
from shardweave.ir.verify.program import check
from shardweave.planners.auto.space.point import JointPoint
from shardweave.planners.lowering.lower import local_program

EIGHT = "perlmutter:nodes=2"


@pytest.mark.parametrize(
    ("model", "point"),
    [
        # Attention's backward pass has keys handed to it by an all-to-all.
        ("llama", JointPoint(data=2, tensor=4, sequence_parallel=True, recompute="layer")),
        # The backward pass computes a power of what it has in shards of its own.
        ("t5", JointPoint(data=2, context=2, stages=2, micro_batches=2)),
    ],
)
def test_point_is_lowered_and_verified(model: str, point: JointPoint) -> None:
    program = program_of(model)
    check(local_program(program, maker_of(model, EIGHT).plan(point, program)))
