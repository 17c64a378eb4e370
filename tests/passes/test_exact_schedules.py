"""Every schedule, recomputation policy and number of sub-batches equals eager to 1e-9."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from shardweave.ir.dialects.annotations import copy_of, phase_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.storage import kept_bytes
from shardweave.passes.memory.rematerialize import POLICIES
from shardweave.passes.pipeline import run_passes
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.overlap.overlap_communication import SCHEDULES
from shardweave.tests.marks import slow
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured, megatron

MODELS = ("gpt", "llama", "bert")
MESHES = ("tensor=2", "tensor=4", "data=2,tensor=2")
COUNTS = (1, 2, 4)

PARTITIONING = "split-addmm,add-pending-sums,propagate-shardings,insert-collectives,unroll-time-axes,cse,dce,merge-collectives"


@cache
def sub_batches(name: str, mesh: str, num: int) -> Program:
    """The local program of `num` sub-batches, written out."""
    spec = SPECS[name]
    passes = [ApplyPlanPass.of(megatron(spec, mesh)), f"split-batch{{n={num}}}", PARTITIONING]
    return run_passes(captured(spec).program, passes, mesh=mesh)


def recomputed(program: Program, policy: str, *, deletes: bool) -> Program:
    if policy == "budget":
        least = kept_bytes(run_passes(program, "rematerialize{policy=layer}"))
        between = (least + kept_bytes(program)) // 2
        policy = f"budget bytes={between}"
    passes = f"rematerialize{{policy={policy}}}"
    return run_passes(program, passes + (",delete-redundant-collectives" if deletes else ""))


def scheduled(program: Program, schedule: str) -> Program:
    """On a preset that is large enough for all meshes, and knows float64."""
    overlap = f"overlap-communication{{schedule={schedule} cluster=perlmutter}}"
    return run_passes(program, f"start-collectives,{overlap}")


# Each model, each mesh, each number of sub-batches, each policy and each schedule is met; the slow test
# below has all combinations.
@pytest.mark.parametrize("model", range(3))
def test_schedule_of_a_recomputed_step_equals_eager(model: int) -> None:
    mesh = (model + 1) % 3
    name, num = MODELS[model], COUNTS[(model + mesh) % 3]
    program = sub_batches(name, MESHES[mesh], num)
    for index, policy in list(enumerate(POLICIES))[model::3]:
        before = recomputed(program, policy, deletes=index % 2 == 1)
        after = scheduled(before, SCHEDULES[(2 * index + 1) % len(SCHEDULES)])
        assert_equals_eager(after, captured(SPECS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("num", COUNTS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_all_schedules_and_policies_equal_eager(name: str, mesh: str, num: int) -> None:
    program = sub_batches(name, mesh, num)
    for policy, deletes in product(POLICIES, (False, True)):
        before = recomputed(program, policy, deletes=deletes)
        for schedule in SCHEDULES:
            assert_equals_eager(scheduled(before, schedule), captured(SPECS[name]))


@pytest.mark.parametrize(
    ("name", "mesh"), [("cnn", "data=2"), ("unet", "tensor=2"), slow("t5", "tensor=2")]
)
def test_sub_batches_of_other_models_equal_eager(name: str, mesh: str) -> None:
    # The batch norms of the CNN need sums over the sub-batches inside the forward pass.
    before = recomputed(sub_batches(name, mesh, 2), "layer", deletes=True)
    assert any(phase_of(op) == "recompute" for op in before.ops)
    for schedule in ("cross-pass", "list"):
        assert_equals_eager(scheduled(before, schedule), captured(SPECS[name]))


@pytest.mark.parametrize("schedule", ["cross-pass", "list"])
def test_sub_batches_of_a_sequence_parallel_step_equal_eager(schedule: str) -> None:
    spec, mesh = SPECS["gpt"], "data=2,tensor=2"
    plan = ApplyPlanPass.of(megatron(spec, mesh, sequence_parallel=True))
    program = run_passes(captured(spec).program, [plan, "split-batch", PARTITIONING], mesh=mesh)
    before = recomputed(program, "layer", deletes=schedule == "list")
    assert_equals_eager(scheduled(before, schedule), captured(spec))


def test_two_time_axes_equal_eager() -> None:
    spec = SPECS["gpt"]
    split = "split-batch{n=2 axis=micro},split-batch{n=2}"
    passes = [ApplyPlanPass.of(megatron(spec, "data=2")), split, PARTITIONING, "rematerialize"]
    program = run_passes(captured(spec).program, passes, mesh="data=2")
    copies = {copy_of(op) for op in program.ops} - {None}
    assert len(copies) == 4
    assert_equals_eager(scheduled(program, "cross-pass"), captured(spec))
