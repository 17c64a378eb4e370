"""AMP's planner against its paper's baselines, and how its search grows with the cluster.

`python benchmarks/planners.py amp-baselines [--quick] [--json FILE]`. All methods minimise the
corrected estimate of a step, in the same memory, so that they differ in the search alone:

- `amp`: every strategy with its exact cuts,
- `uniform`: every strategy with equal numbers of layers in all stages (Table 5's "w/ uniform"),
- `parameters`: every strategy with equal numbers of parameters (Table 5's "w/ parameter"),
- `megatron`: of each micro-batch the strategies with the fewest tensor x pipeline degrees that
  fit, layers dealt evenly (Section 4.1; expert tuning has no other choice to make),
- `random`: 50 strategies and domino tilings drawn at random, layers dealt evenly (Section 4.5),
- `annealing`: Algorithm 2, 50 steps over degrees, micro-batches and tilings, with exact cuts.

The paper's Tables 3 to 5 have the least, mean and standard deviation of ten strategies that were
run: the ten best by the planner's estimate. Table 3 is given, and follows from the published runs
(`measured_top`); of Tables 4 and 5 the abstract's gains over Megatron-LM alone. Table 2 has seconds
to optimise on grids of nodes x devices for a batch of 32; tensor degrees are here at most 4, as
in the published profile.

Figure 3 is the gain of the best cuts over both of Megatron-LM's rules on four stages of four
replicas, while the narrow layers' times are scaled (Equation 9 is their share of the wide ones').
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from shardweave.benchmarks.amp_data import DATA, Setup, read_measured, setup_of, setups
from shardweave.benchmarks.amp_literal import uniform_cuts
from shardweave.benchmarks.amp_planner import Row, estimate_runs
from shardweave.planners.amp.annealing import Annealing, anneal, board_of, domino_grid
from shardweave.planners.amp.costs import Estimate, StageCosts, corrected_costs, estimate
from shardweave.planners.amp.model import LayeredModel, Strategy, strategies
from shardweave.planners.amp.network import ClusterArrays, Grid, megatron_grid
from shardweave.planners.amp.partition import Problem
from shardweave.planners.amp.search import best_cuts, search_strategies

TOP = 10
RUNS = 50
"""Runs of `random` (Section 4.5), and steps of `annealing`, as in the released code."""

SEEDS = range(5)

GAINS = {"het_cluster": 1.54, "het_model": 1.77}
"""Of throughput over Megatron-LM, by the paper's abstract."""

Best = dict[Strategy, float]
"""The least estimate in seconds that a method found of each strategy."""


@dataclass(frozen=True)
class Spread:
    """Of ten strategies: seconds of the best, mean, standard deviation."""

    least_s: float
    mean_s: float
    deviation_s: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Spread:
        return Spread(min(seconds), statistics.fmean(seconds), statistics.pstdev(seconds))


class Space:
    """All strategies of a setup, and the estimate of any of their cuts."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.strategies = list(strategies(setup.model, setup.cluster))
        self.links = ClusterArrays.of(setup.cluster)
        self.costs = {each: self.placed(each, megatron_grid(each)) for each in self.strategies}

    def seconds(
        self, strategy: Strategy, cuts: Sequence[int], costs: StageCosts | None = None
    ) -> float:
        """The estimate; infinite if a stage does not fit into memory. costs: of another placement
        than Megatron's."""
        costs = costs or self.costs[strategy]
        if not fits(costs.problem, cuts):
            return math.inf
        return estimate(self.setup.model, strategy, costs, cuts).seconds

    def placed(self, strategy: Strategy, grid: Grid) -> StageCosts:
        return corrected_costs(self.setup.model, self.links, strategy, grid)


def fits(problem: Problem, cuts: Sequence[int]) -> bool:
    """Whether every stage begins where memory allows it to."""
    if problem.first is None:
        return True
    return all(
        begin >= problem.first[stage, end] for stage, (begin, end) in enumerate(pairwise(cuts))
    )


def by_amp(space: Space, seed: int) -> Best:
    """The planner: exact, so that the seed is not used."""
    found = search_strategies(space.setup.model, space.setup.cluster)
    return {one.estimate.strategy: one.seconds for one in found}


