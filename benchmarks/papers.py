"""Each paper by one command: its figures and tables beside ours, in one table.

    python benchmarks/papers.py [oases|axonn|amp|oppa ..] [--quick] [--from-results] [--json FILE]

Runs the benchmarks of a paper (`planners.py`, `oases_table3.py`) and compares what they give with
what the paper prints. `--from-results` compares the results in the repository, and runs nothing.
The status is 1 if an order of the paper does not hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardweave.benchmarks.oppa_planner import NEAR as SEARCH_ENDS

HERE = Path(__file__).resolve().parent
NEAR = 0.25
"""How far from the paper's a figure may be, as a share, to be called near."""


@dataclass(frozen=True)
class Comparison:
    """A figure or table of a paper, or a row of one, beside ours.

    paper, ours: as text. ratio: of ours to the paper's, where both are numbers. holds: whether the
    order that the paper shows holds here; None for a number that shows no order.
    """

    item: str
    what: str
    paper: str
    ours: str
    ratio: float | None = None
    holds: bool | None = None

    @property
    def verdict(self) -> str:
        if self.holds is not None:
            return "same order" if self.holds else "another order"
        assert self.ratio is not None
        if abs(self.ratio - 1) <= NEAR:
            return f"within {NEAR:.0%}"
        return f"{self.ratio:.2f} of it" if self.ratio >= 0.01 else "under 1% of it"


def number(item: str, what: str, paper: float, ours: float, form: str = ".2f") -> Comparison:
    return Comparison(item, what, f"{paper:{form}}", f"{ours:{form}}", ours / paper)


def span(item: str, what: str, paper: list[float], ours: float) -> Comparison:
    """A number beside the least and the most that a paper gives."""
    nearest = min(max(ours, paper[0]), paper[-1])
    return Comparison(item, what, f"{paper[0]:g} to {paper[-1]:g}", f"{ours:.2f}", ours / nearest)


def order(item: str, what: str, paper: list[str], ours: list[str]) -> Comparison:
    return Comparison(item, what, " < ".join(paper), " < ".join(ours), None, paper == ours)


def ranked(values: Mapping[str, float]) -> list[str]:
    return sorted(values, key=lambda name: values[name])


Results = Mapping[str, Any]


def oases(given: Results) -> Iterator[Comparison]:
    for row in given["oases_table3"]["rows"]:
        what = f"{row['cluster']}, hidden {row['hidden']}"
        yield order("Table 3", what, ranked(row["paper"]), ranked(row["simulated"]))
        gains = [v["planner"] / v["Megatron-LM"] for v in (row["paper"], row["simulated"])]
        yield number("Table 3", f"{what}: Oases over Megatron-LM", *gains)
    baselines = given["oases_baselines"]
    for row in baselines["figure_4"]:
        where = f"{row['cluster']}, hidden {row['hidden']}"
        over = baselines["published_over_best"][row["cluster"]]
        yield span("Figure 4", f"{where}: over the best", over, row["over_best"])
        rising = ["Megatron-LM", "Merak", "cross_pass", "fine_grained_recompute", "Oases"]
        rates = row["schedules"] | {"Oases": row["rates"]["Oases"]}
        yield order("Figure 4, Table 3's methods", where, rising, ranked(rates))
    for name, by_cluster in baselines["figure_5"].items():
        for cluster, row in by_cluster.items():
            over = baselines["published_figure_5"][f"{name}_vs_Merak"]
            yield span("Figure 5", f"{name}, {cluster}: over Merak", over, row["over_merak"])
    for row in given["oases_degrees"]["rows"]:
        if not row["tied"]:
            what = f"{row['cluster']}, hidden {row['hidden']}: Spearman of the chain model"
            yield span("Figure 6", what, baselines["published_spearman"], row["spearman"])
    for row in given["oases_planner"]["rows"]:
        paper = row["paper"]
        if paper is not None:
            yield number("Table 6", f"{row['name']}: gain of degrees", paper["gain"], row["gain"])


