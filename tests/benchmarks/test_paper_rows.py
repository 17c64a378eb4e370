"""The papers' figures beside ours in docs/planners.md are those of the results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardweave.benchmarks.amp_baselines import (
    Space,
    by_amp,
    by_annealing,
    by_random_search,
    by_uniform_stages,
    fits,
    grown,
    measured_top,
)
from shardweave.benchmarks.amp_data import DATA, read_measured, setup_of
from shardweave.benchmarks.amp_planner import estimate_runs
from shardweave.benchmarks.oases_baselines import block_times, blocking_chain, figure_4, gains
from shardweave.benchmarks.oases_data import BUDGET_BYTES, model_of
from shardweave.benchmarks.oases_table3 import NAMES
from shardweave.planners.amp.model import strategies
from shardweave.planners.amp.partition import Problem
from shardweave.planners.oases.chain import linearise
from shardweave.planners.oases.dp import solve_chain

ROOT = Path(__file__).parents[2]


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def amp_rows() -> Iterator[str]:
    report = results("amp_baselines")
    for setup, by_method in report["spreads"].items():
        cells = [f"{one['least_s']:.2f}, {one['mean_s']:.2f}" for one in by_method.values()]
        gain = by_method["uniform"]["least_s"] / by_method["amp"]["least_s"]
        yield f"| {setup} | {' | '.join(cells)} | {gain:.2f} | "
    for mode, one in report["measured_top"].items():
        spread = f"{one['least_s']:.2f}, {one['mean_s']:.2f} ± {one['deviation_s']:.2f}"
        yield f"| ten best by {mode} estimates | {spread} |"
    table = report["published_table3"]
    for name, title in (("Megatron", "Megatron-LM"), ("SA", "annealing"), ("AMP", "AMP")):
        one = table[name]
        yield f"| {title}, Table 3 | {one['min']:.2f}, {one['mean']:.2f} ± {one['sd']:.2f} |"
    for row in report["scaling"]:
        ours = f"{row['search_s'] * 1e3:.0f} ms"
        yield f"| {row['grid']} | {row['strategies']} | {ours} | {row['published_s']:g} s |"


def axonn_rows() -> Iterator[str]:
    report = results("axonn_overlap")
    for row in report["figure_3"]["rows"][1:]:
        paper = "" if row["published_pct"] is None else f"{row['published_pct']}"
        yield f" | {row['time_s']:.2f} | {row['gain_pct']:.0f} | {paper} |".replace("|  |", "| |")
    ranking = report["figure_7"]
    paper = ranking["published"]
    for kind in ("aware", "agnostic"):
        hits, best = f"{kind}_hits_in_top5", f"rank_of_best_{kind}"
        yield f"| {paper[hits]}, {paper[best]} | {ranking[hits]}, {ranking[best]} |"
    frontier = report["figure_10"]
    for name in ("AxoNN", "ZeRO-3"):
        paper_s = frontier["published_exposed_s"][name]
        yield f" {name} | {paper_s:g} | {frontier[name]['exposed_s']:.1f} |"
    for row in report["table_2"]:
        grid = ",".join(f"{axis}={size}" for axis, size in row["grid"].items() if size > 1)
        numbers = f"{row['time_s']:.2f} | {row['utilisation_pct']:.0f}"
        millions = row["parameters"] / 1e6
        yield f"| {row['model']} | {millions:,.0f}M | {row['gpus']} | {grid} | {numbers} |"


def oases_rows() -> Iterator[str]:
    report = results("oases_baselines")
    for row in report["figure_4"]:
        rates = " | ".join(f"{rate:.1f}" for rate in row["rates"].values())
        gained = f"{row['over_best']:.2f} | {row['over_megatron']:.2f}"
        yield f"| {row['cluster']} | {row['hidden']} | {rates} | {gained} |"
    paper = report["published_figure_5"]
    for name, by_cluster in report["figure_5"].items():
        least, most = paper[f"{name}_vs_Merak"]
        ours = [one["over_merak"] for one in by_cluster.values()]
        megatron = [one["over_megatron"] for one in by_cluster.values()]
        yield (f"| {name} | {least:.2f} to {most:.2f} | {span(ours)} | {span(megatron)} |")
    found = report["spearman_with_table_3"]
    yield f"{found['speedup']:.3f} of speed-ups and {found['throughput']:.3f} of throughputs"


def oases_tables() -> Iterator[str]:
    """Tables 3 and 6, and the degrees that were all simulated."""
    for row in results("oases_table3")["rows"]:
        cells = [f"{row['paper'][name]:.1f}, {row['simulated'][name]:.1f}" for name in NAMES]
        yield f"| {row['cluster']} | {row['hidden']} | {' | '.join(cells)} |"
    for row in results("oases_planner")["rows"]:
        if (paper := row["paper"]) is not None:
            solved = f"{paper['solve_ms']:.0f}, {row['dp_ms']:.1f}"
            gained = f"{paper['gain']:.2f}, {row['gain']:.2f}"
            degrees = f"{paper['degrees']} | {row['degrees']}"
            yield f"| {row['name']} | {degrees} | {gained} | {solved} |"
    rows = results("oases_degrees")["rows"]
    for row in rows:
        model, refined = f"{row['model_regret']:.1%}", f"{row['refined_regret']:.1%}"
        found = f"{row['best']} | {row['model']}, {model} | {row['refined']}, {refined}"
        yield f"| {row['cluster']} | {row['hidden']} | {found} | {row['auto_regret']:.1%} |"
    least, most = min(row["spearman"] for row in rows), max(row["spearman"] for row in rows)
    yield f"Spearman {least:.2f} to {most:.2f}"


def span(values: list[float]) -> str:
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least} to {most}"


def oppa_rows() -> Iterator[str]:
    for name, by_stop in results("oppa_early_stop")["searches"].items():
        for what, one in by_stop.items():
            counts = ", ".join(map(str, one["trials"]))
            numbers = f"{one['hours']:.1f} | {100 * one['best_share']:.1f}%"
            yield f"| {name} | {what} | {counts} | {numbers} |"


@pytest.mark.parametrize("rows", [amp_rows, axonn_rows, oases_rows, oases_tables, oppa_rows])
def test_page_has_the_figures_of_the_results(rows: Any) -> None:
    page = (ROOT / "docs/planners.md").read_text()
    found = list(rows())
    assert found
    assert [row for row in found if row not in page] == []


def test_page_says_what_trials_of_ten_estimates_found() -> None:
    measured = [row["measured_s"] for row in results("amp_trials")["rows"]]
    assert len(measured) == 10
    page = " ".join((ROOT / "docs/planners.md").read_text().split())
    first, slowest = (one / min(measured) for one in (measured[0], max(measured)))
    assert f"takes {first:.2f} times as long as the fastest of the ten" in page
    assert f"number {measured.index(min(measured)) + 1} by estimate; the slowest" in page
    assert f"the slowest takes {slowest:.2f} times as long" in page


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
    for method in (by_uniform_stages, by_random_search, by_annealing):
        for strategy, seconds in method(space, 3).items():
            assert seconds >= exact.get(strategy, float("inf")) * (1 - 1e-9)


def test_stage_that_begins_too_early_for_its_memory_does_not_fit() -> None:
    first = np.array([[0, 0, 0, 1], [0, 0, 1, 2]])
    problem = Problem(np.ones((1, 3)), (0, 0), np.zeros((1, 4)), 1.0, first)
    assert fits(problem, (0, 2, 3))
    assert not fits(problem, (0, 1, 3))  # the second stage would hold two layers
    assert fits(replace(problem, first=None), (0, 1, 3))


def test_grown_setup_has_a_batch_for_its_devices() -> None:
    setup = grown(setup_of("homogeneous"), 8, 8)
    assert (setup.cluster.num_devices, setup.model.batch) == (64, 128)
    assert all(
        one.pipeline * one.data * one.tensor == 64 for one in strategies(setup.model, setup.cluster)
    )


def test_refined_degrees_are_within_two_percent_of_the_best_of_all() -> None:
    for row in results("oases_degrees")["rows"]:
        assert row["assignments"] == 27
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


def test_baselines_follow_from_the_committed_table_3() -> None:
    rows: list[Mapping[str, Any]] = results("oases_baselines")["figure_4"]
    for found, kept in zip(figure_4(), rows, strict=True):
        assert found["rates"] == pytest.approx(kept["rates"])
