"""offload-states: a mark on the program, memory that moves to the host, and the copies' time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardweave.ir.program.program import Program
from shardweave.ir.proof.prove import prove
from shardweave.passes.notes import PassNote
from shardweave.passes.pipeline import as_mesh, run_passes
from shardweave.planners.cost.cluster import ClusterError
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.stages.choose import with_pipeline
from shardweave.planners.predict.predict import predict_plan
from shardweave.tests.planners.small_clusters import with_dtype
from shardweave.tests.zoo import SPECS, captured, megatron

STEP = "gpt:layers=4,hidden=64,heads=4,vocab=64,seq=8,batch=4"


@pytest.mark.parametrize("mesh", ["data=2", "stage=2"])
def test_states_move_to_the_host_for_the_time_of_their_copies(mesh: str) -> None:
    program = captured(STEP).program
    plan = with_pipeline(megatron(STEP, mesh), program, as_mesh(mesh))
    plan = replace(plan, update="AdamW")
    cluster = with_dtype(find_cluster("h100-pod"))
    kept, away = (
        predict_plan(program, replace(plan, offload=choice), cluster)
        for choice in ("none", "states")
    )
    print(kept, away)
    assert "optimizer" not in away.memory_bytes
    assert kept.peak_bytes - away.peak_bytes <= kept.memory_bytes["optimizer"]
    assert away.peak_bytes < kept.peak_bytes
    assert away.update_s >= kept.update_s
    unnamed = predict_plan(program, replace(plan, offload="states", update=""), cluster)
    assert unnamed.update_s == away.update_s
    with pytest.raises(ClusterError, match="host_bandwidth_bytes_s"):
        predict_plan(program, replace(plan, offload="states"), with_dtype(find_cluster("testbed")))


def test_mark_is_kept_by_text_and_proved() -> None:
    program = captured(SPECS["gpt"]).program
    marked = run_passes(program, "offload-states")
    assert "dist.host_states" in str(marked)
    assert Program.parse(str(marked)).has_host_states
    assert not program.has_host_states
    prove(marked, against=program)


def test_step_without_gradients_is_noted() -> None:
    forward = Program.parse("builtin.module { func.func @step() -> () { func.return } }")
    with pytest.warns(PassNote, match="no optimizer state is offloaded"):
        run_passes(forward, "offload-states")
