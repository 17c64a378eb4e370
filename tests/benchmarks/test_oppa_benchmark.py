"""The benchmark of searches by trials: what a run says, and that searches end where they should."""

import json
from pathlib import Path

import pytest

from shardweave.benchmarks.baselines.random_trials import RandomChooser
from shardweave.benchmarks.oppa_planner import (
    NEAR,
    Run,
    median_trials,
    one_search,
    true_shares,
)
from shardweave.benchmarks.oppa_space import SearchSpace
from shardweave.benchmarks.oppa_step_model import StepModel, Transformer
from shardweave.benchmarks.planners import main
from shardweave.planners.cost.presets import find_cluster

ONE = Run(3, (0.5, 0.5, 0.9, 0.99), (0.1, 0.25, 0.3, 0.4), 1, 2.0)


def test_search_ends_with_the_first_trial_that_is_near_the_best() -> None:
    model = Transformer("small", 4, 512, 4, 2048, 1000, 128, 16)
    machine = StepModel(model, find_cluster("perlmutter:nodes=2"))
    space = SearchSpace(8, 4, 4, 16, data_buckets_mib=(1,), zero_buckets_mib=(1,)).enumerate()
    shares = true_shares(space, machine)
    assert max(shares.values()) == 1.0
    run = one_search(RandomChooser(), 0, len(space), machine, shares)
    assert run.trials is not None
    assert run.trials == len(run.shares) == len(run.hours)
    assert run.shares[-1] >= NEAR > max(run.shares[:-1])
    assert list(run.shares) == sorted(run.shares)
    short = one_search(RandomChooser(), 0, run.trials - 1, machine, shares)
    assert short.trials is None
    assert short.shares == run.shares[:-1]


def test_run_says_what_was_best_after_trials_and_by_hours() -> None:
    assert [ONE.share_after(n) for n in (1, 3, 4, 9)] == [0.5, 0.9, 0.99, 0.99]
    assert [ONE.share_by(h) for h in (0.0, 0.1, 0.29, 1.0)] == [0.0, 0.5, 0.5, 0.99]
    assert [one["trial"] for one in ONE.to_dict()["improvements"]] == [1, 3, 4]


def test_median_counts_searches_that_never_came_near_as_the_longest() -> None:
    never = Run(4, (0.5,), (0.1,), 0, 1.0)
    assert median_trials([ONE, never, ONE]) == 4
    assert median_trials([ONE, never, never]) is None


@pytest.mark.slow
def test_benchmark_runs_every_method_and_draws_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("botorch", exc_type=ImportError)
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    assert main(["oppa", "--quick", "--json", str(out), "--plot", str(picture)]) == 0
    assert "standard BO" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["num_configurations"] >= 10_000
    assert set(report["runs"]) == set(report["median_trials"])
    assert report["runs"]["random"][0]["trials"] == report["median_trials"]["random"]
    assert picture.stat().st_size > 10_000
