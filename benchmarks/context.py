"""How much of gathered keys and values hides behind attention, measured and simulated.

Two local processes, one core each, train a `gpt:` model on a long sequence that is cut over the
axis `context`, over a link that is rate-limited in the kernel (`--link shaped`; needs root, ip and
tc) or modelled. The rows differ in where the sequence is cut (plain shards or stripes), in how many
parts attention merges, and in the schedule. PyTorch's own context parallelism is a row where it
runs: it replaces the attention kernels of GPUs alone, so on a CPU the row says why it is not there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

import shaped_link
from rank_processes import Process, run_ranks, start_rank

WORKER = Path(__file__).with_name("context_worker.py")
NUM_RANKS = 2
MODEL = "gpt:layers=2,hidden=256,heads=4,vocab=512,seq=2048,batch=2,tie=false"
QUICK = "gpt:layers=1,hidden=64,heads=4,vocab=64,seq=256,batch=2,tie=false"


def main() -> int:
    options = parse_options()
    console = Console(width=max(110, Console().width))
    rate = options.rate if options.link == "shaped" else ""
    with shaped_link.shaped_link(NUM_RANKS, rate), tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        run_ranks(NUM_RANKS, partial(start_worker, options, out), timeout_s=1800)
        result = json.loads(out.read_text())
    show(result, options, console)
    if options.json:
        about = {key: getattr(options, key) for key in ("machine", "model", "rate", "link")}
        Path(options.json).write_text(json.dumps(about | result, indent=2) + "\n")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="410mbit", help="rate of each NIC, as tc writes it")
    parser.add_argument("--link", choices=("shaped", "modelled"), default="shaped")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps per method")
    parser.add_argument("--machine", default="2-core x86-64 CPU, torch CPU build")
    parser.add_argument("--json", default="", help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="a short sequence, two rounds")
    options = parser.parse_args()
    if options.quick:
        options.model, options.rounds, options.link = QUICK, 2, "modelled"
    return options


def start_worker(options: argparse.Namespace, out: Path, rank: int, port: int) -> Process:
    prefix, variables = (
        shaped_link.on_node(rank)
        if options.link == "shaped"
        else ([], {"MASTER_ADDR": "127.0.0.1"})
    )
    keys = ("model", "rounds", "link", "rate")
    settings = {key: getattr(options, key) for key in keys} | {"out": str(out)}
    return start_rank(WORKER, json.dumps(settings), rank, NUM_RANKS, port, prefix, variables)


def show(result: dict[str, Any], options: argparse.Namespace, console: Console) -> None:
    table = Table(title=f"{options.model} over {options.rate} ({options.link} link)")
    for title in ("method", "measured", "speed-up", "collectives", "simulated", "exposed",
                  "peak memory"):  # fmt: skip
        is_name = title == "method"
        table.add_column(title, justify="left" if is_name else "right", no_wrap=is_name)
    for row in result["rows"]:
        table.add_row(
            row["name"],
            f"{row['time_s'] * 1e3:.0f} ms",
            f"{row['speedup']:.2f}",
            str(row["collectives"]),
            f"{row['simulated_s'] * 1e3:.0f} ms",
            f"{row['exposed_s'] * 1e3:.0f} ms",
            f"{row['peak_bytes'] / 2**20:.0f} MiB",
        )
    console.print(table)
    console.print(f"torch's context_parallel: {result['torch']}")


if __name__ == "__main__":
    sys.exit(main())
