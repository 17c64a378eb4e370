"""What an all-reduce costs beside its message: a constant, and its error on other rows.

`python benchmarks/starting.py` reads seconds of row-parallel products, which end in an all-reduce
over the tensor degree, and of all-reduces alone (Mist, Apache-2.0). What such a product takes
beyond its share of the whole one, and beyond its all-reduce alone, is the same for messages of 16
to 192 MB among 2, 4 or 8 devices: `start_overhead_s` of a cluster is its median. A third of the
rows, by a hash of what they are, is left out of it.
"""

from __future__ import annotations

import csv
import hashlib
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np

FOLDER = Path(__file__).resolve().parent / "data" / "profiles"
HELD_OUT = 3
KINDS = {"a100": "A100", "v100": "V100"}
"""By the first letters of a profile's device."""


@dataclass(frozen=True)
class Call:
    """A row-parallel product, in microseconds: as measured, its share of the whole product and its
    all-reduce alone."""

    kind: str
    measured_us: float
    product_us: float
    message_us: float
    is_held_out: bool

    @property
    def extra_us(self) -> float:
        return self.measured_us - self.product_us - self.message_us


def _all_reduces() -> Mapping[tuple[str, str], tuple[list[float], list[float]]]:
    """Megabytes, growing, and microseconds, by device and number of devices."""
    found: defaultdict[tuple[str, str], tuple[list[float], list[float]]]
    found = defaultdict(lambda: ([], []))
    with (FOLDER / "all_reduce.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            sizes, times = found[row["gpu"], row["gpus"]]
            sizes.append(float(row["megabytes"]))
            times.append(1e3 * float(row["time_ms"]))
    return found


def read_calls() -> list[Call]:
    """Products over two devices or more of which the whole was also measured."""
    messages = _all_reduces()
    with (FOLDER / "row_parallel.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = ("gpu", "model", "micro_batch", "op")
    whole = {
        tuple(row[name] for name in names): float(row["forward_us"])
        for row in rows
        if row["tensor"] == "1"
    }
    return [
        Call(
            KINDS[row["gpu"][:4]],
            float(row["forward_us"]),
            whole[key] / int(row["tensor"]),
            float(np.interp(float(row["output_mb"]), *messages[row["gpu"], row["tensor"]])),
            hashlib.md5(repr((key, row["tensor"])).encode()).digest()[0] % HELD_OUT == 0,
        )
        for row in rows
        if row["tensor"] != "1" and (key := tuple(row[name] for name in names)) in whole
    ]


def start_overhead_us(calls: Sequence[Call]) -> float:
    return median(call.extra_us for call in calls)


def error(calls: Sequence[Call], overhead_us: float) -> float:
    """Mean absolute error of a call's time, as a share."""
    guesses = (call.product_us + call.message_us + overhead_us for call in calls)
    return mean(abs(t / call.measured_us - 1) for t, call in zip(guesses, calls, strict=True))


def main() -> int:
    calls = read_calls()
    for kind in KINDS.values():
        fitted = [call for call in calls if call.kind == kind and not call.is_held_out]
        rest = [call for call in calls if call.kind == kind and call.is_held_out]
        found = start_overhead_us(fitted)
        print(
            f"{kind}: start_overhead {found:.0f} us; error {error(fitted, found):.1%} of "
            f"{len(fitted)} calls, {error(rest, found):.1%} of {len(rest)} left out "
            f"({error(rest, 0.0):.1%} if starting costs nothing)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
