"""Start of a step of many layers on each rank: compiled as ever, and from an artifact.

`python benchmarks/artifact_start.py [--layers N] [--mesh M] [--quick] [--json FILE]`: one process
writes the artifact; then the processes of the mesh compile the same model, on the meta device and
of small weights, in both ways, each in a run of its own. Seconds are those of `sw.compile`, imports
left out: of the processor, of the rank that took most, and of the clock, which a busy machine
stretches.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import shardweave as sw
from shardweave.driver.models.models import example_to_trace

MODEL = "gpt:layers={},hidden=64,heads=4,seq=32,vocab=128,batch=8"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--mesh", default="data=2,tensor=2")
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--machine", default="2-core x86-64 CPU, 24 GB, torch CPU build")
    parser.add_argument("--json", default="", help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="two layers on two processes")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--ahead", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.layers, options.mesh = 2, "data=2"
    if options.worker:
        return work(options)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        start_s = time.process_time()
        sw.precompile(**request(options), artifact=f"{folder}/step")
        rows["written by one process"] = {"processor_s": time.process_time() - start_s}
        for name, flag in (("compiled", []), ("from the artifact", ["--ahead"])):
            rows[name] = run_ranks([*(arguments or sys.argv[1:]), *flag], options.mesh, folder)
        size = Path(folder, "step").stat().st_size
    table = Table(title=f"Start of {options.layers} layers on {options.mesh} ({size:,} bytes)")
    for title in ("", "processor s", "clock s"):
        table.add_column(title)
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.2f}" for value in row.values()))
    Console().print(table)
    if options.json:
        kept = {"layers": options.layers, "mesh": options.mesh, "machine": options.machine}
        Path(options.json).write_text(json.dumps({**kept, "rows": rows}, indent=2) + "\n")
    return 0


def request(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of both ways."""
    example = example_to_trace(MODEL.format(options.layers))
    given = {"mesh": options.mesh, "zero": options.zero}
    return {"model": example.module, "kwargs": example.kwargs, **given}


def run_ranks(arguments: list[str], mesh: str, folder: str) -> dict[str, float]:
    """The most that a rank of a run took."""
    count = sw.Mesh.parse(mesh).num_devices
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count))
    worker = (__file__, *arguments, "--worker", folder)
    subprocess.run([sys.executable, *launch, *worker], check=True)
    ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(count)]
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def work(options: argparse.Namespace) -> int:
    """Compile on one rank, and write what it took."""
    import torch.distributed as dist

    given = request(options)
    if options.ahead:
        given = {"model": given["model"], "kwargs": given["kwargs"]}
        given["artifact"] = f"{options.worker}/step"
    sw.compile  # noqa: B018  imports it
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    start_s, clock_s = time.process_time(), time.perf_counter()
    sw.compile(**given)
    row = {
        "processor_s": time.process_time() - start_s,
        "clock_s": time.perf_counter() - clock_s,
    }
    Path(options.worker, f"{dist.get_rank()}.json").write_text(json.dumps(row))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
