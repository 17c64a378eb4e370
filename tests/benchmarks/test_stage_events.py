"""The events of a pipeline: orders, dependencies, closed forms, and what messages cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardweave.benchmarks.stages.events import (
    Message,
    Played,
    StageTimes,
    Task,
    TaskPart,
    beside_s,
    most_in_flight,
    order_of,
    play,
)
from shardweave.planners.plan.plan_parts import PIPELINE_SCHEDULES
from shardweave.planners.simulate.streams import Streams

schedules = st.sampled_from(PIPELINE_SCHEDULES)
seconds = st.sampled_from([0.0, 0.5, 1.0, 3.0])
sizes = st.integers(1, 4)


def orders(schedule: str, stages: int, count: int) -> list[list[Task]]:
    return [order_of(schedule, stage, stages, count) for stage in range(stages)]


def stage(forward: float, backward: float, message: float = 0.0, *links: str) -> StageTimes:
    one = (TaskPart(backward),)
    sent = Message(message, links)
    return StageTimes((TaskPart(forward),), one, one, sent, sent)


def chain(*stages: StageTimes) -> list[StageTimes]:
    """Without messages at the ends."""
    found = list(stages)
    found[0] = replace(found[0], to_previous=None)
    found[-1] = replace(found[-1], to_next=None)
    return found


def played(
    schedule: str, stages: Sequence[StageTimes], count: int, *, blocking: bool = False
) -> Played:
    return play(stages, orders(schedule, len(stages), count), blocking=blocking)


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("count", [1, 2, 4, 7, 16])
def test_equal_stages_with_free_messages_take_the_closed_form(
    schedule: str, stages: int, count: int
) -> None:
    found = played(schedule, chain(*[stage(2.0, 3.0)] * stages), count)
    assert found.time_s == pytest.approx((count + stages - 1) * (2.0 + 3.0))
    for waits in found.waits:
        assert waits.bubble_s == pytest.approx((stages - 1) * (2.0 + 3.0))


@pytest.mark.parametrize(("places", "count"), [(2, 2), (2, 6), (4, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_chunks_fill_the_pipeline_in_their_share_of_the_time(
    places: int, count: int, chunks: int
) -> None:
    """Narayanan et al. 2021, Sec. 2.2.2: the bubble is (p - 1) passes of one chunk."""
    stages = chain(*[stage(2.0, 3.0)] * places * chunks)
    found = play(
        stages, [order_of("interleaved-1f1b", at, places, count, chunks) for at in range(places)]
    )
    assert found.time_s == pytest.approx((count * chunks + places - 1) * (2.0 + 3.0))
    assert len(found.waits) == places


def test_messages_of_chunks_go_round_and_round() -> None:
    """Two places with two chunks and one micro-batch: four stages forward and four back, and of
    messages three each way, of which those of the second chunk's start leave the last place."""
    stages = chain(*[stage(2.0, 3.0, 0.5)] * 4)
    tasks = [
        [Task(w, 0, c) for w, c in ((True, 0), (True, 1), (False, 1), (False, 0))] for _ in range(2)
    ]
    found = play(stages, tasks)
    assert found.time_s == pytest.approx(4 * (2.0 + 3.0) + 6 * 0.5)
    assert [waits.sent_s["pipeline"] for waits in found.waits] == [pytest.approx(1.5)] * 2


def test_memory_in_flight_is_that_of_each_chunk() -> None:
    tasks = [Task(True, 0, 0), Task(True, 0, 1), Task(False, 0, 1), Task(True, 1, 0)]
    assert most_in_flight(tasks, (5, 7)) == 12
    assert most_in_flight([*tasks, Task(True, 1, 1)], (5, 7)) == 17


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("count", range(1, 9))
def test_micro_batches_in_flight_are_those_of_the_schedules(stages: int, count: int) -> None:
    for number, tasks in enumerate(orders("1f1b", stages, count)):
        assert most_in_flight(tasks) == min(stages - number, count)
    for tasks in orders("gpipe", stages, count):
        assert most_in_flight(tasks) == count
    for schedule in PIPELINE_SCHEDULES:
        for tasks in orders(schedule, stages, count):
            assert sorted(tasks) == sorted(Task(f, n) for f in (True, False) for n in range(count))


