"""Which models are captured, and are they right? `python benchmarks/models.py`

Hugging Face types, models of other packages, single operations and structures of models, each tiny,
in float64: captured once, lowered on six configurations, and run for three steps with other inputs
each on a virtual mesh. The loss, every gradient and every buffer is compared with eager PyTorch's.
A case is exact (within 1e-9, or the bound of the coarsest dtype that the model computes in, which
the table names), refused (with module, line and remedy), wrong, crashed, or not built.

The packages are extras of this benchmark alone: pip install 'shardweave[models]'. Each case runs in
a process that is ended after `--limit` seconds. Rows are written as they come to `--json`, and
cases found there are not run again; `--fresh` begins anew. `--quick` takes every tenth case,
`--group` and `--only` choose among them. Exits 1 if any case is wrong or crashed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "models.json"
MARK = "row: "
BOUND = 1e-9
QUICK = 10
"""A quick run takes every tenth case."""

Row = dict[str, Any]
Name = tuple[str, str]


@dataclass
class Worker:
    """A process that measures cases, started when needed and ended when a case takes too long."""

    limit_s: float
    module: str = "shardweave.benchmarks.models_worker"
    process: subprocess.Popen[str] | None = None
    lines: SimpleQueue[str] = field(default_factory=SimpleQueue[str])

    def measure(self, name: Name) -> Row:
        """The row of a case."""
        process = self.process = self.process or self._start()
        assert process.stdin is not None
        process.stdin.write(f"{' '.join(name)}\n")
        process.stdin.flush()
        try:
            line = self.lines.get(timeout=self.limit_s)
        except Empty:
            self.stop()
            return _ended(name, f"no result within {self.limit_s:.0f} s")
        if not line:
            self.stop()
            return _ended(name, "the process ended (out of memory, or a fault in a kernel)")
        return json.loads(line.removeprefix(MARK))

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process, self.lines = None, SimpleQueue()

    def _start(self) -> subprocess.Popen[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        process = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        threading.Thread(target=_read, args=(process, self.lines), daemon=True).start()
        return process


def _read(process: subprocess.Popen[str], lines: SimpleQueue[str]) -> None:
    """Pass on the rows that a process prints; an empty line at its end."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK):
            lines.put(line)
    lines.put("")


def _ended(name: Name, why: str) -> Row:
    group, case = name
    return {"group": group, "name": case, "result": "crashed", "why": why, "configurations": {}}


def rows_of(names: list[Name], make: Callable[[], Worker], jobs: int) -> Iterator[Row]:
    """The rows of cases, as they are done, by `jobs` workers."""
    workers: SimpleQueue[Worker] = SimpleQueue()
    for _ in range(jobs):
        workers.put(make())

    def run(name: Name) -> Row:
        worker = workers.get()
        try:
            return worker.measure(name)
        finally:
            workers.put(worker)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(run, names)
    finally:
        for _ in range(jobs):
            workers.get().stop()


def add_options(parser: argparse.ArgumentParser, rows: str, seconds: float, what: str) -> None:
    """Add the options of a run that goes on where it was stopped (`resumed`)."""
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=seconds, help=f"that {what} may take")
    parser.add_argument("--rows", type=Path, default=Path(rows), metavar="FILE")
    parser.add_argument("--again", default="", metavar="RESULTS", help="run these again: wrong")
    parser.add_argument("--summary", type=Path, default=None, metavar="FILE")


def resumed(
    names: list[str],
    options: argparse.Namespace,
    what: str,
    run: Callable[[list[str]], Iterator[Row]],
) -> list[Row]:
    """The rows of names in order, by `add_options`: those in the file of rows, the last of a name,
    and those that `run` gives, which are added to it."""
    path: Path = options.rows
    lines = path.read_text().splitlines() if path.is_file() else []
    known: dict[str, Row] = {row["name"]: row for row in map(json.loads, filter(None, lines))}
    again = options.again.split(",")
    missing = [n for n in names if n not in known or known[n]["result"] in again]
    console = Console(file=sys.stderr)
    for row in track(run(missing), what, len(missing), console=console, disable=not missing):
        known[row["name"]] = row
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return [known[name] for name in names]


