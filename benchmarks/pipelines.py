"""Pipeline schedules beside those of torch.distributed.pipelining, on the same stages and link.

    python benchmarks/pipelines.py [--rate 500mbit] [--ranks 2,4] [--slow F] [--quick] [--json FILE]

The rows are steps of the same processes, timed in turn; a step is forward and backward of all
micro-batches. With `--rate` every process has a network of its own whose link the kernel limits
(root, ip and tc). With `--slow F` each is a device of its own speed: held to 1/F of a core's
processor time (`throttle.py`), ours and PyTorch's alike, as is what the simulator goes by. Where
there are more processes than cores they would else take turns, and a rank that waits would hasten
another; so F is then a quarter more than they are to a core. `list` is our schedule that is made
for the model and `--cluster`; the simulator goes by the same, or by what `--profile FOLDER`
measures first. What a rank works is the processor time of the rank that has most, times F. What it
waits for others is that of the rank that waits least, simulated, and by the schedule's closed form
(`planners/schedules/bounds.py`). Memory is that of the tensors which a step makes, on the rank that
has most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

import shaped_link
from pipeline_rows import CASES, our_program
from rank_processes import rows_of_ranks
from throttle import factor_for, slowed_cluster

from shardweave.driver.profile.profile import profile_machine
from shardweave.planners.cost.cluster_file import save_cluster
from shardweave.planners.cost.presets import find_cluster

PROFILED = ("1f1b", "zero-bubble-v")
"""The schedules whose programs have all ops of the others."""

WORKER = Path(__file__).with_name("pipelines_worker.py")
MODEL = "gpt:layers=8,hidden=256,heads=8,vocab=256,seq=64,batch=16,tie=false"
QUICK = "gpt:layers=8,hidden=32,heads=4,vocab=64,seq=16,batch=8,tie=false"


def main() -> int:
    options = parse_options()
    console = Console(width=max(140, Console().width))
    results: list[dict[str, Any]] = []
    with shaped_link.shaped_link(max(options.ranks), options.rate):
        for ranks in options.ranks:
            if options.profile:
                profile(options, ranks)
            slow = options.slow or factor_for(ranks)
            results.append({"ranks": ranks, "slow": slow, "rows": run(options, ranks, slow)})
            console.print(table_of(results[-1], options))
            if options.json:  # also what is there when more processes fail
                write_results(options, results)
    return 0


def write_results(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    cluster = "as profiled" if options.profile else options.cluster
    result = {"machine": options.machine, "rate": options.rate, "rounds": options.rounds,
              "model": options.model, "micro_batches": options.micro_batches,
              "cluster": cluster, "results": results}  # fmt: skip
    Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


def profile(options: argparse.Namespace, ranks: int) -> None:
    """Measure the ops of one and of two stages on each rank, and the link, into a file."""
    arguments = options.model, ranks, options.micro_batches, options.cluster
    cases = [case for case in CASES if case.schedule in PROFILED]
    programs = [our_program(case, *arguments) for case in cases]
    launcher = shaped_link.launcher() if options.rate else None
    measured = profile_machine(ranks, programs, launcher=launcher)
    path = profile_path(options, ranks)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_cluster(measured, path)


def profile_path(options: argparse.Namespace, ranks: int) -> Path:
    return Path(options.profile, f"{ranks}-stages.yaml")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="", help="rate of each process's link, as tc writes it")
    parser.add_argument("--model", default="", help="a GPT of at least two layers for each rank")
    parser.add_argument("--ranks", default="2,4", help="how many processes, in turn")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--slow", type=float, default=0.0, help="a core's share, as 1/F")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each row")
    parser.add_argument("--schedules", default=",".join(case.schedule for case in CASES))
    parser.add_argument("--cluster", default="", help="cluster file for `list` and the simulator")
    parser.add_argument("--profile", default="", help="folder for cluster files, measured first")
    parser.add_argument("--machine", default="2-core x86-64 CPU, torch CPU build")
    parser.add_argument("--json", default="", help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="a small model, three rounds")
    options = parser.parse_args()
    options.ranks = [int(ranks) for ranks in options.ranks.split(",")]
    options.schedules = options.schedules.split(",")
    unknown = {*options.schedules} - {case.schedule for case in CASES}
    if unknown:
        parser.error(f"there are no schedules {sorted(unknown)} to compare")
    rate = options.rate or "10gbit"
    options.cluster = options.cluster or f"testbed:nodes={max(options.ranks)},rate={rate}"
    options.model = options.model or (QUICK if options.quick else MODEL)
    if options.quick:
        options.rounds = 3
    return options


def run(options: argparse.Namespace, ranks: int, slow: float) -> list[dict[str, Any]]:
    """The rows of so many processes."""
    cluster = str(profile_path(options, ranks)) if options.profile else options.cluster
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cluster.yaml")
        save_cluster(slowed_cluster(find_cluster(cluster), slow), path)
        settings = {
            "model": options.model,
            "micro_batches": options.micro_batches,
            "rounds": options.rounds,
            "schedules": options.schedules,
            "slow": slow,
            "cluster": str(path),
        }
        what = f"a worker of {ranks}"
        return rows_of_ranks(WORKER, settings, ranks, options.rate, timeout_s=1200, what=what)


def table_of(result: dict[str, Any], options: argparse.Namespace) -> Table:
    slow = f", each held to 1/{result['slow']:g} of a core" if result["slow"] > 1 else ""
    title = f"{result['ranks']} processes{slow}, {options.micro_batches} micro-batches"
    table = Table(title=f"{title}, {options.rate or 'unshaped'} link")
    columns = ("row", "time", "ours / it", "memory", "works", "simulated", "waits", "simulated",
               "closed form", "simulated time")  # fmt: skip
    for name in columns:
        table.add_column(name, justify="left" if name == "row" else "right", no_wrap=True)
    ours: dict[str, Any] = {}
    for row in result["rows"]:
        if row["name"].startswith("shardweave"):
            ours = row
        table.add_row(*cells(ours, row))
    return table


def cells(ours: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """A line of the table; `ours` is the schedule of the same order."""
    own_s, time_s = statistics.median(ours["times_s"]), statistics.median(row["times_s"])
    waits = "waited_s" in row
    return [
        row["name"],
        f"{time_s * 1e3:.1f} ms",
        "" if row is ours else f"{own_s / time_s:.2f}",
        f"{row['peak_bytes'] / 2**20:.1f} MiB",
        f"{row['worked_s'] * 1e3:.0f} ms" if waits else "",
        f"{row['simulated_work_s'] * 1e3:.0f} ms" if waits else "",
        f"{statistics.median(row['waited_s']) / time_s:.0%}" if waits else "",
        f"{row['simulated_wait_s'] / row['simulated_s']:.0%}" if waits else "",
        f"{row['bound_wait_s'] / row['simulated_s']:.0%}" if waits else "",
        f"{row['simulated_s'] * 1e3:.1f} ms" if waits else "",
    ]


if __name__ == "__main__":
    sys.exit(main())