def longest_paths(
    stages: Sequence[StageTimes], tasks: Sequence[Sequence[Task]]
) -> dict[tuple[int, Task], float]:
    """Ends of all tasks by relaxing every dependency until nothing changes; messages have no
    links in common."""
    needs: list[tuple[tuple[int, Task], tuple[int, Task], float]] = []
    length: dict[tuple[int, Task], float] = {}
    for number, (times, found) in enumerate(zip(stages, tasks, strict=True)):
        for task in found:
            part = times.forward if task.is_forward else times.backward
            length[number, task] = part[0].seconds
            source = number - 1 if task.is_forward else number + 1
            if 0 <= source < len(stages):
                other = stages[source]
                message = other.to_next if task.is_forward else other.to_previous
                assert message is not None
                needs.append(((source, task), (number, task), message.seconds))
        needs += (((number, one), (number, other), 0.0) for one, other in pairwise(found))
    ends = dict(length)
    for _ in length:
        for before, after, delay in needs:
            ends[after] = max(ends[after], ends[before] + delay + length[after])
    return ends


@given(schedules, st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=4), sizes)
def test_every_task_starts_as_soon_as_what_it_needs_is_there(
    schedule: str, costs: list[tuple[float, float, float]], count: int
) -> None:
    stages = chain(*(stage(f, b, m) for f, b, m in costs))
    # Messages of one boundary run in turn, which a longest path does not say.
    if any(m > min(f, b) for f, b, m in costs):
        stages = [
            replace(
                one,
                to_next=one.to_next and Message(0.0),
                to_previous=one.to_previous and Message(0.0),
            )
            for one in stages
        ]
    tasks = orders(schedule, len(stages), count)
    ends = longest_paths(stages, tasks)
    found = play(stages, tasks)
    assert found.time_s == pytest.approx(max(ends.values()))
    for event in found.events:
        if event.name in ("forward", "backward"):
            place = int(event.layer.split()[1]), Task(event.name == "forward", event.copy[0])
            assert event.end_s == pytest.approx(ends[place])


@given(schedules, st.lists(st.tuples(seconds, seconds, seconds), min_size=2, max_size=4), sizes)
def test_one_task_at_a_time_and_none_before_what_it_needs(
    schedule: str, costs: list[tuple[float, float, float]], count: int
) -> None:
    stages = chain(*(stage(f, b, m, "nic") for f, b, m in costs))
    found = played(schedule, stages, count)
    tasks = [event for event in found.events if event.name in ("forward", "backward")]
    ends = {(event.layer, event.name, event.copy): event.end_s for event in tasks}
    for number in range(len(stages)):
        own = [event for event in tasks if event.layer == f"stage {number:02}"]
        own.sort(key=lambda event: (event.start_s, event.end_s))
        for before, after in pairwise(own):
            assert after.start_s >= before.end_s - 1e-12
        for event in own:
            source = number - 1 if event.name == "forward" else number + 1
            if 0 <= source < len(stages):
                way = stages[source].to_next or stages[source].to_previous
                assert way is not None
                sent_s = ends[f"stage {source:02}", event.name, event.copy]
                assert event.start_s >= sent_s + way.seconds - 1e-9


def test_stages_that_wait_for_what_they_send_do_not_work_beside_it() -> None:
    """Two stages and micro-batches: the second sends the first's gradient before its own next pass,
    and the first hands on the second activation half a second later."""
    stages = chain(*[stage(2.0, 3.0, 0.5)] * 2)
    assert played("1f1b", stages, 2).time_s == pytest.approx(16.0)
    found = played("1f1b", stages, 2, blocking=True)
    assert found.time_s == pytest.approx(16.5)
    # Each sends twice; each waits once more for a message on its way.
    assert [waits.exposed_s["pipeline"] for waits in found.waits] == pytest.approx([2.0, 1.5])


