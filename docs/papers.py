"""The page of papers' figures beside ours, written from `benchmarks/results` with the site."""

from __future__ import annotations

import csv
from collections.abc import Callable
from typing import Any

from shardweave.docs.figure_tables import ROOT, Rows, results, section, table

PARAGRAPHS = ROOT / "benchmarks" / "data" / "paragraphs"
"""A file for each paper, by its planner's name."""


def amp_modes() -> Rows:
    for name in ("amp_planner", "amp_het_cluster", "amp_het_model"):
        setup = results(name)
        for mode, row in setup["modes"].items():
            ratio, took = f"{row['ratio']:.2f}", f"{row['search_s'] * 1e3:.0f} ms"
            ran = f"{setup['setup']}, {setup['num_succeeded']}"
            yield ran, mode, f"{row['spearman']:.3f}", ratio, str(row["best_rank"]), took


def amp_search() -> list[str]:
    report, planned = results("amp_baselines"), results("amp_planner")

    def spreads() -> Rows:
        paper = {"homogeneous": "1.10", "het_cluster": "1.54", "het_model": "1.77"}
        for setup, by_method in report["spreads"].items():
            gain = by_method["megatron"]["least_s"] / by_method["amp"]["least_s"]
            cells = [f"{each['least_s']:.2f}, {each['mean_s']:.2f}" for each in by_method.values()]
            yield setup, *cells, f"{gain:.2f}", paper[setup]

    def tops() -> Rows:
        published = report["published_table3"]
        for name, title in (("Megatron", "Megatron-LM"), ("SA", "annealing"), ("AMP", "AMP")):
            row = published[name]
            yield f"{title}, Table 3", f"{row['min']:.2f}, {row['mean']:.2f} ± {row['sd']:.2f}"
        for mode, row in report["measured_top"].items():
            spread = f"{row['least_s']:.2f}, {row['mean_s']:.2f} ± {row['deviation_s']:.2f}"
            yield f"ten best by {mode} estimates", spread

    def scaling() -> Rows:
        for row in report["scaling"]:
            ours = f"{row['search_s'] * 1e3:.0f} ms"
            yield row["grid"], str(row["strategies"]), ours, f"{row['published_s']:g} s"

    return section(
        "AMP",
        "planners.py amp --setup SETUP`, `.. amp-baselines",
        "amp_planner.json, amp_het_cluster.json, amp_het_model.json, amp_baselines.json",
        "First, estimates beside the authors' measured runs (Figure 2), literal (as the "
        "released code costs them) and corrected; the published search took "
        f"{planned['published_search_cpu_s']:.0f} s of processor time. Then the best and the mean "
        "of the ten best in estimated seconds, by method; Table 3, the ten best by estimate as "
        "measured (best, mean and standard deviation, s); Figure 3, four stages of four replicas "
        "(it prints no numbers); and Table 2, search times by nodes x devices.",
        table(
            "setup and runs | costs | Spearman | estimate / measured | rank of the best | search",
            amp_modes(),
        ),
        table(
            "setup | AMP | uniform stages | equal parameters | Megatron-LM | random | annealing | "
            "over Megatron-LM | the paper's",
            spreads(),
        ),
        table(
            "narrow layers' time over wide ones' | gain over equal layers | over equal parameters",
            (tuple(f"{value:.2f}" for value in row.values()) for row in report["figure_3"]),
        ),
        table("strategies | seconds", tops()),
        table("grid | strategies | ours | the paper's", scaling()),
    )


def amp_trials() -> list[str]:
    report = results("amp_trials")
    measured = [row["measured_s"] for row in report["rows"]]
    fastest = min(measured)

    def rows() -> Rows:
        for row in report["rows"]:
            took = row["measured_s"]
            estimate = f"{row['estimated_s'] * 1e3:.0f} ms"
            yield row["strategy"], estimate, f"{took * 1e3:.0f} ms", f"{took / fastest:.2f}"

    return section(
        "AMP's ten trials on local processes",
        "planners.py amp-trials",
        "amp_trials.json",
        f"`{report['model']}` on {report['nproc']} processes, in the order of the estimates.",
        table("strategy | estimated | measured | over the fastest", rows()),
    )


def grid_text(sizes: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)