def axonn(given: Results) -> Iterator[Comparison]:
    for row, beside in zip(
        given["axonn_planner"]["rows"], given["axonn_rivals"]["rows"], strict=True
    ):
        ours = {name: each["utilisation_pct"] for name, each in beside["rivals"].items()}
        ours["AxoNN"] = row["utilisation_pct"]
        paper, shown = (
            ", ".join(f"{name} {values[name]:.0f}" for name in reversed(ranked(values)))
            for values in ({name: row["published"][name] for name in ours}, ours)
        )
        what = f"{row['model']} on {row['gpus']} GPUs: % of peak"
        ahead = ranked(ours)[-1] == "AxoNN"
        yield Comparison("Table III, Figure 11", f"{what}, AxoNN first", paper, shown, None, ahead)
        yield number("Table III, Figure 11", what, row["published"]["AxoNN"], ours["AxoNN"], ".0f")
    overlap = given["axonn_overlap"]
    for row in overlap["figure_3"]["rows"]:
        if row["published_pct"]:
            paper, ours = row["published_pct"], row["gain_pct"]
            yield number("Figure 3", f"{row['step']}: gain, %", paper, ours, ".0f")
    grids, paper = overlap["figure_7"], overlap["figure_7"]["published"]
    for key in ("aware_hits_in_top5", "rank_of_best_aware"):
        what = key.replace("_", " ")
        yield number("Figure 7", what, paper[key], grids[key], ".0f")
    what = "rank of best by Equation 10 as printed"
    best = paper["rank_of_best_aware"]
    yield number("Figure 7", what, best, grids["rank_of_best_printed"], ".0f")
    exposed = overlap["figure_10"]["published_exposed_s"]
    ours = {name: overlap["figure_10"][name]["exposed_s"] for name in ("AxoNN", "ZeRO-3")}
    both = ranked({name: exposed[name] for name in ours})
    yield order("Figure 10", "exposed communication", both, ranked(ours))


TABLES = {"homogeneous": "Table 3", "het_cluster": "Table 4", "het_model": "Table 5"}
"""AMP's table of each of its settings."""


def amp(given: Results) -> Iterator[Comparison]:
    report = given["amp_baselines"]
    for setup, by_method in report["spreads"].items():
        least = {name: row["least_s"] for name, row in by_method.items()}
        rest = min(value for name, value in least.items() if name != "amp")
        text = ", ".join(f"{name} {value:.2f} s" for name, value in least.items())
        ahead = least["amp"] <= rest * (1 + 1e-9)
        yield Comparison(TABLES[setup], f"{setup}: best", "amp first", text, None, ahead)
        gain = report["published_gains"].get(setup)
        if gain is not None:
            gained = least["megatron"] / least["amp"]
            yield number(TABLES[setup], f"{setup}: over Megatron-LM", gain, gained)
    of_cluster = report["spreads"]["het_cluster"]
    by_paper = {"megatron": 1.97, "random": 1.71, "amp": 1.28, "annealing": 1.46}
    ours = {name: of_cluster[name]["least_s"] for name in by_paper}
    yield order("Table 4", "het_cluster: methods, fastest first", ranked(by_paper), ranked(ours))
    least = {name: row["least_s"] for name, row in report["spreads"]["het_model"].items()}
    yield number(
        "Table 5", "het_model: over uniform stages", *(1.25 / 1.07, least["uniform"] / least["amp"])
    )
    published, ours = report["published_table3"]["AMP"], report["measured_top"]["corrected"]
    yield number("Table 3", "best of ten, s", published["min"], ours["least_s"])
    yield number("Table 3", "mean of ten, s", published["mean"], ours["mean_s"])
    for name in ("amp_planner", "amp_het_cluster", "amp_het_model"):
        planned = given[name]
        spearman = planned["modes"]["corrected"]["spearman"]
        what = f"{planned['setup']}: order of {planned['num_succeeded']} measured runs, Spearman"
        shown = f"{spearman:.2f} (literal {planned['modes']['literal']['spearman']:.2f})"
        yield Comparison("Figure 2", what, "over 0.5", shown, None, spearman > 0.5)
    for row in report["scaling"]:
        what = f"{row['grid']}: search, s"
        yield number("Table 2", what, row["published_s"], row["search_s"], ".3g")


def oppa(given: Results) -> Iterator[Comparison]:
    for problem in given["oppa_settings"].values():
        for trials in (10, 20, 30):
            yield _searches("Figure 6", problem, trials)
    for trials in (10, 20, 30):
        yield _searches("none", given["oppa_planner"], trials)


def _searches(figure: str, problem: Mapping[str, Any], trials: int) -> Comparison:
    ours, rivals = "oppa, extended", ("standard BO", "random", "boosted trees")
    best = {name: _mean_share(problem["runs"][name], trials) for name in (ours, *rivals)}
    shown = ", ".join(f"{name} {share:.0%}" for name, share in best.items())
    ahead = best[ours] >= max(best[name] for name in rivals)
    what = f"{problem['model']}: best after {trials} trials, of the optimum"
    return Comparison(figure, what, "OPPA first", shown, None, ahead)


