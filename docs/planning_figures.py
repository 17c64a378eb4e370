"""The figures of the planner `auto`."""

from __future__ import annotations

from shardweave.docs.figure_tables import Rows, results, section, table


def planning() -> list[str]:
    regrets = results("auto_regret")["problems"]
    bounded = sum(row.get("bounded", 0) for row in regrets.values())
    plans = sum(row["points"] for row in regrets.values())

    def rows() -> Rows:
        for name, row in regrets.items():
            took = f"{row['auto_s'] * 1e3:.1f} ms"
            yield (
                name,
                f"{row['points']:,}",
                took,
                f"{row['best_s'] * 1e3:.1f} ms",
                (f"{row['regret']:.1%}"),
            )

    def depths() -> Rows:
        every = results("auto_depth")
        for model in dict.fromkeys(row["model"] for row in every):
            own = [row for row in every if row["model"] == model]
            yield (
                model,
                *(
                    f"{max(abs(row[key]) for row in own):.1%}"
                    for key in ("time_error", "memory_error")
                ),
            )

    return section(
        "The planner `auto`",
        "auto_regret.py` and `auto_depth.py",
        "auto_regret.json, auto_depth.json",
        f"Regret: the chosen plan beside every plan of the space but those under `list`, as "
        f"simulated; {plans:,} plans, of which {bounded:,} were left out by their lower bounds. "
        "Depth: the step by a line through few blocks, beside simulations of all blocks, the most "
        "it is off.",
        table("problem | plans | `auto` | best | regret", rows()),
        table("deep model | step off by | memory off by", depths()),
    )


def planning_speed() -> list[str]:
    speed, parts = results("auto_speed"), results("step_parts")

    def rows() -> Rows:
        for name, row in speed.items():
            each = row["plan_each_s"]
            published = row["published_flops_s"]
            yield (
                name,
                f"{row['capture_s']:.1f} s",
                f"{row['plan_s']:.1f} s, at most {max(each):.1f} s",
                f"{row['peak_bytes'] / 2**30:.1f} GiB",
                f"{row['device_flops_s'] / 1e12:.0f}",
                f"{published / 1e12:.0f}" if published else "",
            )

    return section(
        "How long `auto` takes",
        "auto_speed.py` and `step_parts.py",
        "auto_speed.json, step_parts.json",
        "Processor time of capture and of planning, of several runs the fastest and the slowest, "
        "the peak of the process, and the model's TFLOP/s of a device as simulated beside those "
        "published (Grattafiori et al. 2024, Table 4; of causal attention the half that its mask "
        "leaves). Degrees of Llama-3-405B are those that it was trained with. The second table has "
        "the seconds of its step with 16 parts of sequences, by part.",
        table("model and devices | capture | planning | memory | simulated | published", rows()),
        table("part | seconds", ((name, f"{value:.1f}") for name, value in parts.items())),
    )


def measured_choice() -> list[str]:
    from shardweave.benchmarks import auto_measured

    record = results("auto_measured")

    def rows() -> Rows:
        for result in record["results"]:
            own = result["rows"]
            times = [auto_measured.median_s(row) for row in auto_measured.programs_of(own)]
            yield (
                str(result["ranks"]),
                f"1/{result['slow']:g}" if result["slow"] > 1 else "as they come",
                auto_measured.verdict(own).removeprefix("the choice is "),
                f"{max(times) / times[0]:.1f}",
                auto_measured.spread(own).removeprefix("plans of one program "),
            )

    return section(
        "The choice of `auto` as measured",
        "auto_measured.py",
        "auto_measured.json",
        "What `auto` chooses for a GPT of 4 layers, timed in turn with all plans that differ in "
        "one dimension, on two cores and a link of 500 Mbit/s; plans whose ranks run one program "
        "are one row.",
        table(
            "processes | share of a core | the choice | the slowest, times as long | plans of one "
            "program",
            rows(),
        ),
    )
