"""Programs that plans share: what is made once is what each plan's own lowering makes."""

from __future__ import annotations

from dataclasses import replace

from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.lowering.lower import Lowerings, local_program
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.tests.zoo import captured

SPEC = "gpt:layers=2,hidden=32,heads=4,vocab=32,seq=8,batch=8"

CUTS = {
    "early": (("wte", "wpe"), ("h.*", "ln_f", "head")),
    "late": (("wte", "wpe", "h.0"), ("h.1", "ln_f", "head")),
    "four": (("wte", "wpe"), ("h.0",), ("h.1",), ("ln_f", "head")),
}


def test_plans_of_other_stages_share_a_partition_and_are_lowered_as_alone() -> None:
    program = captured(SPEC).program
    base = replace(plan_megatron(program, Mesh(data=2)), mesh={"pipeline": 2, "data": 2}, zero=3)
    lowerings = Lowerings(program)
    for cut, recompute, schedule in (
        ("early", "none", "zero-bubble"),
        ("late", "layer", "zero-bubble"),
        ("late", "none", "gpipe"),
        ("four", "after-communication", "zero-bubble-v"),
    ):
        pipeline = Pipeline(CUTS[cut], 2, schedule=schedule)
        plan = replace(base, recompute=recompute, pipeline=pipeline, schedule="cross-pass")
        assert str(lowerings.local(plan)) == str(local_program(program, plan)), cut
    assert sum(key.startswith("partitioned") for key in lowerings.made) == 1