def axonn_plans() -> list[str]:
    def rows() -> Rows:
        for row in results("axonn_planner")["rows"]:
            grid = grid_text(row["grid"])
            published = [str(each) for each in row["published"].values()]
            used = f"{row['utilisation_pct']:.0f}"
            yield row["model"], str(row["gpus"]), grid, str(row["kept_layers"]), used, *published

    def rivals() -> Rows:
        for row in results("axonn_rivals")["rows"]:
            for name, each in row["rivals"].items():
                used = f"{each['utilisation_pct']:.0f}"
                yield row["model"], name, grid_text(each["mesh"]), used

    def strong() -> Rows:
        scaling = results("axonn_planner")["strong_scaling"]
        first = scaling[0]
        for row in scaling:
            grid = grid_text(row["grid"])
            ideal = first["step_s"] * first["gpus"] / row["gpus"]
            yield str(row["gpus"]), grid, f"{row['step_s']:.1f}", f"{ideal / row['step_s']:.0%}"

    return section(
        "AxoNN, Table I",
        "planners.py axonn`, `.. axonn-rivals",
        "axonn_planner.json, axonn_rivals.json",
        "The best of five grids, simulated with the schedule `list`; utilisation in percent of "
        "the peak by the paper's formula (VI-C). The simulation has no stragglers, and `list` "
        "hides more than AxoNN's order.",
        table(
            "model | GPUs | grid | layers kept | simulated | Megatron-LM | ZeRO-3 | DeepSpeed-3D | "
            "AxoNN",
            rows(),
        ),
        table("model | rival, simulated here | degrees | % of peak", rivals()),
        table("GPUs of GPT-80B (Figure 9) | grid | step, s | of linear scaling", strong()),
    )


_OVERLAPS: dict[str, str] = {
    "overlap_all_reduce": "A: all-reduces of input gradients (`axonn-a`)",
    "overlap_reduce_scatter": "B: and reduce-scatters (`axonn-ab`)",
    "overlap_all_gather": "C: and gathers ahead (`axonn-abc`)",
    "cache_all_gather": "D: and gathers kept, of all 32 layers (the paper: of 28)",
    "list": "`list` in their place",
    "list, reductions kept too": "`list`, reduced outputs kept too",
}


def axonn_overlap() -> list[str]:
    report = results("axonn_overlap")
    ranking, frontier = report["figure_7"], report["figure_10"]

    def gains() -> Rows:
        for row in report["figure_3"]["rows"][1:]:
            paper = row["published_pct"]
            gain = f"{row['gain_pct']:.0f}"
            yield (
                _OVERLAPS.get(str(row["step"]), str(row["step"])),
                f"{row['time_s']:.2f}",
                gain,
                "" if paper is None else f"{paper}",
            )

    def rankings() -> Rows:
        titles = {"aware": "by measured rings", "agnostic": "by volume alone"}
        for kind, title in titles.items():
            hits, best = f"{kind}_hits_in_top5", f"rank_of_best_{kind}"
            paper = ranking["published"]
            yield title, f"{paper[hits]}, {paper[best]}", f"{ranking[hits]}, {ranking[best]}"
        printed = f"not said, {ranking['rank_of_best_printed']}"
        yield "by Equation 10 as printed", "the first row is said to be it", printed

    def exposed() -> Rows:
        for name in ("AxoNN", "ZeRO-3"):
            paper_s = frontier["published_exposed_s"][name]
            yield name, f"{paper_s:g}", f"{frontier[name]['exposed_s']:.1f}"

    def unets() -> Rows:
        for row in report["table_2"]:
            grid = grid_text(row["grid"])
            millions = f"{row['parameters'] / 1e6:,.0f}M"
            took, used = f"{row['time_s']:.2f}", f"{row['utilisation_pct']:.0f}"
            yield row["model"], millions, str(row["gpus"]), grid, took, used

    return section(
        "AxoNN's overlap, rankings and U-Nets",
        "planners.py axonn-overlap",
        "axonn_overlap.json",
        "Figure 3, GPT-20B on 16 GPUs of Perlmutter, gains in percent of the row before. Figure 7, "
        "how many of the five fastest grids are among a ranking's first five, and at which place "
        "the fastest is: Equation 10 as printed ranks it seventh: it assumes one bandwidth within "
        "a node, but four GPUs have three times the bandwidth of two. Figure 10, exposed "
        "seconds of GPT-80B on 1,024 dies of Frontier. Table "
        "II's U-Nets, with half of the paper's channels.",
        table("overlap | step, s | gain | the paper's", gains()),
        table("ranking of grids | the paper's | ours", rankings()),
        table("system | the paper's | ours", exposed()),
        table("model | ours has | GPUs | grid | step, s | % of peak", unets()),
    )


