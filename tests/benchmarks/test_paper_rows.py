"""Baselines of the papers: exact searches beat them, and kept results follow from their data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardweave.benchmarks.amp_baselines import (
    Space,
    by_amp,
    by_annealing,
    by_megatron,
    by_random_search,
    by_uniform_stages,
    fits,
    grown,
    measured_top,
)
from shardweave.benchmarks.amp_data import DATA, read_measured, setup_of
from shardweave.benchmarks.amp_planner import estimate_runs
from shardweave.benchmarks.axonn_overlap import as_printed
from shardweave.benchmarks.axonn_planner import OPTIONS, gpt_model
from shardweave.benchmarks.axonn_rivals import deepened
from shardweave.benchmarks.oases_baselines import block_times, blocking_chain, figure_4, gains
from shardweave.benchmarks.oases_data import BUDGET_BYTES, model_of
from shardweave.benchmarks.papers import PAPERS
from shardweave.planners.amp.model import strategies
from shardweave.planners.amp.partition import Problem
from shardweave.planners.axonn.search import rank_grids
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.oases.chain import linearise
from shardweave.planners.oases.dp import solve_chain

ROOT = Path(__file__).parents[2]


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def test_ten_best_published_strategies_give_the_published_table() -> None:
    rows = estimate_runs(
        setup_of("homogeneous"), read_measured(DATA / "amp_results.csv", "homogeneous")
    )
    found = measured_top(rows, lambda row: row.literal.seconds)
    table = results("amp_baselines")["published_table3"]["AMP"]
    assert round(found.least_s, 2) == table["min"]
    assert round(found.mean_s, 2) == table["mean"]
    assert round(found.deviation_s, 2) == table["sd"]


def test_no_baseline_beats_the_exact_search() -> None:
    space = Space(setup_of("het_cluster"))
    exact = by_amp(space, 0)
    for method in (by_uniform_stages, by_megatron):
        for strategy, seconds in method(space, 3).items():
            assert seconds >= exact.get(strategy, float("inf")) * (1 - 1e-9)
    for method in (by_random_search, by_annealing):  # on other placements
        assert min(method(space, 3).values()) >= min(exact.values())


def test_stage_that_begins_too_early_for_its_memory_does_not_fit() -> None:
    first = np.array([[0, 0, 0, 1], [0, 0, 1, 2]])
    problem = Problem(np.ones((1, 3)), (0, 0), np.zeros((1, 4)), 1.0, first)
    assert fits(problem, (0, 2, 3))
    assert not fits(problem, (0, 1, 3))  # the second stage would hold two layers
    assert fits(replace(problem, first=None), (0, 1, 3))


def test_grown_setup_keeps_table_2_s_batch() -> None:
    setup = grown(setup_of("homogeneous"), 8, 8)
    assert (setup.cluster.num_devices, setup.model.batch) == (64, 32)
    assert all(
        one.pipeline * one.data * one.tensor == 64 for one in strategies(setup.model, setup.cluster)
    )


def test_refined_degrees_are_within_two_percent_of_the_best_of_all() -> None:
    for row in results("oases_degrees")["rows"]:
        assert row["assignments"] == 27
        assert row["tied"] or row["spearman"] > 0.7
        assert 0 <= row["refined_regret"] <= 0.02
        assert row["auto_regret"] <= 0.02


def test_planner_without_overlap_is_never_slower_than_the_default_degrees() -> None:
    model = model_of(2048)
    chain = blocking_chain(model, "3090")
    default = linearise(chain).time_s(chain.path([model.tensor] * len(chain.blocks)))
    blocks = [block_times(model, part, model.tensor, "3090").blocking_s for part in ("attn", "mlp")]
    assert default == pytest.approx(model.layers * sum(blocks))
    assert gains(model, "3090")["Alpa-like"] == pytest.approx(
        default / solve_chain(chain, BUDGET_BYTES).time_s
    )


def test_parts_hide_all_but_one_of_a_message_beside_a_longer_product() -> None:
    times = block_times(model_of(4096), "mlp", 4, "3090")
    whole = times.forward_s * 2 + times.backward_s
    assert whole < times.decomposed_s(8) < times.decomposed_s(4) < times.decomposed_s(1)
    assert times.decomposed_s(1) == pytest.approx(times.blocking_s)


def test_oases_is_ahead_of_each_baseline_in_figure_4_s_fourteen_bars() -> None:
    rows: list[Mapping[str, Any]] = results("oases_baselines")["figure_4"]
    assert len(rows) == 14
    assert all(row["over_best"] > 1 for row in rows)
    kept = [row for row in rows if row["hidden"] == 12288]
    for found, row in zip(figure_4([model_of(12288)]), kept, strict=True):
        assert found["rates"] == pytest.approx(row["rates"])


def test_axonn_is_ahead_of_both_rivals_simulated_alike_at_all_five_sizes() -> None:
    ours, rows = results("axonn_planner")["rows"], results("axonn_rivals")["rows"]
    assert [row["model"] for row in rows] == [row["model"] for row in ours]
    for row, beside in zip(ours, rows, strict=True):
        assert set(beside["rivals"]) == {"Megatron-LM", "ZeRO-3"}
        for rival in beside["rivals"].values():
            assert math.prod(rival["mesh"].values()) == row["gpus"]
            assert row["utilisation_pct"] > rival["utilisation_pct"]


def test_megatron_s_plan_of_a_rival_fits_with_the_fewest_stages() -> None:
    cluster = find_cluster("perlmutter:nodes=16")
    kept = results("axonn_rivals")["rows"][0]["rivals"]["Megatron-LM"]
    assert deepened("GPT-5B", {"pipeline": 1, "data": 64, "tensor": 1}, 1, cluster) is None
    again = deepened("GPT-5B", kept["mesh"], kept["micro_batch"], cluster)
    assert again is not None
    assert again["step_s"] == pytest.approx(kept["step_s"])


def test_equation_10_as_printed_does_not_rank_the_fastest_grid_of_figure_7_first() -> None:
    kept = results("axonn_overlap")["figure_7"]
    cluster, model = find_cluster("perlmutter:nodes=8"), gpt_model("GPT-20B", 16)
    grids = [
        one
        for one in rank_grids(model, cluster, 32, OPTIONS)
        if 16 % (one.grid[2] * one.grid[3]) == 0
    ]
    best = tuple(kept["best"])
    assert as_printed(model, cluster, grids).index(best) + 1 == kept["rank_of_best_printed"] == 7
    assert kept["published"]["rank_of_best_aware"] == 1


@pytest.mark.parametrize("paper", PAPERS)
def test_comparisons_are_those_of_the_results_in_the_repository(paper: str) -> None:
    compare, benchmarks = PAPERS[paper]
    rows = list(compare({name: results(name) for name in benchmarks}))
    kept = results("papers")[paper]["rows"]
    assert [(row.item, row.what, row.verdict) for row in rows] == [
        (row["item"], row["what"], row["verdict"]) for row in kept
    ]
    assert all(row.holds is not False for row in rows)