def by_uniform_stages(space: Space, seed: int) -> Best:
    """Every strategy, the layers dealt evenly."""
    model = space.setup.model
    return {one: space.seconds(one, uniform_cuts(model, one.pipeline)) for one in space.strategies}


def parameter_cuts(model: LayeredModel, stages: int, tensor: int) -> tuple[int, ...]:
    """The cuts whose stages come nearest to equal shares of the parameters, none empty."""
    sums = [0.0, *accumulate(model.parameters[tensor])]
    cuts = [0]
    for stage in range(1, stages):
        wanted = sums[-1] * stage / stages
        places = range(cuts[-1] + 1, model.num_layers - (stages - stage) + 1)
        cuts.append(min(places, key=lambda place: abs(sums[place] - wanted)))
    return (*cuts, model.num_layers)


def by_parameters(space: Space, seed: int) -> Best:
    """Every strategy, the parameters dealt evenly."""
    model = space.setup.model
    return {
        one: space.seconds(one, parameter_cuts(model, one.pipeline, one.tensor))
        for one in space.strategies
    }


def by_megatron(space: Space, seed: int) -> Best:
    """Megatron-LM's rule: of each micro-batch the least tensor x pipeline that fits."""
    kept: dict[int, Best] = {}
    for strategy, seconds in by_uniform_stages(space, seed).items():
        if seconds == math.inf:
            continue
        best = kept.setdefault(strategy.micro_batch, Best())
        least = min((each.tensor * each.pipeline for each in best), default=math.inf)
        degrees = strategy.tensor * strategy.pipeline
        if degrees < least:
            best.clear()
        if degrees <= least:
            best[strategy] = seconds
    return {strategy: s for best in kept.values() for strategy, s in best.items()}


def by_random_search(space: Space, seed: int) -> Best:
    """Strategies and tilings, each drawn at random; layers dealt evenly, as they are by default."""
    dice, best, board = random.Random(seed), Best(), board_of(space.links)
    for _ in range(RUNS):
        strategy = dice.choice(space.strategies)
        while (grid := domino_grid(board, strategy, dice)) is None:
            strategy = dice.choice(space.strategies)
        cuts = uniform_cuts(space.setup.model, strategy.pipeline)
        seconds = space.seconds(strategy, cuts, space.placed(strategy, grid))
        best[strategy] = min(seconds, best.get(strategy, math.inf))
    return best


def by_annealing(space: Space, seed: int) -> Best:
    """AMP's Algorithm 2."""

    def best_on(strategy: Strategy, grid: Grid) -> Estimate | None:
        return best_cuts(space.setup.model, strategy, space.placed(strategy, grid))

    accepted = anneal(board_of(space.links), space.strategies, best_on, Annealing(RUNS, seed))
    return {strategy: best.seconds for strategy, (best, _) in accepted.items()}


METHODS: Mapping[str, Callable[[Space, int], Best]] = {
    "amp": by_amp,
    "uniform": by_uniform_stages,
    "parameters": by_parameters,
    "megatron": by_megatron,
    "random": by_random_search,
    "annealing": by_annealing,
}
DRAWN = ("random", "annealing")


def spreads(setup: Setup) -> dict[str, Spread]:
    """The ten best strategies of every method by estimate, the mean over seeds where it draws."""
    space, found = Space(setup), dict[str, Spread]()
    for name, method in METHODS.items():
        of_seeds = [
            Spread.of(sorted(method(space, seed).values())[:TOP])
            for seed in (SEEDS if name in DRAWN else (0,))
        ]
        columns = zip(*(asdict(one).values() for one in of_seeds), strict=True)
        found[name] = Spread(*map(statistics.fmean, columns))
    return found


