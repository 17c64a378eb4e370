"""`auto` against all plans of small spaces, its constraints, and what it does when it is stopped."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random

import pytest

from shardweave.benchmarks.baselines.exhaustive import plan_exhaustive
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.auto.estimate import Estimator, filled
from shardweave.planners.auto.evaluate import Evaluator
from shardweave.planners.auto.planner import AutoOptions, plan_auto
from shardweave.planners.auto.plans import PlanMaker
from shardweave.planners.auto.reader import CostReader, Depths
from shardweave.planners.auto.search import LATE, PATIENCE, JointSearch
from shardweave.planners.auto.space.constraints import Constraints, point_of, with_memory
from shardweave.planners.auto.space.point import JointPoint
from shardweave.planners.auto.space.space import joint_space as auto_space
from shardweave.planners.auto.worth import over_own, worth
from shardweave.planners.call import call_planner
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import Lowerings, local_program
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Candidate, PlanError, Predicted
from shardweave.planners.predict.predict import predict_plan
from shardweave.planners.trials.trials import Host
from shardweave.tests.marks import slow
from shardweave.tests.zoo import assert_equals_eager, captured

SPEC = "gpt:layers=1,hidden=32,heads=4,vocab=32,seq=8,batch=8"
CLUSTER = find_cluster("perlmutter:nodes=1")  # 4 devices


def program() -> Program:
    return captured(SPEC).program


MESH = Mesh(data=2, tensor=2)


@cache
def joint_space() -> tuple[Predicted, ...]:
    """Every plan of a mesh without micro-batches, put together without the planner's code."""
    lowerings = Lowerings(program())
    base = plan_megatron(program(), MESH)
    found: list[Predicted] = []
    for zero, policy, split in product((0, 1, 3), ("none", "layer", "after-communication"), (1, 2)):
        for schedule in ("", "cross-pass", "sub-batch") if split > 1 else ("", "cross-pass"):
            plan = replace(base, zero=zero, recompute=policy, batch_split=split, schedule=schedule)
            found.append(predict_plan(lowerings, plan, CLUSTER))
    return tuple(found)