def oases_degrees() -> list[str]:
    rows = results("oases_degrees")["rows"]
    ranked = {
        tied: [row["spearman"] for row in rows if row["tied"] is tied] for tied in (True, False)
    }

    def degrees() -> Rows:
        for row in rows:
            yield (
                row["cluster"],
                f"{row['hidden']}, tied" if row["tied"] else str(row["hidden"]),
                row["best"],
                f"{row['model']}, {row['model_regret']:.1%}",
                f"{row['refined']}, {row['refined_regret']:.1%}",
                f"{row['auto_regret']:.1%}",
            )

    def table_6() -> Rows:
        for row in results("oases_planner")["rows"]:
            if (paper := row["paper"]) is not None:
                gained = f"{paper['gain']:.2f}, {row['gain']:.2f}"
                solved = f"{paper['solve_ms']:.0f}, {row['dp_ms']:.1f}"
                yield row["name"], paper["degrees"], row["degrees"], gained, solved

    return section(
        "Oases, degrees",
        "planners.py oases-degrees`, `.. oases",
        "oases_degrees.json, oases_planner.json",
        "All 27 assignments of degrees of a GPT layer and its head, simulated: degrees of "
        "attention, MLP and head, and what they take over the fastest. Spearman of the chain "
        f"model's order and the simulator's is {span(ranked[False])} (the paper's, of its cluster: "
        f"0.84 and 0.88), but {span(ranked[True])} where the head has the weight of the embedding: "
        "what that costs depends on the degrees of the first block and the last, and no chain has "
        "it. The paper's chains are of layers alone. Then Table 6: "
        "degrees by layers, the gain over the default degrees, and milliseconds to solve (the "
        "paper's, ours).",
        table("preset | hidden | fastest | chain model | refined | `auto`", degrees()),
        table("model | the paper's degrees | ours | gain | ms to solve", table_6()),
    )


def span(values: list[float]) -> str:
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least} to {most}"


def oases_rates() -> list[str]:
    report, simulated = results("oases_baselines"), results("oases_table3")
    order = ("Megatron-LM", "Merak", "cross_pass", "fine_grained_recompute", "planner")
    ranked = report["spearman_with_table_3"]

    def table_3() -> Rows:
        for row in simulated["rows"]:
            cells = [f"{row['paper'][name]:.1f}, {row['simulated'][name]:.1f}" for name in order]
            yield row["cluster"], str(row["hidden"]), *cells

    def figure_4() -> Rows:
        for row in report["figure_4"]:
            rates = [f"{rate:.1f}" for rate in row["rates"].values()]
            gained = f"{row['over_best']:.2f}", f"{row['over_megatron']:.2f}"
            yield row["cluster"], str(row["hidden"]), *rates, *gained

    def figure_5() -> Rows:
        paper: dict[str, Any] = report["published_figure_5"]
        for name, by_cluster in report["figure_5"].items():
            least, most = paper[f"{name}_vs_Merak"]
            ours = [each["over_merak"] for each in by_cluster.values()]
            megatron = [each["over_megatron"] for each in by_cluster.values()]
            yield name, f"{least:.2f} to {most:.2f}", span(ours), span(megatron)

    def figure_7() -> Rows:
        for row in report["figure_7"]:
            shares = [f"{share:.1%}" for share in list(row["share"].values())[1:]]
            yield row["cluster"], str(row["hidden"]), row["method"], *shares

    return section(
        "Oases, throughput",
        "oases_table3.py`, `planners.py oases-baselines",
        "oases_table3.json, oases_baselines.json",
        "Thousands of tokens a second with the published profile and no parameter fitted to the "
        "table: Table 3 (the paper's, ours), then the paper's other baselines, then Figure 5 "
        "without the bubble, and Figure 7, the reduction of gradients alone. Our order of Table 3 "
        f"has Spearman {ranked['speedup']:.3f} in speed-ups and {ranked['throughput']:.3f} in "
        "throughputs.",
        table(
            "cluster | hidden | Megatron-LM | Merak | cross-pass | fine-grained recomputation | "
            "planner",
            table_3(),
        ),
        table(
            "cluster | hidden | Megatron-LM | Merak | Alpa-like | Wang et al. | Oases | over the "
            "best | over Megatron-LM",
            figure_4(),
        ),
        table("model | over Merak, the paper's | ours | over Megatron-LM", figure_5()),
        table("cluster | hidden | method | of linear scaling to 8 | 16 | 32 GPUs", figure_7()),
    )


METHODS = {
    "oppa, extended": "`oppa`, extended form (default)",
    "standard BO": "standard Bayesian optimisation",
    "oppa, corrected": "`oppa`, corrected form",
    "boosted trees": "boosted trees",
    "cost model alone": "cost model alone, extended form",
    "random": "random",
}