SHARES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Narrow layers' time over wide ones' (Equation 9)."""

WIDE, NARROW = slice(1, 13), slice(13, 25)
"""Layers of TransGAN."""


def figure_3() -> list[dict[str, float]]:
    """Gain of the best cuts by heterogeneity, over equal layers and over equal parameters."""
    setup, strategy = setup_of("het_model"), Strategy(4, 4, 1, 1)
    links, grid = ClusterArrays.of(setup.cluster), megatron_grid(strategy)
    rows: list[dict[str, float]] = []
    for share in SHARES:
        model = with_share(setup.model, share)
        costs = corrected_costs(model, links, strategy, grid)
        best = best_cuts(model, strategy, costs)
        assert best is not None, "TransGAN fits into four stages"
        rules = {"layers": uniform_cuts(model, 4), "parameters": parameter_cuts(model, 4, 1)}
        over = {
            f"over_{name}": estimate(model, strategy, costs, cuts).seconds / best.seconds
            for name, cuts in rules.items()
        }
        rows.append({"share": share, **over})
    return rows


def with_share(model: LayeredModel, share: float) -> LayeredModel:
    """TransGAN with narrow layers that take this share of a wide layer's time."""

    def scaled(times: Sequence[float]) -> tuple[float, ...]:
        narrow = share * statistics.fmean(times[WIDE])
        return (*times[: NARROW.start], *[narrow] * (NARROW.stop - NARROW.start))

    profile = {
        device: {degree: scaled(times) for degree, times in by_degree.items()}
        for device, by_degree in model.profile.items()
    }
    return replace(model, profile=profile)


def measured_top(rows: Sequence[Row], seconds: Callable[[Row], float]) -> Spread:
    """As measured: the ten best by an estimate, of the runs that succeeded, as in Table 3."""
    done = sorted((row for row in rows if row.succeeded), key=seconds)[:TOP]
    return Spread.of([row.run.measured_s or math.inf for row in done])


def grown(setup: Setup, nodes: int, devices: int) -> Setup:
    """The homogeneous setup on a grid of nodes x devices."""
    (node,) = setup.cluster.nodes
    grown = replace(setup.cluster, nodes=(replace(node, count=nodes, devices=devices),))
    return replace(setup, cluster=grown)


def optimise_s(setup: Setup, rounds: int) -> tuple[int, float]:
    """Strategies of a setup, and processor seconds to optimise all, the fastest of some rounds."""
    times: list[float] = []
    for _ in range(rounds):
        begin_s = time.process_time()
        search_strategies(setup.model, setup.cluster)
        times.append(time.process_time() - begin_s)
    return sum(1 for _ in strategies(setup.model, setup.cluster)), min(times)


def tables() -> dict[str, Any]:
    """The paper's tables."""
    return json.loads((DATA / "amp_tables.json").read_text())


def table_of(found: Mapping[str, Mapping[str, Spread]]) -> Table:
    """Least, and mean with deviation, of every setup and method."""
    table = Table(title=f"The {TOP} best strategies by estimate, seconds of a step")
    for title in ("setup", *METHODS):
        table.add_column(title)
    for setup, by_method in found.items():
        cells = (f"{s.least_s:.3f}, {s.mean_s:.2f} ± {s.deviation_s:.2f}"
                 for s in by_method.values())  # fmt: skip
        table.add_row(setup, *cells)
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the arguments of every subcommand suffice."""


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the methods, time the search, print both; what `--json` writes."""
    found = {name: spreads(setup_of(name)) for name in setups()}
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table_of(found))
    homogeneous = setup_of("homogeneous")
    rows = estimate_runs(homogeneous, read_measured(DATA / "amp_results.csv", "homogeneous"))
    measured = {
        "literal": measured_top(rows, lambda row: row.literal.seconds),
        "corrected": measured_top(rows, lambda row: row.corrected.seconds),
    }
    for mode, one in measured.items():
        console.print(
            f"measured, the {TOP} best by {mode} estimate: {one.least_s:.2f}, "
            f"{one.mean_s:.2f} ± {one.deviation_s:.2f} s",
            highlight=False,
        )
    scaling: list[dict[str, Any]] = []
    for grid, published_s in tables()["table2_opt_time_s"].items():
        nodes, devices = map(int, grid.split("x"))
        count, seconds = optimise_s(grown(homogeneous, nodes, devices), 1 if options.quick else 3)
        scaling.append(
            {"grid": grid, "strategies": count, "search_s": seconds, "published_s": published_s}
        )
        console.print(
            f"{grid}: {count} strategies in {seconds:.3f} s (published {published_s:g} s)",
            highlight=False,
        )
    return {
        "spreads": {
            name: {method: asdict(one) for method, one in by_method.items()}
            for name, by_method in found.items()
        },
        "measured_top": {mode: asdict(one) for mode, one in measured.items()},
        "published_table3": tables()["table3_homogeneous"],
        "published_gains": GAINS,
        "figure_3": figure_3(),
        "scaling": scaling,
    }