@pytest.mark.slow
@pytest.mark.parametrize("is_tight", [False, True])
def test_regret_against_every_plan_of_a_mesh_is_below_two_percent(is_tight: bool) -> None:
    peaks = sorted(one.peak_bytes for one in joint_space())
    limit = peaks[len(peaks) // 8] if is_tight else peaks[-1]
    best = min(one.time_s for one in joint_space() if one.peak_bytes <= limit)
    options = AutoOptions(
        forbid="schedule=list,schedule=blocking,sub_batches=4",
        fix="micro_batches=1,sequence_parallel=false",
        memory=f"{int(limit)}B",
        propose=False,
    )
    plan = plan_auto(program(), MESH, cluster=CLUSTER, options=options)
    assert plan.predicted is not None
    assert plan.predicted.fits
    assert plan.predicted.time_s <= 1.02 * best


@pytest.mark.slow
def test_plan_is_not_slower_than_that_of_any_other_planner() -> None:
    plan = call_planner("auto", program(), None, cluster=CLUSTER, options={"simulate": 12})
    assert plan.predicted is not None
    others = {
        "megatron": {},
        "amp": {"simulate": 1},
        "axonn": {},
    }
    for name, options in others.items():
        other = call_planner(name, program(), None, cluster=CLUSTER, options=options)
        took = predict_plan(program(), other, CLUSTER)
        assert plan.predicted.time_s <= took.time_s, name


def planned(**options: str | int) -> Plan:
    given = replace(AutoOptions(simulate=6, propose=False), **options)
    return plan_auto(program(), None, cluster=CLUSTER, options=given)


def test_fixed_and_forbidden_values_hold_for_the_plan_and_all_candidates() -> None:
    plan = planned(fix="tensor=2,recompute=layer", forbid="zero=1,zero=3")
    assert (plan.mesh["tensor"], plan.recompute) == (2, "layer")
    assert plan.zero in (0, 2)
    assert all("tensor=2" in one.name and "zero" not in one.name for one in plan.candidates)


def test_reasons_say_what_was_looked_at_and_what_each_choice_is_worth() -> None:
    reasons = "\n".join(planned(fix="micro_batches=1,stages=1").reasons)
    assert "points of the joint space were estimated" in reasons
    assert "after simulating 6 candidate plans, its limit" in reasons
    assert "raise the limit by -O simulate=12" in reasons
    assert " is worth " in reasons
    assert "), (" not in reasons


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fix": "tensr=2"}, "found 'tensr=2', expected DIMENSION=VALUE; did you mean 'tensor'"),
        ({"fix": "recompute=some"}, "recompute 'some' is unknown; use one of none, layer"),
        ({"fix": "tensor=2,tensor=4"}, "tensor is both 2 and 4; keep one of them"),
        ({"forbid": "zero=4"}, "zero '4' is unknown; use one of 0, 1, 2, 3"),
        ({"fix": "tensor=3"}, "no plan with tensor=3 on 4 devices .*: tensor can be 1 or 2 or 4"),
        (
            {"fix": "data=4,tensor=4"},
            ": data=4 x tensor=4 is 16, which does not divide 4 devices; data can be 1; tensor can be 1",
        ),
        (
            {"fix": "tensor=3,data=3"},
            "data=3 x tensor=3 is 9, .*; no single one of these can be left out to have one",
        ),
        ({"fix": "tensor=2", "forbid": "tensor=2"}, "tensor=2 is both fixed and forbidden"),
        ({"fix": "tensor"}, "found 'tensor', expected DIMENSION=VALUE; the dimensions are"),
        ({"fix": "stages=2,pipeline=dualpipe-v"}, ": pipeline can be 1f1b or gpipe or"),
        ({"memory": "lots"}, "memory is 'lots'; give bytes with a unit"),
        ({"memory": "70"}, "memory is '70', without a unit, which means 70 bytes; write 70GiB"),
        (
            {"memory": "40960"},
            "without a unit, which means 40960 bytes; write 40960MiB, or 40960B for so few",
        ),
        ({"memory": "70GiB"}, "memory is 70GiB, more than the .* of device 'A100-40GB' of cluster"),
        ({"memory": "1KiB"}, "for parameters and optimizer alone, at least .* use more devices"),
    ],
)
def test_bad_options_and_what_they_leave_nothing_of_are_told(
    options: dict[str, str], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        planned(**options)


@pytest.mark.slow
def test_products_are_kept_where_nothing_less_fits_and_that_is_fastest() -> None:
    found = captured("gpt:layers=2,hidden=64,heads=4,vocab=32,seq=32,batch=8").program
    every = plan_exhaustive(found, MESH, cluster=CLUSTER, simulate=100, top=100)
    least = min(one.predicted.peak_bytes for one in every.candidates if "rec" not in one.name)
    fitting = [one for one in every.candidates if one.predicted.peak_bytes < least]
    fastest = min(fitting, key=lambda one: one.predicted.time_s)
    assert "after-products" in fastest.name
    options = AutoOptions(fix="zero=0,micro_batches=1,schedule=in-order", propose=False)
    tight = with_memory(CLUSTER, f"{int(least) - 1}B")
    plan = plan_auto(found, MESH, cluster=tight, options=options)
    assert plan.recompute == "after-products"
    assert plan.predicted is not None
    assert plan.predicted.time_s <= fastest.predicted.time_s


@pytest.mark.slow
def test_memory_that_no_point_fits_into_is_told_where_others_propose_plans_too() -> None:
    with pytest.raises(PlanError, match="for parameters and optimizer alone, at least"):
        planned(memory="1KiB", propose=True)


def test_value_that_was_asked_for_and_makes_no_difference_is_told() -> None:
    told = "buckets=7 was asked for, but makes no difference to this plan"
    assert told in planned(fix="buckets=7,stages=2").reasons
    assert told not in planned(fix="buckets=7,data=4,micro_batches=1,schedule=in-order").reasons


@pytest.mark.parametrize("at", ["256 points estimated", "simulated; best", slow("asking")])
def test_interrupted_search_gives_the_best_so_far(at: str) -> None:
    calls: list[str] = []

    def tell(text: str) -> None:
        calls.append(text)
        if at in text:
            raise KeyboardInterrupt

    options = AutoOptions(simulate=2)
    plan = plan_auto(program(), None, cluster=CLUSTER, host=Host(None, tell), options=options)
    assert plan.predicted is not None
    assert any("it was interrupted" in reason for reason in plan.reasons)


def search_of_16() -> JointSearch:
    """A search that may simulate 16 points, and has seen none."""
    reader = CostReader(Depths.of(program()), CLUSTER)
    estimator = Estimator(reader)
    return JointSearch(
        space=auto_space(reader, None, Constraints.parse("", ""), has_list=False),
        estimator=estimator,
        evaluator=Evaluator(PlanMaker(estimator)),
        capacity=1.0,
        simulate=16,
        deadline_s=math.inf,
    )


def test_plan_of_another_planner_is_compared_with_the_best_of_the_space_and_each_choice() -> None:
    search = search_of_16()
    rival = Candidate("axonn, in-order", Predicted(1.0, compute_s=1.0))
    (alone,) = over_own(search, rival)
    assert alone == "axonn, in-order fits, and no point of the joint space that was simulated does"
    search.evaluator.simulated[JointPoint(data=4)] = Predicted(1.5, compute_s=1.5)
    (compared,) = over_own(search, rival)
    assert compared.startswith("axonn, in-order is worth 500.00 ms against the joint space's own:")
    of_grid = point_of(Plan(mesh={"data": 2, "z": 2, "y": 1, "x": 1}))
    lines = list(worth(search, of_grid, rival.predicted))
    assert any(line.startswith("replica=2 is worth 500.00 ms (50.0%)") for line in lines)
    search.evaluator.simulated[JointPoint(data=4, zero=1)] = Predicted(1.0, compute_s=1.0)
    lines = list(worth(search, of_grid, rival.predicted))
    assert "zero=3 is a tie with zero=1: data=4,tensor=1, zero 1, in-order takes +0.0%" in lines
    assert not any(line.startswith(("pipeline=", "chunks=")) for line in lines)


def test_search_goes_on_while_nothing_fits_and_where_its_last_points_were_faster() -> None:
    search = search_of_16()
    found = search.evaluator.simulated
    for number in range(16):
        found[JointPoint(data=number + 1)] = Predicted(1.0, memory_bytes={"activations": 2.0})
    assert search.allowed == PATIENCE * 16
    found[JointPoint(tensor=2)] = Predicted(1.0)
    assert search.allowed == 17 + 16 // LATE
    found[JointPoint(tensor=4)] = Predicted(2.0)
    assert search.allowed == 17 + 16 // LATE
    found[JointPoint(tensor=8)] = Predicted(0.5)
    assert search.allowed == 19 + 16 // LATE


def test_stages_that_do_not_fit_are_tried_at_once_with_the_first_and_the_last_on_one_device() -> (
    None
):
    found = captured("gpt:layers=2,hidden=64,heads=4,vocab=2048,seq=64,batch=4").program
    cluster = replace(CLUSTER, nodes=(replace(CLUSTER.nodes[0], devices=2),))
    fix = "stages=2,micro_batches=4,sub_batches=1,zero=0,recompute=none,schedule=cross-pass"

    def peak(pipeline: str) -> float:
        options = AutoOptions(fix=f"{fix},pipeline={pipeline}", propose=False)
        predicted = plan_auto(found, None, cluster=cluster, options=options).predicted
        assert predicted is not None
        return predicted.peak_bytes

    memory = int((peak("1f1b") + peak("zero-bubble-v")) / 2)
    told: list[str] = []
    plan_auto(
        found,
        None,
        cluster=with_memory(cluster, f"{memory}B"),
        host=Host(None, told.append),
        options=AutoOptions(fix=fix, propose=False),
    )
    seen = [text for text in told if "simulated" in text]
    assert "none fits so far" in seen[0]
    assert "zero-bubble-v" in seen[1]


def test_time_limit_that_ends_among_the_estimates_gives_the_best_of_them() -> None:
    plan = plan_auto(
        program(), None, cluster=CLUSTER, options=AutoOptions(time_limit_s=1e-9, propose=False)
    )
    assert plan.predicted is not None
    assert plan.predicted.source == "simulated"
    assert "1 point of the joint space was" in plan.reasons[0]
    assert "the search ran out of time" in plan.reasons[0]


def test_time_limit_before_anything_fits_says_so() -> None:
    fix = "data=4,zero=0,recompute=none,micro_batches=1"
    found = planned(fix=fix, simulate=1).predicted
    assert found is not None
    state = 4 * found.memory_bytes["parameters"]  # with gradients and Adam's two moments
    assert state < found.peak_bytes
    memory = f"{int((state + found.peak_bytes) / 2)}B"
    options = AutoOptions(time_limit_s=1e-9, propose=False, memory=memory, fix=fix)
    with pytest.raises(
        PlanError, match="no plan that fits was found yet: the search ran out of time, and"
    ):
        plan_auto(program(), None, cluster=CLUSTER, options=options)


def test_constraints_read_several_values() -> None:
    found = Constraints.parse("tensor=8", "zero=3;recompute=layer")
    assert str(found) == "tensor=8, not zero=3, not recompute=layer"


@pytest.mark.parametrize(
    ("fix", "mesh"),
    [
        ("tensor=1", {"data": 1, "context": 4, "tensor": 1}),  # nothing else cuts one sample
        ("context=2,tensor=2,stages=1", {"data": 1, "context": 2, "tensor": 2}),
    ],
)
def test_sequences_are_cut_where_that_is_all_or_asked_for(fix: str, mesh: dict[str, int]) -> None:
    case = captured("gpt:layers=1,hidden=32,heads=4,vocab=32,seq=64,batch=1")
    options = AutoOptions(simulate=2, fix=fix, propose=False)
    plan = plan_auto(case.program, None, cluster=CLUSTER, options=options)
    assert plan.mesh == mesh
    assert_equals_eager(local_program(case.program, plan), case)


@pytest.mark.slow
def test_experts_are_cut_over_an_axis_of_their_own() -> None:
    spec = "gpt:layers=1,hidden=16,heads=4,vocab=32,seq=8,batch=4,experts=4,capacity=1"
    case = captured(spec)
    space = auto_space(CostReader(Depths.of(case.program), CLUSTER), None, Constraints())
    assert {point.expert for point in space.points()} == {1, 2, 4}
    options = AutoOptions(simulate=2, fix="expert=2,zero=3,tensor=1", propose=False)
    plan = plan_auto(case.program, None, cluster=CLUSTER, options=options)
    assert (plan.mesh["expert"], plan.zero) == (2, 3)
    assert_equals_eager(local_program(case.program, plan), case)


def test_the_step_of_a_deep_model_is_that_of_its_whole_program() -> None:
    whole = captured("gpt:layers=10,hidden=32,heads=4,vocab=32,seq=8,batch=8").program
    options = AutoOptions(simulate=2, fix="stages=1,micro_batches=1", propose=False)
    plan = plan_auto(whole, None, cluster=CLUSTER, options=options)
    said, found = plan.predicted, predict_plan(whole, plan, CLUSTER)
    assert said is not None
    assert (said.time_s, said.peak_bytes) == (found.time_s, found.peak_bytes)
    assert said.communication_s == found.communication_s


def test_buckets_that_are_asked_for_join_what_is_smaller() -> None:
    found = planned(fix="buckets=64,data=4,zero=1,micro_batches=1")
    assert found.alone_bytes == 64 * 2**20
    assert "buckets of 64 MiB" in found.candidates[0].name

    def num_messages(alone_bytes: int) -> int:
        local = local_program(program(), replace(found, schedule="", alone_bytes=alone_bytes))
        return sum(one.count for one in local.stats().collectives)

    assert num_messages(found.alone_bytes) < num_messages(256)
    assert_equals_eager(local_program(program(), found), captured(SPEC))


def test_no_cuts_of_a_pipeline_beat_the_time_that_fills_and_drains_it() -> None:
    random = Random(0)
    for _ in range(200):
        stages, micro_batches = random.randint(1, 6), random.randint(1, 8)
        times = [random.random() ** 4 + 1e-3 for _ in range(stages)]
        before = [sum(times[:number]) for number in range(stages)]
        step_s = max(micro_batches * own + first for own, first in zip(times, before, strict=True))
        assert filled(sum(times), stages, micro_batches) <= step_s * (1 + 1e-12)
    assert filled(1.0, 1, 4) == 4.0
    assert filled(3.0, 2, 2) == pytest.approx(4.0)  # stages of 2 and 1: 2 x 2, and 2 x 1 + 2
