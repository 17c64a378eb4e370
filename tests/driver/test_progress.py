"""Progress: lines with what was measured, and what the simulator says beside it."""

from __future__ import annotations

import re
import time

import pytest
import torch

import shardweave as sw
from shardweave.driver.training import progress as module
from shardweave.driver.training.progress import predict_step
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.cost.quantity import bytes_text, seconds_text
from shardweave.tests.driver.step.models import Normed, batch, compiled

Captured = pytest.CaptureFixture[str]
LINE = re.compile(
    r"step (\d+)/4  loss ([\d.]+)  ([\d,]+) tokens/s  ([\d.]+) [mu]s a step  [\d.]+ [MG]iB$"
)


def test_line_has_the_mean_of_the_steps_since_the_last_but_for_the_first_of_all(
    capsys: Captured,
) -> None:
    step = compiled(Normed(), batch())
    progress = sw.Progress(step, 4, every=2)
    for number, pause_s in enumerate((0.5, 0.05, 0.05, 0.07), start=1):
        time.sleep(pause_s)
        progress(number, torch.tensor(1.5), 100)
    lines = [LINE.match(line) for line in capsys.readouterr().out.splitlines()]
    assert [line and (line[1], line[2]) for line in lines] == [("2", "1.5000"), ("4", "1.5000")]
    for line, least in zip(lines, (50, 60), strict=True):
        assert line is not None
        step_ms = float(line[4])
        assert least <= step_ms < 250
        assert float(line[3].replace(",", "")) == pytest.approx(1e5 / step_ms, rel=0.02)


def test_throughput_is_that_of_all_batches_since_the_last_line(capsys: Captured) -> None:
    progress = sw.Progress(compiled(Normed(), batch()), 3, every=3, unit="images")
    for number, (rows, pause_s) in enumerate(((100, 0.0), (100, 0.2), (10, 0.0)), start=1):
        time.sleep(pause_s)
        progress(number, torch.tensor(1.5), rows)
    found = re.search(r"([\d,]+) images/s  ([\d.]+) ms a step", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) == pytest.approx(110 / (2 * float(found[2]) / 1000), rel=0.02)


def test_time_of_a_validation_counts_for_no_step(capsys: Captured) -> None:
    progress = sw.Progress(compiled(Normed(), batch()), 4, every=1)
    progress(1, torch.tensor(1.5), 100)
    time.sleep(0.5)
    progress.say("validation loss 2.0")
    progress(2, torch.tensor(1.5), 100)
    first, said, last = capsys.readouterr().out.splitlines()
    assert said == "validation loss 2.0"
    assert LINE.match(first)
    found = LINE.match(last)
    assert found is not None
    assert float(found[4]) < 250


def test_prediction_is_that_of_the_micro_batches_of_a_step(capsys: Captured) -> None:
    step = compiled(Normed(), batch())
    cluster = find_cluster("oases-3090")
    progress = sw.Progress(step, 1, accumulate=2, cluster=cluster)
    loss, _ = step(**batch(), accumulate=2)
    progress(1, loss, 8)
    whole = sw.simulate(step.program, cluster)
    pending = sw.simulate(step.bound.pending.program, cluster)
    assert pending.time_s < whole.time_s
    found = predict_step(step, cluster, 2)
    assert found.time_s == whole.time_s + pending.time_s
    assert predict_step(step, cluster).time_s == whole.time_s
    line = capsys.readouterr().out
    assert f"(simulated {seconds_text(found.time_s)})" in line
    assert line.endswith(f"(simulated {bytes_text(found.memory_bytes)})\n")


def test_other_ranks_say_nothing(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = sw.Progress(compiled(Normed(), batch()), 1)
    monkeypatch.setattr(module.world, "rank", lambda: 1)
    progress(1, torch.tensor(1.0), 1)
    progress.say("hello")
    assert capsys.readouterr().out == ""


def test_mesh_too_large_for_the_cluster_is_refused() -> None:
    step = compiled(Normed(), batch())
    progress = sw.Progress(step, 1, cluster="testbed:rate=1gbit")
    step(**batch())
    with pytest.raises(ValueError, match=r"but cluster .* has only 2;"):
        progress(1, torch.tensor(1.0), 1)