def summary(rows: list[Row]) -> Table:
    """How many cases of each group came out how."""
    results = ("exact", "refused", "wrong", "crashed", "not built")
    table = Table(title="three steps on six configurations, against eager PyTorch")
    for column in ("group", "cases", *results, "exact, %"):
        table.add_column(column)
    groups = list(dict.fromkeys(row["group"] for row in rows))
    for group in (*groups, "all"):
        own = [row["result"] for row in rows if group in ("all", row["group"])]
        counts = [own.count(result) for result in results]
        share = 100 * counts[0] / max(len(own), 1)
        table.add_row(group, str(len(own)), *map(str, counts), f"{share:.1f}")
    return table


def not_exact(rows: list[Row]) -> Table:
    """The cases that are not exact within 1e-9, and why."""
    table = Table("case", "result", "why", title="not exact, or by a coarser bound")
    for row in rows:
        if row["result"] != "exact":
            table.add_row(f"{row['group']} {row['name']}", row["result"], row["why"])
        elif row["bound"] > BOUND:
            reason = row["why"] or "the bound of the coarsest dtype it computes in"
            reason = f"within {row['bound']:.0e}: {reason}"
            table.add_row(f"{row['group']} {row['name']}", "exact", reason)
    return table


GROUPS = {
    "hf": "Hugging Face types (tiny)",
    "packages": "models of torchvision, timm, diffusers, x-transformers",
    "ops": "operations",
    "structures": "structures",
}


def page(rows: list[Row]) -> str:
    """The tables in docs/models.md: how many of each group came out how, and what is not exact."""
    lines = [
        "| | cases | exact | refused | wrong | crashed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for group, title in (*GROUPS.items(), ("", "all")):
        own = [row["result"] for row in rows if group in ("", row["group"])]
        counts = [own.count(result) for result in ("exact", "refused", "wrong", "crashed")]
        lines.append(f"| {title} | {len(own)} | {' | '.join(map(str, counts))} |")
    lines += ["", "| not exact | |", "| --- | --- |"]
    for row in rows:
        if row["result"] != "exact":
            lines.append(f"| {row['name']} | {row['result']}: {_short(row['why'])} |")
    coarse = [
        f"{row['name']} ({row['bound']:.0e})"
        for row in rows
        if row["result"] == "exact" and row["bound"] > BOUND
    ]
    lines += [
        "",
        f"Exact within another bound than 1e-9: {', '.join(coarse)}.",
    ]
    return "\n".join(lines)


def _short(why: str) -> str:
    """Why, without the line that it names."""
    return re.sub(r"^.*?`\): (torch could not trace the model: )?", "", why).partition(" (")[0][
        :110
    ]


def main() -> int:
    """Run the cases that have no row yet, and print the tables; 1 if any is wrong or crashed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="every tenth case")
    parser.add_argument("--group", default="", help="hf, packages, ops or structures")
    parser.add_argument("--only", default="", metavar="PATTERN", help="names that match")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=240, metavar="SECONDS", help="of one case")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--fresh", action="store_true", help="run what has a row, too")
    arguments = parser.parse_args()
    from shardweave.benchmarks.cases import cases

    wanted = [
        (group, name)
        for group, named in cases().items()
        for name in named
        if arguments.group in ("", group) and re.search(arguments.only, name)
    ][:: QUICK if arguments.quick else 1]
    path: Path = arguments.json
    known: dict[Name, Row] = {}
    if path.is_file():
        known = {(row["group"], row["name"]): row for row in json.loads(path.read_text())["rows"]}
    missing = [name for name in wanted if arguments.fresh or name not in known]
    console = Console(file=sys.stderr)
    rows = rows_of(missing, lambda: Worker(arguments.limit), arguments.jobs)
    order = {(group, name): None for group, named in cases().items() for name in named}
    for row in track(rows, "cases", total=len(missing), console=console, disable=not missing):
        known[row["group"], row["name"]] = row
        write(path, [known[name] for name in order if name in known])
    shown = [known[name] for name in wanted]
    for table in (not_exact(shown), summary(shown)):
        Console().print(table)
    return 1 if any(row["result"] in ("wrong", "crashed", "not built") for row in shown) else 0


def write(path: Path, rows: list[Row]) -> None:
    """Write rows, one a line; a run that is stopped leaves a whole file."""
    import torch

    head = json.dumps({"torch": torch.__version__, "rows": []})[:-2]
    text = ",\n".join(json.dumps(row) for row in rows)
    temporary = path.with_suffix(".part")
    temporary.write_text(f"{head}\n{text}\n]}}\n")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