@given(
    schedules,
    st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=4),
    sizes,
    st.booleans(),
)
def test_time_of_each_stage_is_work_and_waits(
    schedule: str, costs: list[tuple[float, float, float]], count: int, blocking: bool
) -> None:
    stages = chain(*(stage(f, b, m, "nic") for f, b, m in costs))
    found = played(schedule, stages, count, blocking=blocking)
    if blocking:
        assert (
            found.time_s
            >= played(schedule, chain(*(stage(f, b) for f, b, _ in costs)), count).time_s - 1e-9
        )
    for (forward, backward, _), waits in zip(costs, found.waits, strict=True):
        parts = count * (forward + backward) + sum(waits.exposed_s.values()) + waits.bubble_s
        assert found.time_s == pytest.approx(parts)


@given(
    schedules,
    st.lists(st.tuples(seconds, seconds, seconds), min_size=2, max_size=4),
    sizes,
    st.sampled_from([0.0, 0.3, 0.9]),
)
def test_faster_messages_with_links_of_their_own_never_take_longer(
    schedule: str, costs: list[tuple[float, float, float]], count: int, share: float
) -> None:
    slow = played(schedule, chain(*(stage(f, b, m) for f, b, m in costs)), count)
    fast = played(schedule, chain(*(stage(f, b, share * m) for f, b, m in costs)), count)
    free = played(schedule, chain(*(stage(f, b) for f, b, _ in costs)), count)
    shared = played(schedule, chain(*(stage(f, b, m, "nic") for f, b, m in costs)), count)
    assert free.time_s <= fast.time_s + 1e-9
    assert fast.time_s <= slow.time_s + 1e-9
    assert free.time_s <= shared.time_s + 1e-9


def test_messages_over_one_nic_run_in_turn() -> None:
    stages = chain(stage(1.0, 1.0, 4.0, "nic"), stage(0.0, 0.0, 4.0, "nic"))
    # 1 + 4 + 4: two forward messages, of which the second waits for the first; then back.
    assert played("gpipe", stages, 2).time_s == pytest.approx(1.0 + 4 * 4.0 + 1.0)
    apart = chain(stage(1.0, 1.0, 4.0, "out"), stage(0.0, 0.0, 4.0, "in"))
    assert played("1f1b", apart, 2).time_s == pytest.approx(1.0 + 4.0 + 4.0 + 4.0 + 1.0)


def test_stages_do_not_wait_for_gradients_that_leave_by_the_same_nic() -> None:
    """The first stage gets its gradient 1 s after the second began to scatter, for 10 s."""
    first, second = chain(stage(1.0, 2.0, 1.0, "nic"), stage(1.0, 2.0, 1.0, "nic"))
    scatters = (replace(second.last_backward[0], scatter=Message(10.0, ("nic",))),)
    found = played("1f1b", [first, replace(second, last_backward=scatters, overlaps=True)], 1)
    assert found.waits[0].exposed_s["pipeline"] == pytest.approx(1.0)
    assert found.time_s == pytest.approx(1.0 + 1.0 + 1.0 + 2.0 + 10.0)


def test_gradients_of_a_later_stage_synchronise_beside_earlier_backward_passes() -> None:
    plain = chain(stage(1.0, 2.0), stage(1.0, 2.0))
    synced = [replace(one, finish=(Message(2.0),)) for one in plain]
    before, after = played("1f1b", plain, 4), played("1f1b", synced, 4)
    # The last stage is done while the first still runs its last backward pass, of 2 seconds.
    assert after.time_s == pytest.approx(before.time_s + 2.0)
    assert [waits.exposed_s["data"] for waits in after.waits] == pytest.approx([2.0, 2.0])
    assert after.waits[1].bubble_s == pytest.approx(before.waits[1].bubble_s)


def test_parameters_are_gathered_beside_the_block_before_where_the_schedule_overlaps() -> None:
    part = TaskPart(3.0, gather=Message(2.0), scatter=Message(1.0))
    times = StageTimes((replace(part, scatter=None),) * 3, (part,) * 3, (part,) * 3)
    blocking = played("1f1b", [times], 1)
    assert blocking.time_s == pytest.approx(6 * (2.0 + 3.0) + 3 * 1.0)
    overlapped = played("1f1b", [replace(times, overlaps=True)], 1)
    # Only the first gather and the last scatter have nothing to hide behind.
    assert overlapped.time_s == pytest.approx(2.0 + 6 * 3.0 + 1.0)
    assert overlapped.waits[0].exposed_s["data"] == pytest.approx(3.0)


