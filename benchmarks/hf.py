"""Is every model type of Hugging Face exact when it is sharded? `python benchmarks/hf.py`

Each type of transformers with a training head, at the tiny sizes of `hf:TYPE:tiny`, in float64:
captured unedited, run for three steps with other inputs on data=2,tensor=2 on a virtual mesh, and
compared with eager PyTorch: the loss, every gradient and every buffer.

Rows are appended to `--rows`, one JSON line a type, as they come; types with a row are not run
again. `--quick` takes every tenth type, `--types` those whose names match. `--summary` writes the
table as JSON. Exits 1 if a type is wrong or crashes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence

from rich.console import Console

from shardweave.benchmarks.models import (
    QUICK,
    Row,
    Worker,
    add_options,
    not_exact,
    resumed,
    rows_of,
)
from shardweave.driver.models.hf import types_with_head

RESULTS = ("exact", "refused", "wrong", "crashed", "not built")
GROUP = "types"


def summary(rows: Sequence[Row]) -> Row:
    """Counts of types by result, and the reason of each that is not exact."""
    import torch
    import transformers

    counts = {result: sum(row["result"] == result for row in rows) for result in RESULTS}
    others = [
        {key: row[key] for key in ("name", "result", "why")}
        for row in rows
        if row["result"] != "exact"
    ]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    exact = [row["name"] for row in rows if row["result"] == "exact"]
    return {**versions, "types": counts, "exact": exact, "not exact": others}


def page(result: Row) -> str:
    """The table of docs/models.md: how many types came out how, and what is not exact."""
    lines = ["| | exact | refused | wrong | crashed | not built |", "| --- " * 6 + "|"]
    lines.append(f"| types | {' | '.join(str(result['types'][kind]) for kind in RESULTS)} |")
    lines += ["", "| type | |", "| --- | --- |"]
    for row in result["not exact"]:
        why = re.sub(r"^.*?torch could not trace the model: ", "", row["why"])
        lines.append(f"| {row['name']} | {row['result']}: {why.replace('|', ' ')[:140]} |")
    return "\n".join(lines)


def main() -> int:
    """Run the types that have no row yet, and print the table; 1 if any is wrong or crashes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="every tenth type")
    parser.add_argument("--types", default="", metavar="PATTERN", help="names that match")
    add_options(parser, "hf.jsonl", 400, "a type")
    arguments = parser.parse_args()
    names = [name for name in types_with_head() if re.search(arguments.types, name)]
    names = names[:: QUICK if arguments.quick else 1]
    shown = resumed(
        names,
        arguments,
        "types",
        lambda missing: rows_of(
            [(GROUP, name) for name in missing],
            lambda: Worker(arguments.seconds),
            arguments.workers,
        ),
    )
    Console().print(not_exact(shown))
    result = summary(shown)
    Console().print(result["types"])
    if arguments.summary:
        arguments.summary.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["types"]["wrong"] or result["types"]["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
