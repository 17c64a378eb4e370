"""Memory of a process that starts with a large model on the meta device, beside its shards.

`python benchmarks/large_start.py [--nproc N] [--model SPEC] [--json FILE] [--quick]`: a model of
Hugging Face's is built on the meta device, in bfloat16, and compiled with `zero=3` on N processes:
each fills its shards. The peak of memory (`ru_maxrss`) since before the model is built stands
beside the bytes of the shards and of the largest parameter.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor

import shardweave as sw

MODEL = (
    "hidden_size=2560,intermediate_size=6912,num_hidden_layers=32,num_attention_heads=32,"
    "vocab_size=32000"
)
QUICK = (
    "hidden_size=256,intermediate_size=512,num_hidden_layers=2,num_attention_heads=4,"
    "vocab_size=4096"
)
MIB = 2**20


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nproc", type=int, default=4, help="processes")
    parser.add_argument("--model", default=MODEL, help="fields of LlamaConfig")
    parser.add_argument("--machine", default="2-core x86-64 CPU, 24 GB, torch CPU build")
    parser.add_argument("--json", default="", help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="two processes and a small model")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        row = measure(options.model)
        Path(options.worker, f"{row['rank']}.json").write_text(json.dumps(row))
        return 0
    nproc, model = (2, QUICK) if options.quick else (options.nproc, options.model)
    with tempfile.TemporaryDirectory() as folder:
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc))
        worker = (__file__, "--worker", folder, "--model", model)
        subprocess.run([sys.executable, *launch, *worker], check=True)
        rows = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(nproc)]
    table = Table(title=f"Start of {rows[0]['parameters']:,} parameters on {nproc} processes")
    for title in ("rank", "shards MiB", "largest parameter MiB", "peak MiB", "seconds"):
        table.add_column(title, justify="right")
    for row in rows:
        sizes = [f"{row[key] / MIB:,.0f}" for key in ("shards", "largest", "peak")]
        table.add_row(str(row["rank"]), *sizes, f"{row['seconds']:.0f}")
    Console().print(table)
    if options.json:
        record = {"machine": options.machine, "model": model, "rows": rows}
        Path(options.json).write_text(json.dumps(record) + "\n")
    return 0


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(fields: str) -> dict[str, Any]:
    """Build, compile and fill the model; the memory that it took."""
    import transformers

    warnings.simplefilter("ignore", sw.PlanNote)
    small = transformers.LlamaConfig(**values_of(QUICK))
    start(small)  # what capture, and the first messages, load once
    before, begin_s = peak_bytes(), time.perf_counter()
    model, largest, count = start(transformers.LlamaConfig(**values_of(fields)))
    parts = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return {
        "rank": torch.distributed.get_rank(),
        "parameters": count,
        "shards": sum(part.nbytes for part in parts),
        "largest": largest,
        "peak": peak_bytes() - before,
        "seconds": time.perf_counter() - begin_s,
    }


def start(config: Any) -> tuple[sw.CompiledModule, int, int]:
    """A compiled model, the bytes of its largest parameter, and how many numbers it has."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    largest = max(parameter.nbytes for parameter in model.parameters())
    count = sum(parameter.numel() for parameter in model.parameters())
    ids = torch.zeros(8, 64, dtype=torch.int64)
    example = {"input_ids": ids, "labels": ids, "use_cache": False}
    return sw.compile(model, kwargs=example, mesh="data=-1", zero=3), largest, count


def values_of(fields: str) -> dict[str, Any]:
    return {name: int(value) for name, value in (field.split("=") for field in fields.split(","))}


if __name__ == "__main__":
    raise SystemExit(main())
