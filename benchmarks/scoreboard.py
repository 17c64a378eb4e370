"""The simulator against runs that others measured, source by source.

`python benchmarks/scoreboard.py [--runs FILE ..] [--cluster NAME|FILE] [--jobs N] [--quick]
[--json OUT]` reads rows in the columns of `data/runs/README.md`, predicts each on the preset of its
kind of device or on one cluster, and prints for each source the errors, the order within groups of
equal model, devices and batch, the regret of what the simulator would choose, and the rows that
are worst. It says which architecture rows were taken for. Presets are made of data sheets and of
profiles of single ops and messages (each file says of which), not of the runs. The groups that
nobody was to look at while the model was made are reported apart. Many rows are predicted by
several processes, by default one for each core. A row that cannot be read or predicted is named
with its file and line; the first makes the command fail.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardweave.benchmarks.runs.rows import MeasuredRun, note_on_columns, read_rows
from shardweave.benchmarks.scoreboard_predict import Predicted, predict_all, preset_of
from shardweave.benchmarks.scoreboard_score import Pair, Score, formula, groups_of, score_of
from shardweave.benchmarks.scoreboard_twins import oracle_regret
from shardweave.planners.cost.presets import find_cluster

FOLDER = Path(__file__).resolve().parent / "data" / "runs"

PARTS = ("looked", "held")
"""Groups of runs that were looked at while the model was made, and those that nobody was to."""

QUICK = FOLDER / "sailor.csv"
"""The runs of a quick run."""

WORST = 5
"""Rows that are shown of each source."""


def rows_of(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    return [
        {"run": run.name, "measured_s": run.step_s, "predicted_s": found.step_s}
        for run, found in pairs
    ]


def worst_of(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """The rows with the largest errors of the step."""
    timed = [pair for pair in pairs if pair[0].step_s]
    timed.sort(key=lambda pair: -abs(pair[1].step_s / pair[0].step_s - 1))
    return rows_of(timed[:WORST])


def _contradicted_record(own: Predicted) -> dict[str, Any]:
    """The runs that are not scored for their notes, and the error with them."""
    if not own.contradicted:
        return {}
    rows = [
        {**row, "reason": run.contradiction}
        for (run, _), row in zip(own.contradicted, rows_of(own.contradicted), strict=True)
    ]
    both = score_of([*own.pairs, *own.contradicted])
    return {"contradicted": rows, "error_with_contradicted": both.error}


def _formula_record(pairs: Sequence[Pair]) -> dict[str, Any]:
    guessed, simulated = formula(pairs)
    rows: dict[str, Any] = {}
    for name, timed in (("formula", guessed), ("simulator", simulated)):
        errors = [abs(step / run.step_s - 1) for run, step in timed]
        rows[name] = {"runs": len(timed), "error": sum(errors) / max(1, len(errors))}
    return rows


def _table(scores: Mapping[str, Score]) -> Table:
    table = Table(box=None)
    names = (
        "source", "runs", "error", "scaled", "groups", "spearman", "regret", "worst", "of 3",
        "memory", "precision", "recall",
    )  # fmt: skip
    for name in names:
        table.add_column(name, justify="left" if name == "source" else "right")
    for name, one in scores.items():
        table.add_row(
            name, str(one.runs), _share(one.error), _share(one.scaled_error), str(one.groups),
            *(_text(value) for value in (
                one.spearman, one.regret, one.worst_regret, one.worst_regret_of_3,
                one.memory_error, one.precision, one.recall,
            )),
        )  # fmt: skip
    return table


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _print_scores(scores: Mapping[str, Score], record: Mapping[str, Any]) -> None:
    """The table, and for each source its worst rows and the formula beside the simulator."""
    Console(width=120).print(_table(scores))
    for source in scores:
        one = record["sources"][source]
        for reason, count in one["taken_for"].items():
            print(f"{source}: {count} rows taken for {reason}")
        print(
            f"{source}: {one['said_out']} of {one['known']} are said not to fit, "
            f"{one['ran_out']} did not"
        )
        print(f"{source}, worst rows:")
        for row in one["worst"]:
            print(
                f"  {row['run']}: {row['measured_s']:.3f} s, predicted {row['predicted_s']:.3f} s"
            )
        for row in one.get("contradicted", ()):
            times = f"{row['measured_s']:.3f} s, predicted {row['predicted_s']:.3f} s"
            print(f"  not scored, as {row['reason']}: {row['run']}: {times}")
        if "contradicted" in one:
            print(f"  error with what is not scored: {_share(one['error_with_contradicted'])}")
        if "oracle_regret" in one:
            print(
                "  worst regret of an oracle that prices messages by the profile: "
                f"{one['oracle_regret']:.2f}; at a quarter of it: {one['quarter_regret']:.2f}"
            )
        if "formula" in one:
            rows = one["formula"].items()
            both = ", ".join(f"{name} {row['error']:.1%}" for name, row in rows)
            print(
                f"  a formula with four constants, fitted on half of the groups, on others: {both}"
            )


def _architectures(runs: Sequence[MeasuredRun]) -> dict[str, int]:
    """What rows were taken for, and by what they told it, with how many of them."""
    return dict(Counter(f"{r.told.architecture.name}, by {r.told.reason}" for r in runs))


def _oracle_record(pairs: Sequence[Pair], asked: str | None) -> dict[str, Any]:
    """What an oracle's choice costs that prices messages by the profile, or a quarter of it."""
    runs = [run for run, _ in pairs]
    if not groups_of([(run, run.step_s) for run in runs]):
        return {}
    cluster = preset_of(runs[0], asked)
    return {
        "oracle_regret": oracle_regret(runs, cluster),
        "quarter_regret": oracle_regret(runs, cluster, 0.25),
    }


