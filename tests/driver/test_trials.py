"""Real trials: what goes wrong is an outcome, nothing is left running, and a search goes on."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shardweave.driver.cli import main
from shardweave.driver.processes.trials import LocalTrials
from shardweave.driver.training.training import ENOUGH_SLOW, train
from shardweave.planners.plan.plan import Plan
from shardweave.planners.trials.trials import Limits

REPORT = "import json, sys; path = sys.argv[sys.argv.index('--json') + 1]; "


def outcome_of(code: str, limit_s: float = 20.0) -> tuple[str, str]:
    trials = LocalTrials("gpt:layers=1", command=(sys.executable, "-c", code))
    found = trials(Plan(), Limits(3, limit_s))
    return found.status, found.message


def test_times_and_peak_are_those_of_the_report() -> None:
    code = REPORT + (
        "json.dump({'step_times_s': [0.5, 0.25], 'losses': [3, 2, 1], 'peak_bytes': 7}, "
        "open(path, 'w'))"
    )
    found = LocalTrials("gpt:layers=1", command=(sys.executable, "-c", code))(
        Plan(), Limits(3, 20.0)
    )
    assert (found.status, found.times_s, found.peak_bytes) == ("ok", (0.5, 0.25), 7.0)


def test_trial_that_ended_early_keeps_its_times_and_says_so() -> None:
    code = REPORT + (
        "steps = sys.argv[sys.argv.index('--steps') + 1], sys.argv[sys.argv.index('--stop-above') + 1]; "
        "assert steps == ('9', '0.125'); "
        "json.dump({'step_times_s': [0.5, 0.25], 'losses': [3, 2, 1], 'peak_bytes': 7}, "
        "open(path, 'w'))"
    )
    trials = LocalTrials("gpt:layers=1", command=(sys.executable, "-c", code))
    found = trials(Plan(), Limits(9, 20.0, 0.125))
    assert (found.status, found.times_s) == ("ok", (0.5, 0.25))
    assert found.message == "ended early: slower than 0.125 s"


@pytest.mark.parametrize(("limit_s", "steps"), [(1e-9, 1 + ENOUGH_SLOW), (60.0, 6), (math.inf, 6)])
def test_training_ends_behind_its_first_slow_steps(limit_s: float, steps: int) -> None:
    weight = torch.zeros(2, requires_grad=True)

    def forward_backward() -> torch.Tensor:
        loss = (weight - 1).square().sum()
        loss.backward()
        return loss

    found = train(forward_backward, [weight], 6, stop_above_s=limit_s)
    assert (len(found.losses), len(found.times_s)) == (steps, steps - 1)


def test_run_that_may_end_early_trains_no_eager_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "gpt:layers=1", "--steps", "3", "--stop-above", "1"]) != 0
    assert "add --no-eager" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("import sys; sys.exit('error: it is wrong')", "crashed", "error: it is wrong"),
        ("import os; os.kill(os.getpid(), 11)", "crashed", "exit code -11"),
        ("raise MemoryError('CUDA out of memory')", "out_of_memory", "CUDA out of memory"),
    ],
)
def test_a_run_that_fails_is_an_outcome(code: str, status: str, message: str) -> None:
    found, said = outcome_of(code)
    assert found == status
    assert message in said


def test_all_processes_of_a_run_end_when_its_time_is_up(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = "import time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    code = (
        "import subprocess, sys, time; "
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}]); "
        f"open({str(pid_file)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    start_s = time.monotonic()
    assert outcome_of(code, 2.0) == ("timed_out", "stopped after 2 s")
    assert time.monotonic() - start_s < 15
    for _ in range(100):
        if not is_running(int(pid_file.read_text())):
            return
        time.sleep(0.05)
    pytest.fail("a process is left")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


SEARCH = """
import sys
from shardweave.driver.processes import trials
from shardweave.driver.models.models import build_example
from shardweave.planners.planning import plan
from shardweave.ir.capture.capture import capture

class Crashing(trials.LocalTrials):
    count = 0

    def __call__(self, given, limits):
        Crashing.count += 1
        if Crashing.count == 2:  # a rank that dies, as of a bad kernel
            broken = trials.LocalTrials(self.model, command=(sys.executable, "-c", "import os; os.abort()"))
            return broken(given, limits)
        return super().__call__(given, limits)

model = "gpt:layers=1,hidden=32,heads=4,vocab=64,seq=16,batch=8"
example = build_example(model)
program = capture(example.module, kwargs=example.kwargs)
host = trials.Host(Crashing(model))
found = plan(program, "data=2", "oppa", cluster="testbed", host=host, real=True, steps=3,
             trials=8, first=3, file=sys.argv[1])
found.save(sys.argv[2])
"""


@pytest.mark.slow
def test_real_search_survives_a_crash_and_goes_on_after_it_was_killed(tmp_path: Path) -> None:
    pytest.importorskip("botorch", exc_type=ImportError)
    file, out = tmp_path / "trials.jsonl", tmp_path / "plan.json"
    command = [sys.executable, "-W", "ignore", "-c", SEARCH, str(file), str(out)]
    search = subprocess.Popen(command)
    try:
        end_s = time.monotonic() + 300
        while not (file.exists() and len(file.read_text().splitlines()) >= 5):
            assert search.poll() is None, "the search ended too soon"
            assert time.monotonic() < end_s
            time.sleep(0.1)
    finally:
        os.kill(search.pid, signal.SIGKILL)
        search.wait()
    before = file.read_text().splitlines()
    subprocess.run(command, check=True, timeout=600)
    lines = file.read_text().splitlines()
    assert lines[: len(before)] == before
    outcomes = [json.loads(line)["outcome"] for line in lines[1:]]
    assert len(outcomes) == 8
    assert outcomes[1]["status"] == "crashed"
    failed = [(one["status"], one["message"]) for one in outcomes if one["status"] != "ok"]
    # One of each process, and what was on its way when the first was killed is made again.
    assert failed == [("crashed", "exit code -6")] * 2
    found = Plan.load(out)
    assert found.predicted is not None
    assert found.predicted.source == "measured"
