"""Is every op of PyTorch exact when it is sharded? `python benchmarks/opinfo.py`

The ops are those of torch's OpInfo database (torch.testing, `op_db`). Samples of each, every other
one in a layout that is not contiguous, are captured as a small model, run on the reference backend
on data=2 and on tensor=2 with inputs and parameters in shards, and compared with eager PyTorch:
outputs, and the gradient of every tensor. A sample is exact (1e-9, or the bound of the coarsest
dtype that it computes in), refused, wrong, or a crash: any error that is not written for users.

Rows are appended to `--rows`, one JSON line an op, as they come; ops with a row are not run again.
`--limit` samples of each op are chosen evenly; 0 runs all of them, in both layouts. `--compose N`
runs N random compositions of ops instead. `--summary` writes the table as JSON. The database needs
an extra of this benchmark: pip install 'shardweave[models]'. Exits 1 if an op is wrong or crashes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from shardweave.benchmarks.models import Worker, add_options, resumed, rows_of

RESULTS = Path(__file__).resolve().parent / "results" / "opinfo.json"
KINDS = ("exact", "refused", "wrong", "crash", "no samples")
QUICK = 12
"""A quick run takes every twelfth op, and two samples of it."""
Row = dict[str, Any]


def measured(names: Sequence[str], jobs: int, limit: int, limit_s: float) -> Iterator[Row]:
    """The rows of ops, as they are done."""
    module = "shardweave.benchmarks.opinfo_measure"
    for row in rows_of([(n, str(limit)) for n in names], lambda: Worker(limit_s, module), jobs):
        if "samples" not in row:  # the process ended
            problem = {"sample": 0, "mesh": "", "result": "crash", "why": row["why"]}
            row = {"name": row["group"], "result": "crash", "samples": {}, "problems": [problem]}
        yield row


def summary(rows: Sequence[Row]) -> Row:
    """Counts of ops and samples by result, and each op that is not exact with its reason."""
    ops = {kind: sum(row["result"] == kind for row in rows) for kind in KINDS}
    samples = {
        kind: sum(row["samples"].get(kind, 0) for row in rows)
        for kind in (*KINDS[:4], "not in eager")
    }
    others = [
        {
            "name": row["name"],
            "result": row["result"],
            "samples": row["samples"],
            "why": row["problems"][0]["why"] if row["problems"] else "",
        }
        for row in sorted(rows, key=lambda row: row["name"])
        if row["result"] not in ("exact", "no samples")
    ]
    return {"torch": torch.__version__, "ops": ops, "samples": samples, "not exact": others}


def page(result: Row) -> str:
    """The tables of docs/ops.md: counts, and the ops that are not exact by what is said of them,
    those of which some samples are with a star."""
    lines = ["| | exact | refused | wrong | crash |", "| --- | --- | --- | --- | --- |"]
    for what in ("ops", "samples"):
        lines.append(f"| {what} | {' | '.join(str(result[what][kind]) for kind in KINDS[:4])} |")
    names: dict[tuple[str, str], list[str]] = {}
    for row in result["not exact"]:
        why = re.sub(
            r"^.*?torch could not trace the model: |^the model( \(.*?`\))?: |^sw\.seeded: \S+ ",
            "",
            row["why"],
        )
        why = re.sub(r"^\S+ (reads memory that is laid out otherwise) .*", r"\1", why)
        why = re.split(r"[;,] | \(", why)[0].replace("|", "\\|")
        star = "\\*" if row["samples"].get("exact") else ""
        names.setdefault((row["result"], why), []).append(f"`{row['name']}`{star}")
    lines += ["", "| ops | the others |", "| --- | --- |"]
    lines += [f"| {', '.join(ops)} | {kind}: {why} |" for (kind, why), ops in names.items()]
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> Table:
    """The ops that are not exact, and why."""
    shown = Table("op", "result", "samples", "why", title="not exact in every case")
    for row in rows:
        if row["result"] not in ("exact", "no samples"):
            why = row["problems"][0]["why"] if row["problems"] else ""
            counts = ", ".join(f"{n} {kind}" for kind, n in row["samples"].items() if n)
            shown.add_row(row["name"], row["result"], counts, why)
    return shown


def main() -> int:
    """Run the ops that have no row yet, and print the table; 1 if any is wrong or crashes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="every twelfth op, two samples")
    parser.add_argument("--ops", default="", metavar="PATTERN", help="names that match")
    parser.add_argument("--limit", type=int, default=6, metavar="N", help="samples of an op")
    parser.add_argument("--compose", type=int, default=0, metavar="N", help="random compositions")
    add_options(parser, "opinfo.jsonl", 300, "an op")
    arguments = parser.parse_args()
    from shardweave.benchmarks.opinfo_measure import ops

    names = [name for name in ops() if re.search(arguments.ops, name)]
    names = names[:: QUICK if arguments.quick else 1]
    limit = 2 if arguments.quick else arguments.limit
    if arguments.compose:
        names, limit = [f"compose:{seed}" for seed in range(arguments.compose)], 0
    workers, seconds = arguments.workers, arguments.seconds
    shown = resumed(
        names, arguments, "ops", lambda missing: measured(missing, workers, limit, seconds)
    )
    result = summary(shown)
    Console().print(table(shown))
    Console().print(result["ops"], result["samples"])
    if arguments.summary:
        arguments.summary.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["ops"]["wrong"] or result["ops"]["crash"] else 0


if __name__ == "__main__":
    sys.exit(main())
