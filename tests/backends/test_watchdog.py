"""Ranks that die, stop, fail, are late or do something else: the others end, and say so."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardweave.backends.watch.watch import SILENCE_S
from shardweave.driver.training.checkpoint_files import complete
from shardweave.tests.backends.ending_ranks import (
    NUM_RANKS,
    TIMEOUT_S,
    Hit,
    Model,
    Ranks,
    Scenario,
    be_late,
    be_starved,
    compile_ahead_alone,
    compile_alone,
    compile_alone_at_first,
    die_in_a_pipeline,
    die_while_saving,
    evaluate,
    fail,
    kill_rank_0,
    kill_rank_1,
    leave,
    save_alone,
    save_and_gather,
    save_at_the_end,
    skip_a_call,
    stop_rank_0,
    stop_rank_0_and_kill_rank_2,
    stop_rank_2,
    sum_outside,
    take_a_known_short_batch,
    take_a_short_batch,
    train,
    train_by_the_store_of_rank_0,
    wait_for_the_device,
)
from shardweave.tests.compiled import compile_copy as compile_step
from shardweave.tests.spawn import importable


@pytest.fixture(scope="module")
def all_ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Scenario, Ranks]:
    """The ranks of every scenario of the tests here. They begin one after another, and wait at once."""
    items = [item for item in request.session.items if item.path == request.path]
    specs = [getattr(item, "callspec", None) for item in items]
    params = [spec.params for spec in specs if spec is not None]
    scenarios = list(dict.fromkeys(given["ended"] for given in params if "ended" in given))
    x = torch.ones(6, 4)
    compile_step(importable(Model)(), (x,), mesh=f"data={NUM_RANKS}", backend="reference")
    started: dict[Scenario, Ranks] = {}
    running: list[Ranks] = []
    try:
        while running or len(started) < len(scenarios):
            if len(started) < len(scenarios) and all(ranks.ready_s for ranks in running):
                scenario = scenarios[len(started)]
                folder = tmp_path_factory.mktemp(scenario.role.__name__)
                started[scenario] = Ranks(folder, scenario)
                running.append(started[scenario])
            running = [ranks for ranks in running if not ranks.is_over()]
            time.sleep(0.02)
    finally:
        for ranks in started.values():
            ranks.end()
    return started


@pytest.fixture
def ended(request: pytest.FixtureRequest, all_ended: dict[Scenario, Ranks]) -> Ranks:
    ranks = all_ended[request.param]
    assert ranks.ready_s is not None, f"ended, or not ready, when it began: {ranks.said}"
    return ranks


def ranks_that(role: Callable[[int, Path], Any], hit: Hit | None = None) -> pytest.MarkDecorator:
    """A test of how they end."""
    name = role.__name__ if hit is None else hit.__name__
    return pytest.mark.parametrize("ended", [Scenario(role, hit)], ids=[name], indirect=True)


POSITION = "at dist.start_all_reduce"


@ranks_that(train, kill_rank_1)
def test_ranks_end_and_name_one_that_was_killed(ended: Ranks) -> None:
    assert ended.codes == [1, -signal.SIGKILL, 1]
    assert ended.took_s < 2 * TIMEOUT_S
    for rank in (0, 2):
        assert "rank 1 (process " in ended.said[rank]
        assert "has given no sign of life" in ended.said[rank]
        assert f"Rank {rank} waited" in ended.said[rank]
        assert POSITION in ended.said[rank]
        assert "ending_ranks.py" in ended.said[rank]
        assert "rank 1" in (ended.folder / f"error{rank}.json").read_text()


@ranks_that(die_in_a_pipeline)
def test_stages_end_and_say_at_which_micro_batch_they_waited_for_what(ended: Ranks) -> None:
    assert ended.codes == [1, -signal.SIGKILL, 1]
    waited = {
        0: ("which stage 1 sends", "in backward_0 of stage 0, micro-batch 1"),
        2: ("which stage 1 sends", "in forward_2 of stage 2, micro-batch 2"),
    }
    for rank, texts in waited.items():
        for text in ("rank 1 (process ", "has given no sign of life", "dist.recv", *texts):
            assert text in ended.said[rank]
        assert "micro-batch" in (ended.folder / f"error{rank}.json").read_text()


@ranks_that(train, stop_rank_2)
def test_ranks_end_and_name_one_that_was_stopped(ended: Ranks) -> None:
    assert ended.codes == [1, 1, None]
    assert ended.took_s < 3 * TIMEOUT_S
    for rank in (0, 1):
        assert "rank 2 (process " in ended.said[rank]
        assert POSITION in ended.said[rank]


@ranks_that(train_by_the_store_of_rank_0, stop_rank_0)
def test_ranks_end_if_rank_0_is_stopped_with_the_store_that_it_keeps(ended: Ranks) -> None:
    assert ended.codes == [None, 1, 1]
    assert ended.took_s < 4 * TIMEOUT_S
    for rank in (1, 2):
        assert "rank 0, which keeps torch.distributed's store, has not answered" in ended.said[rank]
        assert POSITION in ended.said[rank]


@ranks_that(train_by_the_store_of_rank_0, stop_rank_0_and_kill_rank_2)
def test_rank_ends_that_asks_the_stopped_store_why_a_connection_broke(ended: Ranks) -> None:
    assert ended.codes == [None, 1, -signal.SIGKILL]
    assert ended.took_s < 4 * TIMEOUT_S
    assert "rank 0, which keeps torch.distributed's store, has not answered" in ended.said[1]
    assert POSITION in ended.said[1]


@ranks_that(fail)
def test_ranks_end_with_the_error_of_one_that_failed(ended: Ranks) -> None:
    assert ended.codes == [1, 1, 1]
    for rank in (0, 2):
        assert "rank 1 failed: ValueError: no more data. Rank" in ended.said[rank]


@pytest.mark.slow
@ranks_that(be_late)
def test_ranks_end_and_say_where_one_is_that_is_late(ended: Ranks) -> None:
    for rank in (0, 2):
        assert ended.codes[rank] == 1
        assert f"no answer within {TIMEOUT_S:g} s" in ended.said[rank]
        assert "rank 1 is at" in ended.said[rank]
        assert "(be_late) in call 5" in ended.said[rank]


@pytest.mark.slow
@ranks_that(leave)
def test_ranks_end_and_name_one_that_has_left(ended: Ranks) -> None:
    assert ended.codes == [1, 0, 1]
    for rank in (0, 2):
        assert "rank 1 ended the program" in ended.said[rank]


@ranks_that(skip_a_call)
def test_rank_that_skips_one_call_is_named_while_all_still_run(ended: Ranks) -> None:
    assert ended.codes == [1, 1, 1]
    for said in ended.said:
        assert re.search(r"rank 1.* in call \d+ or before it, or had different batches", said)


@ranks_that(train_by_the_store_of_rank_0, kill_rank_0)
def test_rank_0_that_dies_with_its_store_is_named(ended: Ranks) -> None:
    assert ended.codes == [-signal.SIGKILL, 1, 1]
    for rank in (1, 2):
        assert re.search(r"rank 0(,| \(process)", ended.said[rank])


@pytest.mark.parametrize(
    ("ended", "rank", "mine", "others"),
    [
        (Scenario(take_a_short_batch), 1, "x (3, 4) float32 in training", "x (6, 4)"),
        (Scenario(evaluate), 2, "x (6, 4) float32 in evaluation", "in training"),
    ],
    ids=["take_a_short_batch", "evaluate"],
    indirect=["ended"],
)
def test_ranks_that_call_differently_all_stop_and_name_both(
    ended: Ranks, rank: int, mine: str, others: str
) -> None:
    assert ended.codes == [1, 1, 1]
    assert ended.took_s < 3 * TIMEOUT_S
    for said in ended.said:
        assert f"ranks differ in the call: rank {rank} has {mine}" in said
        assert others in said


CALL = "x (6, 4) float32 in training"


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (Scenario(compile_alone), ["in sw.compile: rank 1 has a model, rank", "runs call", CALL]),
        pytest.param(
            Scenario(compile_alone_at_first),
            ["in what they do: ranks 0, 2 have the call: ", CALL, "rank 1 has sw.compile: a model"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Scenario(compile_ahead_alone),
            ["in what they do: ranks 0, 2 have the call: x (3, 4)", "1 has step.compile_for: x (3"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Scenario(save_alone),
            ["in sw.save_checkpoint: rank 1 has checkpoint 1, rank", CALL],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Scenario(save_and_gather),
            ["ranks 0, 2 have step.full_state_dict", "rank 1 has sw.save_checkpoint"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value.role.__name__ if isinstance(value, Scenario) else "",
    indirect=["ended"],
)
def test_ranks_that_are_at_different_things_all_stop_and_name_both(
    ended: Ranks, words: list[str]
) -> None:
    assert ended.codes == [1, 1, 1]
    assert ended.took_s < 3 * TIMEOUT_S
    for said in ended.said:
        assert "ranks differ in " in said
        for word in words:
            assert word in said


@pytest.mark.slow
@ranks_that(save_at_the_end)
def test_rank_that_saves_alone_ends_and_names_one_that_has_left(ended: Ranks) -> None:
    assert ended.codes == [0, 1, 0]
    assert re.search(r"rank [02] ended the program. Rank 1 waited to agree", ended.said[1])


@ranks_that(take_a_known_short_batch)
def test_ranks_stop_that_ran_different_programs_which_all_know(ended: Ranks) -> None:
    assert ended.codes == [1, 1, 1]
    for said in ended.said:
        # Compared every 16 calls, as often as ranks come to write down where they are.
        assert re.search(r"have run different programs in call (16|32|48|64) or before it", said)


@pytest.mark.slow
@ranks_that(die_while_saving)
def test_rank_that_dies_while_it_saves_is_named_and_the_last_checkpoint_stays(ended: Ranks) -> None:
    assert ended.codes == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        assert "rank 1 (process" in ended.said[rank]
    assert list(complete(ended.folder)) == [1]


@pytest.mark.slow
@ranks_that(sum_outside)
def test_collective_outside_a_step_is_named_by_the_line_that_calls_it(ended: Ranks) -> None:
    assert ended.codes == [-signal.SIGKILL, 1, 1]
    for rank in (1, 2):
        assert "rank 0 (process" in ended.said[rank]
        assert "torch.distributed.all_reduce, called at" in ended.said[rank]
        assert "ending_ranks.py" in ended.said[rank]


@ranks_that(be_starved)
def test_ranks_wait_for_one_that_runs_and_is_silent(ended: Ranks) -> None:
    assert ended.codes == [0, 0, 0], ended.said
    assert ended.took_s > SILENCE_S


@pytest.mark.slow
@ranks_that(wait_for_the_device)
def test_rank_that_waits_for_its_gpu_ends_as_well(ended: Ranks) -> None:
    assert ended.codes == [-signal.SIGKILL, 1, 1]
    assert ended.took_s < 4 * TIMEOUT_S
    for rank in (1, 2):
        assert "rank 0 (process" in ended.said[rank]
        assert "(wait_for_the_device)" in ended.said[rank]


def test_silence_is_short() -> None:
    assert SILENCE_S <= 10
