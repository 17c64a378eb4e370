"""How much communication each schedule hides, measured over a slow link and simulated.

Two local processes, one core each, train a `gpt:` model with tensor parallelism over a link
that is rate-limited in the kernel (`--link shaped`; needs root, ip and tc) or modelled
(`--link modelled`; flatters speed-ups by several per cent, and has no row for PyTorch).
With `--profile FILE` the machine and the link are first measured into a cluster file, and the
simulator and `list` go by that. Methods run in turn, so that all see the same machine, and an
idle-priority process keeps each core awake: a core that idles in a wait is slow to come back,
which would make every method look better beside a blocking one.
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

import overlap_methods
import shaped_link
from rank_processes import Process, run_ranks, start_rank

from shardweave.driver.models.models import build_example
from shardweave.driver.profile.profile import profile_machine
from shardweave.ir.capture.capture import capture
from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.cost.cluster_file import save_cluster

WORKER = Path(__file__).with_name("overlap_worker.py")
NUM_RANKS = 2
PROFILED = ("blocking", "cross-pass")
"""Rows that have all ops of all rows between them."""


def main() -> int:
    options = parse_options()
    console = Console(width=max(110, Console().width))
    rate = options.rate if options.link == "shaped" else ""
    with shaped_link.shaped_link(NUM_RANKS, rate), tempfile.TemporaryDirectory() as folder:
        if options.profile:
            profile(options)
            options.cluster = options.profile
        rows = run_workers(options, Path(folder))
    show(rows, options, console)
    if options.json:
        cluster = options.cluster or "testbed"
        result = {"machine": options.machine, "model": options.model, "rate": options.rate,
                  "link": options.link, "cluster": cluster, "rows": rows}  # fmt: skip
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="410mbit", help="rate of each NIC, as tc writes it")
    parser.add_argument("--link", choices=("shaped", "modelled"), default="shaped")
    parser.add_argument(
        "--model", default="gpt:layers=6,hidden=512,heads=8,vocab=512,seq=256,batch=8,tie=false"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed steps per method")
    parser.add_argument("--cluster", default="", help="cluster file for the simulator and list")
    parser.add_argument("--profile", default="", help="measure into this cluster file, and use it")
    parser.add_argument("--rows", default="", help="comma-separated names; all by default")
    parser.add_argument("--machine", default="2-core x86-64 CPU, torch CPU build")
    parser.add_argument("--json", default="", help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="two layers, two rounds")
    options = parser.parse_args()
    if options.quick:
        options.model = "gpt:layers=2,hidden=256,heads=4,vocab=256,seq=128,batch=4,tie=false"
        options.rounds = 2
    return options


def profile(options: argparse.Namespace) -> None:
    """Measure ops of the rows' programs, and collectives over the link, into a cluster file."""
    example = build_example(options.model)
    program = capture(example.module, kwargs=example.kwargs)
    program.set_mesh(Mesh(tensor=NUM_RANKS))
    preset = f"testbed:rate={options.rate}"
    programs = [overlap_methods.pipeline(name, program, preset) for name in PROFILED]
    launcher = "env MASTER_ADDR=127.0.0.1"
    if options.link == "shaped":
        launcher = shaped_link.launcher()
    save_cluster(profile_machine(NUM_RANKS, programs, launcher=launcher), options.profile)


def run_workers(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Start one process per rank, and read the rows that rank 0 writes."""
    out = folder / "rows.json"
    run_ranks(NUM_RANKS, partial(start_worker, options, out), timeout_s=1800)
    return json.loads(out.read_text())


def start_worker(options: argparse.Namespace, out: Path, rank: int, port: int) -> Process:
    prefix, variables = (
        shaped_link.on_node(rank)
        if options.link == "shaped"
        else ([], {"MASTER_ADDR": "127.0.0.1"})
    )
    settings = json.dumps(
        {
            key: getattr(options, key)
            for key in ("model", "rounds", "link", "rate", "cluster", "rows")
        }
        | {"out": str(out)}
    )
    return start_rank(WORKER, settings, rank, NUM_RANKS, port, prefix, variables)


def show(rows: list[dict[str, Any]], options: argparse.Namespace, console: Console) -> None:
    table = Table(title=f"{options.model} over {options.rate} ({options.link} link)")
    for title in ("method", "measured", "speed-up", "collectives", "simulated",
                  "lower bound", "measured / bound", "peak memory"):  # fmt: skip
        is_name = title == "method"
        table.add_column(title, justify="left" if is_name else "right", no_wrap=is_name)
    for row in rows:
        simulated, bound = row["simulated_s"], row["lower_bound_s"]
        table.add_row(
            row["name"],
            f"{row['time_s'] * 1e3:.0f} ms",
            f"{row['speedup']:.2f}",
            str(row["collectives"]),
            f"{simulated * 1e3:.0f} ms" if simulated else "-",
            f"{bound * 1e3:.0f} ms" if bound else "-",
            f"{row['time_s'] / bound:.2f}" if bound else "-",
            f"{row['peak_bytes'] / 2**20:.0f} MiB" if row["peak_bytes"] else "-",
        )
    console.print(table)
    share = next((r.get("communication_share") for r in rows if r["name"] == "blocking"), None)
    if share:
        console.print(f"communication is {share:.0%} of the blocking step (simulated)")
    ours = [row for row in rows if row["simulated_s"]]
    if ours:
        measured = [row["name"] for row in sorted(ours, key=lambda row: row["time_s"])]
        simulated = [row["name"] for row in sorted(ours, key=lambda row: row["simulated_s"])]
        worst = max(abs(row["simulated_s"] / row["time_s"] - 1) for row in ours)
        ranks = (
            "ranks the rows as measured" if measured == simulated else "ranks the rows otherwise"
        )
        console.print(f"the simulator {ranks}, and is off by {worst:.0%} at most")


if __name__ == "__main__":
    sys.exit(main())