def oppa() -> list[str]:
    report = results("oppa_planner")

    def trials() -> Rows:
        for name, title in METHODS.items():
            median, runs = report["median_trials"][name], report["runs"][name]
            each = [run["trials"] for run in runs]
            counts = ", ".join(str(count or f"over {report['trials']}") for count in each)
            middle = f"{median:g}" if median else f"over {report['trials']}"
            yield title, middle, counts if any(each) else "none of five"

    def stops() -> Rows:
        for name, by_stop in results("oppa_early_stop")["searches"].items():
            for what, row in by_stop.items():
                counts = ", ".join(map(str, row["trials"]))
                yield name, what, counts, f"{row['hours']:.1f}", f"{100 * row['best_share']:.1f}%"

    def surrogates() -> Rows:
        for row in results("oppa_surrogate")["rows"]:
            shares = [f"{row[name]:.2f}" for name in ("throughput", "fastest_tenth", "memory")]
            scales: dict[str, float] = row["lengthscales"]
            shortest = [
                f"{name} {scales[name]:.2g}" for name in sorted(scales, key=scales.__getitem__)[:3]
            ]
            place = f"{row['place_of_best']} of {row['configurations']:,}"
            yield row["setting"], row["method"], *shares, place, ", ".join(shortest)

    return section(
        "OPPA",
        "planners.py oppa`, `.. oppa-early-stop`, `.. oppa-surrogate",
        "oppa_planner.json, oppa_early_stop.json, oppa_surrogate.json",
        f"GPT-3 13B with 256 sequences of 2048 on 16 H100 has {report['num_configurations']:,} "
        f"configurations, of which {report['num_fitting']:,} fit and {report['num_near']} are "
        "within 2% of the best: trials until one of those was made, five searches each. Trials "
        "are simulated by a closed form (`benchmarks/oppa_step_model.py`) that shares some terms "
        "with the prior, so a real cluster may need more. Then searches that end slow trials "
        "early; and what surrogates know after 30 trials of the paper's settings: rank "
        "correlations of predicted and true values (Figures 4, 7 to 10) and lengthscales "
        "(Table 3).",
        table("method | median | each search", trials()),
        ["![best so far against trials and hours](planners/oppa.png)", ""],
        table("search | trials are | trials | hours | best", stops()),
        table(
            "setting | method | Spearman of throughput | of the fastest tenth | of memory | "
            "place of the best | shortest lengthscales",
            surrogates(),
        ),
    )


def took_of(seconds: float | None) -> str:
    """The sentence on how the comparison was made; None: of results that were there."""
    if seconds is None:
        return "Compared from the results in the repository (`--from-results`), with"
    return f"Takes {seconds:.0f} s on a 2-core x86-64 CPU, with"


def compared() -> list[str]:
    """Every figure and table that is compared, paper by paper."""
    lines: list[str] = []
    for paper, report in results("papers").items():

        def rows(given: Any = report["rows"]) -> Rows:
            for row in given:
                ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
                yield row["item"], row["what"], row["paper"], row["ours"], ratio, row["verdict"]

        lines += section(
            f"{paper.capitalize()}, compared",
            f"papers.py {paper}",
            "papers.json",
            took_of(report["took_s"]),
            table("figure or table | what | the paper's | ours | ratio | verdict", rows()),
        )
    return lines


STATES = {
    "background": "nothing to build",
    "built": "built as the paper has it, or more general",
    "measured": "a figure or table beside ours",
    "differs": "built or measured otherwise, and how",
    "absent": "not here, and why",
}
"""States in the tables of paragraphs, and their meanings."""


def paragraphs() -> list[str]:
    """A line for each paragraph, equation, figure and table of each paper."""
    meanings = "; ".join(f"*{state}*: {meaning}" for state, meaning in STATES.items())
    lines = ["## Paragraph by paragraph", "", f"{meanings}.", ""]
    for path in sorted(PARAGRAPHS.glob("*.tsv")):
        with path.open() as file:
            rows = [list(row.values()) for row in csv.DictReader(file, delimiter="\t")]
        lines += [f"### {path.stem.capitalize()}", ""]
        lines += table("paragraph | says | state | here", rows)
    return lines


SECTIONS: tuple[Callable[[], list[str]], ...] = (
    compared, oases_degrees, oases_rates, axonn_plans, axonn_overlap, amp_search, amp_trials, oppa,
    paragraphs,
)  # fmt: skip


def papers() -> str:
    """The page of the papers' figures beside ours."""
    lines = [
        "# Papers",
        "",
        "For those who know the papers: their figures beside ours, from the results in the "
        "repository. [Planners](planners.md) derives what each planner computes.",
        "",
    ]
    for write in SECTIONS:
        lines += write()
    return "\n".join(lines)
