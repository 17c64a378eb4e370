"""ZeRO 1, 2 and 3 beside FSDP2 in the setting that does the same, with gradient accumulation.

    python benchmarks/zero.py [--rate 500mbit] [--ranks 2,4] [--quick] [--json FILE]

A step is forward and backward of several micro-batches on each of the processes, which share the
batch. ZeRO 1 adds up whole gradients and scatters them once, ZeRO 2 scatters those of each
micro-batch, both keep the gathered weights; ZeRO 3 gathers them for each pass. The rows are timed
in turn. Bytes of parameters, gradients and optimizer states are those that a rank holds after a
step of AdamW, as shares of the textbook's: all of them over the number of ranks. `in a step` is
what ours holds at most from micro-batch to micro-batch, gathered weights and sums of gradients, as
a share of what Rajbhandari et al. (2020, Sec. 5) count.
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
from rank_processes import rows_of_ranks

WORKER = Path(__file__).with_name("zero_worker.py")
MODEL = "gpt:layers=4,hidden=256,heads=8,vocab=1024,seq=64,batch=32,tie=false"
QUICK = "gpt:layers=2,hidden=32,heads=4,vocab=64,seq=16,batch=16,tie=false"


def main() -> int:
    options = parse_options()
    console = Console(width=max(150, Console().width))
    results: list[dict[str, Any]] = []
    with shaped_link.shaped_link(max(options.ranks), options.rate):
        for ranks in options.ranks:
            results.append({"ranks": ranks, "rows": run(options, ranks)})
            console.print(table_of(results[-1], options))
            if options.json:
                result = {"machine": options.machine, "rate": options.rate, "model": options.model,
                          "rounds": options.rounds, "micro_batches": options.micro_batches,
                          "results": results}  # fmt: skip
                Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="", help="rate of each process's link, as tc writes it")
    parser.add_argument("--model", default="")
    parser.add_argument("--ranks", default="2,4", help="how many processes, in turn")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each row")
    parser.add_argument("--machine", default="2-core x86-64 CPU, torch CPU build")
    parser.add_argument("--json", default="", help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="a small model, three rounds")
    options = parser.parse_args()
    options.ranks = [int(ranks) for ranks in options.ranks.split(",")]
    options.model = options.model or (QUICK if options.quick else MODEL)
    if options.quick:
        options.rounds = 3
    return options


def run(options: argparse.Namespace, ranks: int) -> list[dict[str, Any]]:
    """The rows of so many processes."""
    settings = {name: getattr(options, name) for name in ("model", "micro_batches", "rounds")}
    what = f"a worker of {ranks}"
    return rows_of_ranks(WORKER, settings, ranks, options.rate, timeout_s=1200, what=what)


PARTS = ("parameters", "gradients", "optimizer", "in a step")


def table_of(result: dict[str, Any], options: argparse.Namespace) -> Table:
    title = f"{result['ranks']} processes, {options.micro_batches} micro-batches, "
    table = Table(title=f"{title}{options.rate or 'unshaped'} link")
    for name in ("row", "time", "ours / it", "step's memory", "sent", *PARTS):
        table.add_column(name, justify="left" if name == "row" else "right", no_wrap=True)
    ours: dict[str, Any] = {}
    for row in result["rows"]:
        if row["name"].startswith("shardweave"):
            ours = row
        table.add_row(*cells(ours, row))
    return table


def cells(ours: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """A line of the table; `ours` is the same stage of ZeRO."""
    own_s, time_s = statistics.median(ours["times_s"]), statistics.median(row["times_s"])
    shares = [row["shares"].get(part) for part in PARTS]
    return [
        row["name"],
        f"{time_s * 1e3:.1f} ms",
        "" if row is ours else f"{own_s / time_s:.2f}",
        f"{row['peak_bytes'] / 2**20:.2f} MiB",
        f"{row['sent_bytes'] / 2**20:.2f} MiB",
        *("" if share is None else f"{share:.3f}" for share in shares),
    ]


if __name__ == "__main__":
    sys.exit(main())
