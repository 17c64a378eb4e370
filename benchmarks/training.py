"""A training step of each parallelism beside PyTorch's own, on the same model and link.

    python benchmarks/training.py [--rate 500mbit] [--quick] [--cases data,shards] [--json FILE]

Data parallelism beside DDP, weights stored in shards beside FSDP2 (freed after the forward pass,
and kept), tensor parallelism beside parallelize_module with loss_parallel, data x tensor beside
FSDP2 with parallelize_module, and one process beside eager and torch.compile. The rows of a case
are steps of the same processes, timed in turn; a step is forward and backward. With `--compiled`
Inductor compiles the blocks of all rows. With `--rate` every process has a network of its own whose
link the kernel limits (root, ip and tc). Memory is that of the tensors which a step makes, bytes
are those that the kernel sent for a rank, messages are calls of gloo that send, and the simulator
goes by `--cluster`, or by what `--profile FOLDER` measures first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

import shaped_link
from modelled_link import bytes_per_second
from rank_processes import rows_of_ranks
from training_cases import CASES, Case, our_program

from shardweave.driver.profile.profile import profile_machine
from shardweave.planners.cost.cluster_file import save_cluster

WORKER = Path(__file__).with_name("training_worker.py")
MODEL = "gpt:layers=4,hidden=256,heads=8,vocab=1024,seq=128,batch=8,tie=false"
SMALL = "gpt:layers=4,hidden=32,heads=4,vocab=64,seq=32,batch=4,tie=false"
QUICK = "gpt:layers=2,hidden=64,heads=4,vocab=128,seq=64,batch=8,tie=false"


def main() -> int:
    options = parse_options()
    console = Console(width=max(150, Console().width))
    nodes = max(case.num_ranks for case in options.cases)
    with shaped_link.shaped_link(nodes, options.rate):
        if options.profile:
            for num_ranks in sorted({case.num_ranks for case in options.cases}):
                profile(options, num_ranks)
        results: list[dict[str, Any]] = []
        for case in options.cases:
            models = {"": options.model}
            if case.num_ranks == 1:
                models = {"": options.model, ", small": SMALL}
            for suffix, model in models.items():
                rows = run_case(options, case, model)
                results.append({"case": case.name + suffix, "model": model, "rows": rows})
                console.print(table_of(results[-1:], options))
            if options.json:  # also what is there when a later case fails
                write_results(options, results)
    if len(results) > 1:
        console.print(table_of(results, options))
    return 0


def write_results(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    cluster = "as profiled" if options.profile else options.cluster
    result = {"machine": options.machine, "rate": options.rate, "rounds": options.rounds,
              "cluster": cluster, "cases": results}  # fmt: skip
    Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="", help="rate of each process's link, as tc writes it")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each row")
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    parser.add_argument("--cluster", default="", help="cluster file for the simulator")
    parser.add_argument("--profile", default="", help="folder for cluster files, measured first")
    parser.add_argument("--machine", default="2-core x86-64 CPU, torch CPU build")
    parser.add_argument("--json", default="", help="write the rows to this file")
    parser.add_argument("--compiled", action="store_true", help="blocks compiled by Inductor")
    parser.add_argument("--quick", action="store_true", help="a small model, three rounds")
    options = parser.parse_args()
    names = options.cases.split(",")
    if unknown := set(names) - {case.name for case in CASES}:
        known = ", ".join(case.name for case in CASES)
        parser.error(f"--cases: there is no {', '.join(sorted(unknown))}; there are {known}")
    # One process has no link.
    options.cases = [c for c in CASES if c.name in names and (c.num_ranks > 1 or not options.rate)]
    options.cluster = options.cluster or f"testbed:nodes=4,rate={options.rate or '10gbit'}"
    if options.quick:
        options.rounds, options.model = 3, QUICK
    return options


def profile(options: argparse.Namespace, num_ranks: int) -> None:
    """Measure ops of that many processes' programs, and collectives over the link, into a file."""
    cases = [case for case in options.cases if case.num_ranks == num_ranks]
    programs = [our_program(case, options.model) for case in cases]
    launcher = shaped_link.launcher() if options.rate else None
    measured = profile_machine(num_ranks, programs, launcher=launcher)
    path = profile_path(options, num_ranks)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_cluster(measured, path)


def profile_path(options: argparse.Namespace, num_ranks: int) -> Path:
    return Path(options.profile, f"{num_ranks}-processes.yaml")


def run_case(options: argparse.Namespace, case: Case, model: str) -> list[dict[str, Any]]:
    """The rows of a case's processes."""
    profiled = options.profile and str(profile_path(options, case.num_ranks))
    settings = {
        "case": case.name,
        "model": model,
        "rounds": options.rounds,
        "cluster": profiled or options.cluster,
        "compile": not options.quick,
        "compiled": options.compiled,
    }
    what = f"a worker of '{case.name}'"
    return rows_of_ranks(WORKER, settings, case.num_ranks, options.rate, timeout_s=1200, what=what)


def table_of(results: list[dict[str, Any]], options: argparse.Namespace) -> Table:
    table = Table(title=f"forward and backward, {options.rate or 'unshaped'} link")
    for title in ("case", "row", "time", "ours / it", "processor", "memory", "sent", "link",
                  "messages", "measured / simulated", "/ lower bound"):  # fmt: skip
        is_name = title in ("case", "row")
        table.add_column(title, justify="left" if is_name else "right", no_wrap=True)
    for result in results:
        ours = result["rows"][0]
        for row in result["rows"]:
            table.add_row(*cells(result["case"], ours, row, options.rate))
    return table


def cells(case: str, ours: dict[str, Any], row: dict[str, Any], rate: str) -> list[str]:
    """A line of the table. `link` is the share of the time that the bytes take at the rate."""
    own_s, time_s = statistics.median(ours["times_s"]), statistics.median(row["times_s"])
    simulated, bound = row.get("simulated_s"), row.get("lower_bound_s")
    is_ours = row is ours
    return [
        case if is_ours else "",
        row["name"],
        f"{time_s * 1e3:.1f} ms",
        "" if is_ours else f"{own_s / time_s:.2f}",
        f"{statistics.median(row['processor_s']) * 1e3:.1f} ms",
        f"{row['peak_bytes'] / 2**20:.1f} MiB",
        f"{row['sent_bytes'] / 2**20:.1f} MiB",
        f"{row['sent_bytes'] / bytes_per_second(rate) / time_s:.0%}" if rate else "",
        str(row["messages"]),
        f"{time_s / simulated:.2f}" if simulated else "",
        f"{time_s / bound:.2f}" if bound else "",
    ]


if __name__ == "__main__":
    sys.exit(main())