def _mean_share(runs: list[Any], trials: int) -> float:
    """The share of the best step's rate that searches have reached after some trials, the mean.

    A search ends once it is within 2% of the best, so that larger shares count as 98%.
    """
    reached = [
        max((step["share"] for step in run["improvements"] if step["trial"] <= trials), default=0.0)
        for run in runs
    ]
    return sum(min(share, SEARCH_ENDS) for share in reached) / len(reached)


PLANNERS = "planners.py"
PAPERS: dict[str, tuple[Callable[[Results], Iterator[Comparison]], dict[str, list[str]]]] = {
    "oases": (
        oases,
        {
            "oases_table3": ["oases_table3.py"],
            "oases_baselines": [PLANNERS, "oases-baselines"],
            "oases_degrees": [PLANNERS, "oases-degrees"],
            "oases_planner": [PLANNERS, "oases"],
        },
    ),
    "axonn": (
        axonn,
        {
            "axonn_planner": [PLANNERS, "axonn"],
            "axonn_rivals": [PLANNERS, "axonn-rivals"],
            "axonn_overlap": [PLANNERS, "axonn-overlap"],
        },
    ),
    "amp": (
        amp,
        {
            "amp_planner": [PLANNERS, "amp", "--setup", "homogeneous"],
            "amp_het_cluster": [PLANNERS, "amp", "--setup", "het_cluster"],
            "amp_het_model": [PLANNERS, "amp", "--setup", "het_model"],
            "amp_baselines": [PLANNERS, "amp-baselines"],
        },
    ),
    "oppa": (
        oppa,
        {
            "oppa_planner": [PLANNERS, "oppa"],
            "oppa_settings": [PLANNERS, "oppa", "--problem", "paper"],
        },
    ),
}
"""By paper, what compares it, and the benchmarks whose results it takes by their names."""


def main() -> int:
    options = parse_options()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for paper in options.papers or PAPERS:
            report[paper] = reproduced(paper, options, Path(folder))
            Console(width=150).print(table_of(paper, report[paper]))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return int(any(row["holds"] is False for paper in report.values() for row in paper["rows"]))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("papers", nargs="*", choices=[*PAPERS, []], metavar="PAPER")
    parser.add_argument("--quick", action="store_true", help="the quick form of each benchmark")
    parser.add_argument("--from-results", action="store_true", help="compare benchmarks/results")
    parser.add_argument("--json", metavar="FILE", help="write the comparisons to this file")
    return parser.parse_args()


def reproduced(paper: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The comparisons of a paper, and the seconds that its benchmarks took."""
    compare, benchmarks = PAPERS[paper]
    began, given = time.monotonic(), dict[str, Any]()
    for name, command in benchmarks.items():
        path = HERE / "results" / f"{name}.json"
        if not options.from_results:
            path = folder / f"{name}.json"
            run(command, path, quick=options.quick)
        given[name] = json.loads(path.read_text())
    rows = [{**asdict(row), "verdict": row.verdict} for row in compare(given)]
    commands = [" ".join(command) for command in benchmarks.values()]
    took = None if options.from_results else round(time.monotonic() - began, 1)
    return {"commands": commands, "took_s": took, "rows": rows}


def run(command: list[str], path: Path, *, quick: bool) -> None:
    words = [sys.executable, str(HERE / command[0]), *command[1:], "--json", str(path)]
    print(f"running benchmarks/{' '.join(command)}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [*words, *(["--quick"] if quick else [])], stdout=subprocess.DEVNULL, check=False
    )
    if not path.exists():
        raise SystemExit(f"error: benchmarks/{' '.join(command)} ended with {done.returncode}.")


def table_of(paper: str, report: Mapping[str, Any]) -> Table:
    took = "" if report["took_s"] is None else f", {report['took_s']} s"
    table = Table(title=f"{paper}: the paper's figures beside ours{took}")
    for head in ("figure or table", "what", "the paper's", "ours", "ratio", "verdict"):
        table.add_column(head)
    for row in report["rows"]:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        table.add_row(row["item"], row["what"], row["paper"], row["ours"], ratio, row["verdict"])
    return table


if __name__ == "__main__":
    sys.exit(main())
