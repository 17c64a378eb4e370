"""Training loops written for plain PyTorch, with only the compile line added, on several meshes.

`python benchmarks/loops.py [--mesh data=2 ..] [--loops NAME ..] [--json FILE]`: each loop of
`tests/driver/step/all_loops.py` on processes of this machine, five optimizer steps in float64. OK
says that losses and weights equal eager's to 1e-9, REFUSED that an error of ours says what to do.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from shardweave.tests.driver.step.all_loops import LOOPS, assert_trains_as_in_eager
from shardweave.tests.spawn import RankError, run_ranks

MESHES = {"data=2": 0, "tensor=2": 0, "data=2,tensor=2": 3, "stage=2": 0}
"""Meshes, and the ZeRO stage on each."""

TOGETHER, LIMIT_S = 8, 300
"""Loops that run in the same processes, and seconds after which these are stopped."""


def outcomes(names: list[str], mesh: str) -> dict[str, str]:
    """The outcome of each loop on this rank, and of a refusal its sentence."""
    return {name: _outcome(name, mesh) for name in names}


def _outcome(name: str, mesh: str) -> str:
    try:
        assert_trains_as_in_eager(name, mesh, MESHES[mesh], "distributed")
    except (ValueError, RuntimeError) as error:
        is_ours = type(error).__module__.startswith("shardweave.") or isinstance(error, ValueError)
        return f"{'REFUSED' if is_ours else 'FAIL'}: {error}"
    except Exception as error:  # noqa: BLE001 - whatever a loop raises is its outcome
        return f"FAIL: {type(error).__name__}: {error}"
    return "OK"


def on_processes(names: list[str], mesh: str) -> dict[str, str]:
    """The outcomes on all ranks; the worst, where ranks differ. A loop that hangs ends a few others
    with it."""
    count, found = 4 if "," in mesh else 2, dict[str, str]()
    for start in track(range(0, len(names), TOGETHER), mesh, console=Console(stderr=True)):
        some = names[start : start + TOGETHER]
        try:
            told = run_ranks(outcomes, count, some, mesh, timeout_s=LIMIT_S)
        except (RankError, TimeoutError) as error:
            found |= dict.fromkeys(some, f"FAIL: {error}")
        else:
            found |= {name: min((each[name] for each in told), key=_grade) for name in some}
    return found


def _grade(outcome: str) -> int:
    return ("FAIL", "REFUSED", "OK").index(outcome.partition(":")[0])


def main() -> int:
    """Run the loops and print a table. Returns 1 if any of them fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mesh", nargs="+", default=list(MESHES), choices=MESHES)
    parser.add_argument("--loops", nargs="+", default=list(LOOPS), choices=LOOPS, metavar="NAME")
    parser.add_argument("--machine", default="2-core x86-64 CPU, torch CPU build")
    parser.add_argument("--json", default="", help="write the outcomes to this file")
    parser.add_argument("--quick", action="store_true", help="three loops on data=2")
    options = parser.parse_args()
    meshes = options.mesh[:1] if options.quick else options.mesh
    names = options.loops[:3] if options.quick else options.loops
    rows = {mesh: on_processes(names, mesh) for mesh in meshes}
    table = Table(title="Loops of plain PyTorch, with the compile line added")
    for title in ("loop", *(f"{mesh}, zero={MESHES[mesh]}" for mesh in meshes)):
        table.add_column(title)
    for name in names:
        table.add_row(name, *(rows[mesh][name].partition(":")[0] for mesh in meshes))
    Console().print(table)
    if options.json:
        record = {"machine": options.machine, "meshes": MESHES, "rows": rows}
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    return int(any(_grade(each) == 0 for row in rows.values() for each in row.values()))


if __name__ == "__main__":
    sys.exit(main())
