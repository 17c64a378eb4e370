"""Stages at several ranks: orders that end, micro-batches in proportion, and what they take."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.cost.cluster import Cluster, DeviceType, NodeType
from shardweave.planners.lowering.lower import Lowerings
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.lowering.stages.choose import (
    devices_of_plan,
    fewer_micro_batches,
    with_pipeline,
)
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import (
    PIPELINE_SCHEDULES,
    Pipeline,
    PlanError,
    check_shares,
)
from shardweave.planners.predict.pipeline.simulation import PipelineSimulation
from shardweave.planners.predict.predict import simulation_of
from shardweave.planners.schedules.list_order import UNIT_COSTS, PassCosts, list_table, time_of
from shardweave.planners.schedules.schedules import Schedule, find_schedule
from shardweave.planners.schedules.table import Table, actions_in_order, gives_of
from shardweave.planners.schedules.uneven import (
    fitted_shares,
    read_shares,
    shares_text,
    takers_of,
    uneven_table,
    uneven_tables,
)
from shardweave.tests.zoo import captured, megatron

GPT = "gpt:layers=2,hidden=16,heads=2,vocab=32,seq=8,batch=8"


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_stages_at_one_rank_each_have_the_order_of_the_schedule(schedule: str, ranks: int) -> None:
    expected = find_schedule(schedule).table(ranks, 6, 1)
    assert uneven_table(schedule, ((6,),) * ranks) == expected


def random_shares(chance: Random) -> tuple[tuple[int, ...], ...]:
    count = chance.randint(4, 12)
    shares: list[tuple[int, ...]] = []
    for _ in range(chance.randint(1, 4)):
        cuts = sorted(chance.sample(range(1, count), chance.randint(0, 3)))
        shares.append(tuple(b - a for a, b in zip([0, *cuts], [*cuts, count], strict=True)))
    return tuple(shares)


@pytest.mark.parametrize("seed", range(40))
def test_every_order_ends_and_runs_each_micro_batch_at_one_rank(seed: int) -> None:
    chance = Random(seed)
    shares = random_shares(chance)
    table, schedule, chunks = random_table(chance, shares)
    check_order(table, schedule, shares, chunks)


def random_table(
    chance: Random, shares: tuple[tuple[int, ...], ...]
) -> tuple[Table, Schedule, int]:
    """The table of some schedule that takes so many micro-batches."""
    names = [name for name in PIPELINE_SCHEDULES if name != "list"]
    chance.shuffle(names)
    for name in names:
        schedule = find_schedule(name)
        chunks = schedule.chunks if schedule.fixed else chance.randint(1, 3)
        try:
            return uneven_table(name, shares, chunks), schedule, chunks
        except PlanError:
            continue
    raise AssertionError("gpipe takes any number")


def check_order(
    table: Table, schedule: Schedule, shares: tuple[tuple[int, ...], ...], chunks: int
) -> None:
    """It ends, and each stage runs each micro-batch once, at a rank of its own and by its share."""
    count, groups = sum(shares[0]), len(shares)
    order = actions_in_order(table, groups * chunks)
    assert len(order) == len({action for _, action in order})
    done = Counter(gift for _, action in order for gift in gives_of(action))
    assert done == Counter(
        (stage, kind, number)
        for stage in range(groups * chunks)
        for kind in "FIW"
        for number in range(count)
    )
    rows = iter(table)
    for group, own in enumerate(shares):
        for share, row in zip(own, rows, strict=False):
            assert len({one.micro_batch for one in row}) == share
            assert {schedule.place(one.stage, groups) for one in row} == {group}
    assert next(rows, None) is None


# 1F1B begins only as many micro-batches as there are ranks.
@pytest.mark.parametrize("schedule", sorted({*PIPELINE_SCHEDULES} - {"1f1b", "list"}))
def test_equal_shares_are_pipelines_side_by_side(schedule: str) -> None:
    chunks = find_schedule(schedule).chunks
    found = uneven_table(schedule, ((4, 4), (4, 4)), chunks)
    alone = find_schedule(schedule).table(2, 4, chunks)
    for place, row in enumerate(found):
        # Of the two pipelines, one has the even micro-batches, the other the odd ones.
        own = [
            one._replace(micro_batch=2 * one.micro_batch + place % 2) for one in alone[place // 2]
        ]
        assert list(row) == own


@pytest.mark.parametrize("shares", [(3, 1), (1, 1), (5, 2, 1), (7,), (4, 4, 3)])
def test_nobody_is_ever_more_than_one_micro_batch_from_his_share(shares: tuple[int, ...]) -> None:
    takers, total = takers_of(shares), sum(shares)
    assert [takers.count(rank) for rank in range(len(shares))] == list(shares)
    for end in range(total + 1):
        for rank, share in enumerate(shares):
            assert abs(takers[:end].count(rank) - share * end / total) <= 1


def test_shares_of_fewer_micro_batches_keep_their_proportions() -> None:
    assert fitted_shares(((8,), (6, 2)), 4) == ((4,), (3, 1))
    assert fitted_shares(((7, 1),), 2) == ((1, 1),)
    with pytest.raises(
        PlanError, match="a stage has 2 ranks in 'shares', more than the 1 micro-batches"
    ):
        fitted_shares(((8,), (6, 2)), 1)
    pipeline = Pipeline((("a",), ("b",)), 8, shares=((8,), (6, 2)))
    found = fewer_micro_batches(pipeline, 5, 4, 3)
    assert (found.micro_batches, found.shares) == (4, ((4,), (3, 1)))


def test_shares_read_back_from_their_text() -> None:
    shares = ((8,), (5, 3))
    assert shares_text(shares) == "8/5,3"
    assert read_shares("8/5,3") == shares
    with pytest.raises(ValueError, match="shares '8/x' are malformed; write the micro-batches"):
        read_shares("8/x")


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        (((4,),) * 3, "shares has 3 entries, which do not divide 2 stages"),
        (
            ((4,), (3, 2)),
            r"shares\[1\] is \[3, 2\]; list the number of .* each rank .* 1 or more, 4 in all",
        ),
    ],
)
def test_shares_that_do_not_fit_are_refused(shares: tuple[tuple[int, ...], ...], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        check_shares(shares, 2, 4)


def test_orders_that_there_are_not_are_refused() -> None:
    with pytest.raises(
        PlanError,
        match="'interleaved-1f1b' cannot order the 7 micro-batches",
    ):
        uneven_table("interleaved-1f1b", ((7,), (7,), (7,)), 2)


@pytest.mark.parametrize("chunks", [1, 2])
def test_list_orders_stages_at_several_ranks_no_slower_than_other_schedules(chunks: int) -> None:
    shares, num_stages = ((5, 3), (8,)), 2 * chunks
    others = uneven_tables(shares, chunks)
    best_s = min(time_of(table, num_stages, UNIT_COSTS) for table in others)
    found = uneven_table("list", shares, chunks)
    assert len(actions_in_order(found, num_stages)) == 3 * 8 * num_stages
    by_rank = [{action.micro_batch for action in row} for row in found]
    assert [len(numbers) for numbers in by_rank] == [5, 3, 8]
    assert time_of(found, num_stages, UNIT_COSTS) <= best_s


def test_list_goes_by_the_speed_of_each_rank_that_has_a_stage() -> None:
    # The second rank of the one stage is half as fast, and has three of the five micro-batches.
    costs = PassCosts(lambda stage_at, kind: 2.0 if stage_at[1] else 1.0)
    placement = [[0, 1, 1, 0, 1]]
    table = list_table(2, 5, 1, costs, placement=placement)
    assert [sorted({action.micro_batch for action in row}) for row in table] == [[0, 3], [1, 2, 4]]
    assert time_of(table, 1, costs) == 3 * 3 * 2.0


def test_stages_of_one_coordinate_share_its_devices() -> None:
    pipeline = Pipeline(
        (("a",), ("b",), ("c",), ("d",)), 4, schedule="zero-bubble-v", shares=((4,), (3, 1)),
        ranks=((2,), (0, 1), (0, 1), (2,)),
    )  # fmt: skip
    plan = replace(plan_of(((4,), (3, 1))), pipeline=pipeline)
    assert devices_of_plan(plan, Mesh(stage=3)) == (2, 0, 1)
    assert Plan.from_json(plan.to_json()) == plan
    other = replace(pipeline, ranks=((2,), (0, 1), (1, 0), (2,)))
    with pytest.raises(PlanError, match="put stage 2 on devices"):
        devices_of_plan(replace(plan, pipeline=other), Mesh(stage=3))


def test_plan_whose_shares_do_not_fit_the_mesh_is_refused() -> None:
    plan = plan_of(((4,), (3, 1)))
    program = captured(GPT).program
    assert with_pipeline(plan, program, Mesh(stage=3)) is plan
    with pytest.raises(
        PlanError, match=r"'shares' list 3 ranks in all, but the stage axis .* has 2"
    ):
        with_pipeline(plan, program, Mesh(stage=2))


def test_plan_with_stages_on_a_mesh_without_is_refused_where_one_device_cannot_run_all() -> None:
    program, mesh = captured(GPT).program, Mesh(data=2)
    stages = Pipeline(balanced_stages(program, 2), 2)
    plan = Plan(pipeline=stages)
    with pytest.raises(PlanError, match=r"mesh data=2 has no stage axis.* as pipeline=2, or"):
        with_pipeline(plan, program, mesh)
    one_by_one = replace(plan, pipeline=replace(stages, schedule="gpipe"))
    assert with_pipeline(one_by_one, program, mesh) is one_by_one


def test_devices_of_a_stage_follow_its_coordinates() -> None:
    plan = plan_of(((4,), (3, 1)), ranks=((5, 1), (3, 2, 0, 4)))
    assert devices_of_plan(plan, Mesh(stage=3, data=2)) == (1, 5, 2, 3, 0, 4)
    assert devices_of_plan(plan, Mesh(data=2, stage=3)) == (1, 2, 0, 5, 3, 4)
    few = plan_of(((4,), (3, 1)), ranks=((5, 1), (3, 2)))
    with pytest.raises(PlanError, match=r"stage 1 has 2 ranks, expected 4, .* each of its 2 coord"):
        devices_of_plan(few, Mesh(stage=3, data=2))


def test_plan_with_shares_reads_back_from_json() -> None:
    plan = plan_of(((4,), (3, 1)))
    assert Plan.from_json(plan.to_json()) == plan
    text = plan.to_json().replace("3,\n        1", "3,\n        2")
    with pytest.raises(
        PlanError, match=r"shares\[1\] is \[3, 2\]; list the number of micro-batches"
    ):
        Plan.from_json(text)


def plan_of(
    shares: tuple[tuple[int, ...], ...],
    ranks: tuple[tuple[int, ...], ...] = (),
    schedule: str = "1f1b",
) -> Plan:
    program = captured(GPT).program
    stages = balanced_stages(program, len(shares) * find_schedule(schedule).chunks)
    pipeline = Pipeline(stages, sum(shares[0]), ranks=ranks, schedule=schedule, shares=shares)
    mesh = f"stage={sum(map(len, shares))}"
    return replace(megatron(GPT, mesh), pipeline=pipeline)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-v"])
def test_micro_batches_in_proportion_take_less_on_devices_of_two_speeds(schedule: str) -> None:
    fast = DeviceType("fast", {"float32": 3e9, "float64": 3e9}, 2**34, 3e12)
    slow = replace(fast, name="slow", flops={"float32": 1e9, "float64": 1e9})
    nodes = tuple(NodeType(one, 1, 1, nic_bandwidth_bytes_s=1e12) for one in ("fast", "slow"))
    cluster = Cluster("two", {"fast": fast, "slow": slow}, nodes)
    lowerings = Lowerings.of(captured(GPT).program)
    even, uneven = (
        simulation_of(lowerings, plan_of(shares, schedule=schedule), cluster)
        for shares in (((4, 4),), ((6, 2),))
    )
    assert isinstance(even, PipelineSimulation)
    assert isinstance(uneven, PipelineSimulation)
    # Four micro-batches on the slow device take as long as twelve on the fast one; else six do.
    assert uneven.time_s / even.time_s == pytest.approx(6 / 12, rel=0.05)
    assert even.stages[0].bubble_s > 0.6 * even.time_s