def test_compute_and_messages_beside_it_slow_each_other_down() -> None:
    one = TaskPart(4.0, scatter=Message(2.0))
    times = StageTimes((), (), (one, one), overlaps=True)
    order = [[Task(False, 0)]]
    assert play([times], order).time_s == pytest.approx(4 + 4 + 2)
    slow = play([times], order, 2.0)
    # Of the second part, 1 is done in the 2 that the first scatter takes.
    assert slow.time_s == pytest.approx(4 + 2 + 3 + 2)
    assert slow.waits[0].slowdown_s == pytest.approx(1.0)
    both = play([times], order, 2.0, 1.5)
    # The scatter takes 3 beside compute, of which 1.5 is done.
    assert both.time_s == pytest.approx(4 + 3 + 2.5 + 2)
    assert both.waits[0].slowdown_s == pytest.approx(1.5)


def test_stages_do_not_slow_down_for_messages_of_others() -> None:
    long = Message(100.0)
    sender, receiver = (
        StageTimes((TaskPart(1.0),), (), (), long),
        StageTimes((TaskPart(1.0),), (), ()),
    )
    idle = StageTimes((TaskPart(50.0),), (), ())
    order = [Task(True, 0)]
    for slowdown in (1.0, 3.0):
        found = play([sender, receiver, idle], [order, order, []], slowdown)
        assert found.time_s == pytest.approx(102.0)


@given(st.data(), st.floats(1.0, 3.0), st.floats(1.0, 3.0))
def test_slowdown_makes_no_step_shorter_and_is_told_by_stage(
    data: st.DataObject, slowdown: float, link_slowdown: float
) -> None:
    stages = [
        stage(data.draw(seconds), data.draw(seconds), data.draw(seconds), "link")
        for _ in range(data.draw(sizes))
    ]
    count = data.draw(st.integers(1, 5))
    order = orders("1f1b", len(stages), count)
    plain, slow = play(chain(*stages), order), play(chain(*stages), order, slowdown, link_slowdown)
    assert slow.time_s >= plain.time_s * (1 - 1e-9)
    for times, waits in zip(stages, slow.waits, strict=True):
        work = count * (times.forward[0].seconds + times.backward[0].seconds)
        waited = waits.bubble_s + sum(waits.exposed_s.values())
        assert slow.time_s == pytest.approx(work + waits.slowdown_s + waited)


@given(st.floats(0, 5), st.floats(0, 5), st.floats(1, 3), st.floats(1, 3))
def test_closed_form_of_work_beside_a_message_is_that_of_the_streams(
    work: float, sent: float, slowdown: float, link_slowdown: float
) -> None:
    streams = Streams(slowdown, link_slowdown)
    flight = streams.start(sent, ("link",))
    streams.compute(work)
    end = max(streams.now_s, streams.wait(flight))
    assert beside_s(work, sent, slowdown, link_slowdown) == pytest.approx((end, streams.lost_s))


def test_compute_beside_several_messages_loses_what_the_worst_of_them_takes() -> None:
    streams = Streams(slowdown=1.1)
    streams.start(4.0, ("near",), slowdown=2.0)
    streams.start(10.0, ("far",))
    # 4 s beside both do 2 s of work, 1.1 s beside the other 1 s.
    assert streams.compute(3.0) == pytest.approx(5.1)
    assert streams.lost_s == pytest.approx(2.1)


def test_messages_within_a_node_slow_a_stage_down_as_much_as_they_are_said_to() -> None:
    inside, outside = (stage(1.0, 1.0, 1.0, *links) for links in ((), ("nic",)))
    order = orders("1f1b", 2, 2)
    near, far = (
        play(chain(one, one), order, 1.0, 1.0, node_slowdown=2.0) for one in (inside, outside)
    )
    assert near.time_s > far.time_s
    assert far.time_s == play(chain(outside, outside), order).time_s
