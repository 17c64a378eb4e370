"""The process of `models.py` that measures cases: reads `group name` lines, writes a row for each.

Rows are lines of JSON that begin with a mark, for what models print goes the same way.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import torch

from shardweave.benchmarks.cases import build
from shardweave.benchmarks.models_measure import CONFIGURATIONS, Row, measure

MARK = "row: "
ONE = ("data=2,tensor=2",)
"""The configuration of `hf.py`, which has more types."""
MEMORY_BYTES = 12 * 2**30
"""Of address space; a case that wants more fails alone."""


def main() -> None:
    """Measure the cases named on standard input, until it ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    torch.set_num_threads(1)
    for line in sys.stdin:
        group, name = line.split()
        try:
            example = build(group, name)
        except Exception as error:  # noqa: BLE001 - whatever the packages raise
            row = Row(group, name, "not built", why=f"{type(error).__name__}: {error}"[:600])
        else:
            row = measure(group, name, example, ONE if group == "types" else CONFIGURATIONS)
        print(f"{MARK}{json.dumps(row.to_dict())}", flush=True)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent)
    main()