def report(
    runs: Sequence[MeasuredRun], found: Predicted, asked: str | None = None
) -> dict[str, Any]:
    """Print what is found of these runs, by source, and return it."""
    record: dict[str, Any] = {
        "sources": {},
        "refused": len(found.refused),
        "reasons": [f"{run.place}: {reason}" for run, reason in found.refused],
    }
    scores: dict[str, Score] = {}
    for source in dict.fromkeys(run.source for run in runs):
        own = found.of(source)
        rows = [run for run in runs if run.source == source]
        if not own.pairs:
            record["sources"][source] = {"runs": 0, **_contradicted_record(own)}
            record["sources"][source]["taken_for"] = _architectures(rows)
            reasons = [reason for _, reason in own.refused]
            reasons += [run.contradiction for run, _ in own.contradicted]
            print(f"{source}: none of its runs is scored: {reasons[0]}")
            continue
        scores[source] = score_of(own.pairs)
        record["sources"][source] = {
            **scores[source].record(),
            "taken_for": _architectures(rows),
            "worst": worst_of(own.pairs),
            **_contradicted_record(own),
            **_oracle_record(own.pairs, asked),
        }
        if len(groups_of([(run, run.step_s) for run, _ in own.pairs])) >= 4:
            record["sources"][source]["formula"] = _formula_record(own.pairs)
    _print_scores(scores, record)
    for run, reason in found.refused:
        print(f"not predicted: {run.place}: {reason} ({run.name})")
    return record


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", nargs="+", type=Path, default=sorted(FOLDER.glob("*.csv")))
    parser.add_argument("--cluster", help="a preset or a file, for all rows")
    parser.add_argument("--part", choices=PARTS, help="of the groups; by default each")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK.name}")
    options = parser.parse_args(arguments)
    if options.quick:
        options.runs = [QUICK]
    start_s = _processor_s()
    record: dict[str, Any] = {}
    try:
        every, problems = _read(options.runs)
        if options.cluster:
            find_cluster(options.cluster)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for part in [options.part] if options.part else PARTS:
        runs = [run for run in every if run.is_held_out == (part == "held")]
        if not runs:
            continue
        found = predict_all(runs, options.cluster, options.jobs)
        timed = sum(run.step_s > 0 for run, _ in found.pairs)
        print(f"{part}: {len(found.pairs)} of {len(runs)} runs are scored, {timed} by their step")
        record[part] = report(runs, found, options.cluster)
    seconds = _processor_s() - start_s
    print(f"{seconds:.0f} s of processor time")
    record["processor_s"] = seconds
    if problems:
        record["unread"] = problems
        print(f"{len(problems)} rows could not be read and are not scored", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if problems else 0


def _processor_s() -> float:
    """Of this process and those that it started and that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _read(paths: Sequence[Path]) -> tuple[list[MeasuredRun], list[str]]:
    """The runs of some files, and what is wrong with rows that cannot be read, which is printed."""
    for path in paths:
        if note := note_on_columns(path):
            print(note)
    runs, problems = read_rows(paths)
    for problem in problems:
        print(f"not read: {problem}", file=sys.stderr)
    if not runs and not problems:
        raise ValueError(f"{', '.join(map(str, paths))}: no rows; give files with a run a row.")
    return runs, problems


if __name__ == "__main__":
    sys.exit(main())
