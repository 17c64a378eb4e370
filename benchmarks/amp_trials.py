"""AMP's ten best estimates tried on this machine, as the paper tries ten on its cluster.

`python benchmarks/planners.py amp-trials [--nproc N] [--json FILE] [--quick]`. The machine is
profiled, `amp` estimates every strategy for it, and `-O trials=10` trains by the ten best, each for
some steps on processes of its own; none is ended early here, so that all are measured.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from shardweave.driver.models.models import build_example
from shardweave.driver.processes.trials import host_of
from shardweave.driver.profile.profile import profile_machine
from shardweave.ir.capture.capture import capture
from shardweave.planners.amp.planner import plan_amp

MODEL = "gpt:layers=4,hidden=256,heads=8,vocab=1024,seq=128,batch=8,tie=false"
QUICK = "gpt:layers=2,hidden=32,heads=4,vocab=64,seq=16,batch=4,tie=false"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, on how many processes."""
    parser.add_argument("--model", default="", help=f"default: {MODEL}")
    parser.add_argument("--nproc", type=int, default=2, help="default: 2")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Try the plans, print the table; what `--json` writes."""
    model = options.model or (QUICK if options.quick else MODEL)
    trials, steps = (2, 2) if options.quick else (10, 10)
    example = build_example(model)
    program = capture(example.module, kwargs=example.kwargs)
    cluster = profile_machine(options.nproc, [program])
    estimated = plan_amp(program, None, cluster=cluster, simulate=0, top=trials)
    tried = plan_amp(
        program, None, cluster=cluster, host=host_of(model), trials=trials, steps=steps, slow=0.0,
        top=trials,
    )  # fmt: skip
    measured_s = {one.name: one.predicted.time_s for one in tried.candidates}
    rows = [
        {
            "strategy": one.name,
            "estimated_s": one.predicted.time_s,
            "measured_s": measured_s[one.name],
        }
        for one in estimated.candidates
        if one.name in measured_s
    ]
    Console().print(table_of(rows))
    for note in tried.notes:
        print(note)
    return {"model": model, "nproc": options.nproc, "steps": steps, "rows": rows}


def table_of(rows: list[dict[str, Any]]) -> Table:
    """The strategies in the order of their estimates."""
    fastest_s = min(row["measured_s"] for row in rows)
    mean_s = statistics.fmean(row["measured_s"] for row in rows)
    table = Table(title=f"AMP's best estimates as measured, {1e3 * mean_s:.0f} ms on average")
    for title in ("strategy", "estimated", "measured", "of the fastest"):
        table.add_column(title)
    for row in rows:
        table.add_row(
            row["strategy"],
            f"{1e3 * row['estimated_s']:.0f} ms",
            f"{1e3 * row['measured_s']:.0f} ms",
            f"{row['measured_s'] / fastest_s:.2f}",
        )
    return table
