"""Schedules of pipelines: the orders that PyTorch's own schedules have, and none that hangs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from unittest.mock import MagicMock

import pytest
import torch.distributed.pipelining.schedules as pytorch

from shardweave.benchmarks.bubble_bounds import bubble_bound_s
from shardweave.docs.schedules import FILE, drawing
from shardweave.planners.lowering.stages.picture import moments_of
from shardweave.planners.plan.plan_parts import PIPELINE_SCHEDULES
from shardweave.planners.schedules.list_order import (
    UNIT_COSTS,
    PassCosts,
    list_table,
    most_weight_passes_in_flight,
    time_of,
)
from shardweave.planners.schedules.schedules import LIST, find_schedule, fixed_tables
from shardweave.planners.schedules.table import Action, Kind, Table, actions_in_order
from shardweave.planners.schedules.uneven import uneven_table

DATA = Path(__file__).parents[1] / "data" / "pipelines"
"""From test/distributed/pipelining/artifacts of pytorch/pytorch (BSD-3-Clause)."""

CASES = [
    ("gpipe", pytorch.ScheduleGPipe, 1),
    ("interleaved-1f1b", pytorch.ScheduleInterleaved1F1B, 2),
    ("interleaved-1f1b", pytorch.ScheduleInterleaved1F1B, 3),
    ("zero-bubble", pytorch.ScheduleInterleavedZeroBubble, 1),
    ("zero-bubble", pytorch.ScheduleInterleavedZeroBubble, 2),
    ("zero-bubble-v", pytorch.ScheduleZBVZeroBubble, 2),
    ("dualpipe-v", pytorch.ScheduleDualPipeV, 2),
]


def words(table: Table) -> list[list[str]]:
    return [[str(action) for action in row] for row in table]


def order_of_pytorch(kind: type, ranks: int, micro_batches: int, chunks: int) -> list[list[str]]:
    stages = [
        MagicMock(
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            stage_index=chunk * ranks,
            submod=None,
        )
        for chunk in range(chunks)
    ]
    if kind is pytorch.ScheduleGPipe:
        order = kind(stages[0], micro_batches)._get_pipeline_order()
    else:
        order = kind(stages, micro_batches).pipeline_order
    return [
        [
            f"{part.stage_index}{part.computation_type.value}{part.microbatch_index}"
            for action in (order or {})[rank]
            if action is not None
            for part in action.sub_actions or (action,)
            if part.computation_type.value in "FBIW"
        ]
        for rank in range(ranks)
    ]


def read(name: str) -> list[list[str]]:
    """The actions of a file, a line for each rank; pairs that overlap one behind the other."""
    lines = (DATA / name).read_text().splitlines()
    return [re.findall(r"\d+[FBIW]\d+", line) for line in lines]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("name", "kind", "chunks"), CASES)
def test_orders_are_those_of_pytorch(name: str, kind: type, chunks: int, ranks: int) -> None:
    for micro_batches in (ranks, 2 * ranks, 4 * ranks):
        if name == "dualpipe-v" and micro_batches < 2 * ranks:
            continue
        found = find_schedule(name).table(ranks, micro_batches, chunks)
        assert words(found) == order_of_pytorch(kind, ranks, micro_batches, chunks)


def test_orders_are_those_of_pytorch_files() -> None:
    assert words(find_schedule("dualpipe-v").table(4, 10, 2)) == read("dualpipev_4rank_10mb.csv")
    # The file calls the backward pass to the input B.
    found = [
        [w.replace("I", "B") for w in row]
        for row in words(find_schedule("zero-bubble").table(2, 8, 2))
    ]
    assert found == read("zb1p_2rank_2stage_compute.csv")


def test_one_forward_one_backward_is_that_of_the_paper() -> None:
    # Narayanan et al. 2021, Fig. 4, with 5 micro-batches (PyTorch's own listing of its 1F1B starts
    # behind the first micro-batch, which is not what it runs).
    assert [" ".join(row) for row in words(find_schedule("1f1b").table(4, 5, 1))] == [
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2B4",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4",
    ]


@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
def test_every_schedule_ends_and_runs_each_pass_once(name: str) -> None:
    schedule = find_schedule(name)
    for ranks in (1, 2, 3) if name == LIST else (1, 2, 3, 4, 8):
        for micro_batches in (2 * ranks, 4 * ranks):
            for chunks in (
                (1, 2) if name == LIST else (1, 2, 4) if not schedule.fixed else (schedule.chunks,)
            ):
                table = schedule.table(ranks, micro_batches, chunks)
                found = actions_in_order(table, ranks * chunks)
                done = [
                    (a.stage, kind, a.micro_batch)
                    for _, a in found
                    for kind in ("IW" if a.kind == "B" else a.kind)
                ]
                assert len(done) == len(set(done)) == 3 * ranks * chunks * micro_batches
                assert all(schedule.place(a.stage, ranks) == rank for rank, a in found)


def test_table_in_which_ranks_wait_for_each_other_is_refused() -> None:
    table = ((Action(0, "B", 0), Action(0, "F", 0)), (Action(1, "F", 0), Action(1, "B", 0)))
    with pytest.raises(
        ValueError, match=r"rank 0 is at 0B0 and waits for 0F0, 1I0; rank 1 is at 1F0"
    ):
        actions_in_order(table, 2)


def test_what_a_schedule_cannot_do_is_said() -> None:
    with pytest.raises(
        ValueError, match="9 micro-batches on 4 ranks run in 2 rounds, which they do not fill"
    ):
        find_schedule("interleaved-1f1b").table(4, 9, 2)
    with pytest.raises(ValueError, match=r"needs at least \d+ micro-batches, found 4"):
        find_schedule("dualpipe-v").table(4, 4, 2)
    with pytest.raises(ValueError, match="puts 2 stages on each rank, not 1; use 8 stages"):
        find_schedule("zero-bubble-v").table(4, 8, 1)
    with pytest.raises(ValueError, match="did you mean '1f1b'"):
        find_schedule("1f1")


# Bubbles


def bubble_of(name: str, ranks: int, chunks: int, seconds: Mapping[str, float]) -> float:
    """Simulated, of the rank that waits least, with enough micro-batches to fill the pipeline.

    seconds: by kind, of a micro-batch through all stages of a rank.
    """
    table = find_schedule(name).table(ranks, 4 * ranks, chunks)
    costs = PassCosts(lambda stage_at, kind: seconds[kind] / chunks)
    return time_of(table, ranks * chunks, costs) - 4 * ranks * sum(seconds.values())


FORMS = [
    ("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3), ("zero-bubble", 1),
    ("zero-bubble", 2), ("zero-bubble-h2", 1),
]  # fmt: skip
"""Schedules whose bubbles have a closed form."""


@pytest.mark.parametrize("seed", range(4))
def test_bubbles_are_those_of_the_closed_forms_and_no_schedule_has_fewer(seed: int) -> None:
    chance = Random(seed)
    forward_s, inputs_s = chance.uniform(1, 2), chance.uniform(0.5, 2)
    weights_s = chance.uniform(0, forward_s)
    seconds = {"F": forward_s, "I": inputs_s, "W": weights_s}
    for ranks in (2, 3, 4):
        for name, chunks in FORMS:
            bound_s = bubble_bound_s(name, ranks, chunks, *seconds.values())
            assert bubble_of(name, ranks, chunks, seconds) == pytest.approx(bound_s)
        for name in ("zero-bubble-v", "dualpipe-v"):
            bound_s = bubble_bound_s(name, ranks, 2, *seconds.values())
            assert bubble_of(name, ranks, 2, seconds) >= bound_s * (1 - 1e-9)


def test_zero_bubbles_are_a_third_of_those_of_1f1b_or_less_where_passes_take_as_long() -> None:
    found = {
        name: time_of(one.table(4, 8, one.chunks), 4 * one.chunks, of_chunks(one.chunks)) - 24
        for name in ("1f1b", "zero-bubble", "zero-bubble-h2", "zero-bubble-v", "dualpipe-v", "list")
        for one in [find_schedule(name)]
    }
    assert found == {
        "1f1b": 9, "zero-bubble": 3, "zero-bubble-h2": 3, "zero-bubble-v": 1.5, "dualpipe-v": 1.5,
        "list": 3,
    }  # fmt: skip


def of_chunks(chunks: int) -> PassCosts:
    """A second for each pass of a micro-batch through all stages of a rank."""
    return PassCosts(lambda stage_at, kind: 1 / chunks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_zero_bubble_h2_waits_less_than_h1_and_holds_fewer_than_twice_as_many(ranks: int) -> None:
    tables = {name: find_schedule(name).table(ranks, 4 * ranks, 1) for name in ("1f1b", *H)}
    assert (
        most_weight_passes_in_flight(tables["1f1b"])
        == most_weight_passes_in_flight(tables["zero-bubble"])
        == ranks
    )
    assert most_weight_passes_in_flight(tables["zero-bubble-h2"]) == 2 * ranks - 1
    seconds = {"F": 1.0, "I": 1.2, "W": 0.8}  # attention has no weights
    first, second = (bubble_of(name, ranks, 1, seconds) / (ranks - 1) for name in H)
    assert (first, second) == (pytest.approx(1.4), pytest.approx(1.0))


H = ("zero-bubble", "zero-bubble-h2")


# Schedule `list`


def bubble(table: Table, ranks: int) -> float:
    """Of the rank that waits least, where each pass takes a second."""
    busy = max(sum(2 if a.kind == "B" else 1 for a in row) for row in table)
    return time_of(table, ranks, UNIT_COSTS) - busy


def test_list_has_a_third_of_the_bubbles_of_1f1b_and_no_more_micro_batches_in_flight() -> None:
    fixed, found = (find_schedule(name).table(4, 8, 1) for name in ("1f1b", "list"))
    assert (bubble(found, 4), bubble(fixed, 4)) == (3, 9)
    assert most_weight_passes_in_flight(found) == most_weight_passes_in_flight(fixed) == 4


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (3, 1), (2, 2)])
def test_list_is_never_slower_than_another_schedule_and_keeps_to_its_memory(
    ranks: int, chunks: int
) -> None:
    for seed in range(3):
        chance = Random(seed)
        kinds: tuple[Kind, ...] = ("F", "I", "W")
        stages = range(ranks * chunks)
        pass_s = {(stage, kind): chance.uniform(1, 3) for stage in stages for kind in kinds}
        message_s = {(s, s + way): chance.uniform(0, 0.5) for s in stages for way in (1, -1)}
        costs = PassCosts(
            lambda stage_at, kind, found=pass_s: found[stage_at[0], kind],
            lambda source, goal, found=message_s: found[source[0], goal[0]],
        )
        others = fixed_tables(ranks, 4, chunks)
        times = [time_of(table, len(stages), costs) for table in others]
        found = list_table(ranks, 4, chunks, costs, others)
        assert len(actions_in_order(found, len(stages))) == 3 * len(stages) * 4
        assert time_of(found, len(stages), costs) <= min(times) * 1.005
        most = most_weight_passes_in_flight(found)
        assert most < 2 * ranks * chunks
        less = list_table(
            ranks,
            4,
            chunks,
            costs,
            fits=lambda table, most=most: most_weight_passes_in_flight(table) < most,
        )
        assert most_weight_passes_in_flight(less) < most
        with pytest.raises(ValueError, match=r"ranks fits into their memory; use smaller"):
            list_table(ranks, 4, chunks, costs, others, lambda _: False)


def test_picture_in_the_pages_is_that_of_all_schedules() -> None:
    assert FILE.read_text() == drawing(), "run docs/schedules.py"


def test_picture_shows_the_second_stage_of_a_rank_in_small_letters() -> None:
    table = uneven_table("zero-bubble-v", ((2,), (1, 1)), 2)
    rows = moments_of(table, 4)
    assert [sorted({cell[0] for cell in row} - {"."}) for row in rows] == [sorted("FIWfiw")] * 3
