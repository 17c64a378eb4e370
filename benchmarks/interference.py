"""What compute and messages lose to each other: two factors, and their error on other rows.

`python benchmarks/interference.py` fits `overlap_slowdown` and `link_slowdown` of the simulator
(`planners/simulate/streams.py`, of which `beside_s` is the closed form) to milliseconds of a GEMM
and a transfer between GPUs, alone and together, for messages within a node and between nodes apart.
Of the pairs a third is left out of the fit, by a hash of what they are; its error is printed beside
that of no loss at all.
"""

from __future__ import annotations

import csv
import hashlib
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean

from shardweave.benchmarks.stages.events import beside_s

FILE = Path(__file__).resolve().parent / "data" / "profiles" / "overlap_interference.csv"
FACTORS = [1 + step / 50 for step in range(60)]
HELD_OUT = 3


@dataclass(frozen=True)
class Pair:
    """A GEMM and a transfer, alone and together, in milliseconds."""

    gpu: str
    nodes: int
    work_ms: float
    sent_ms: float
    both_ms: float
    is_held_out: bool


def read_pairs() -> list[Pair]:
    """The pairs of a GEMM and a transfer of which each was also measured alone."""
    alone: defaultdict[tuple[object, ...], list[float]] = defaultdict(list)
    both: list[tuple[tuple[str, ...], float, float, float]] = []
    with FILE.open(newline="") as file:
        for row in csv.DictReader(file):
            if float(row["cpu_to_gpu_mb"]) or float(row["gpu_to_cpu_mb"]):
                continue
            place = tuple(row[name] for name in ("gpu", "world", "intra", "inter"))
            work = float(row["gemm_n"]) * float(row["gemm_m"]) * float(row["gemm_k"])
            sent, took = float(row["gpu_to_gpu_mb"]), float(row["latency_ms"])
            if work and sent:
                both.append((place, work, sent, took))
            else:
                alone[place, work, sent].append(took)
    return [
        Pair(
            place[0],
            int(place[3]),
            mean(alone[place, work, 0.0]),
            mean(alone[place, 0.0, sent]),
            took,
            hashlib.md5(repr((place, work, sent)).encode()).digest()[0] % HELD_OUT == 0,
        )
        for place, work, sent, took in both
        if (place, work, 0.0) in alone and (place, 0.0, sent) in alone
    ]


def error(pairs: Sequence[Pair], factors: tuple[float, float]) -> float:
    """Mean absolute error of the time of both together, as a share."""
    guesses = [beside_s(one.work_ms, one.sent_ms, *factors)[0] for one in pairs]
    return mean(abs(t / one.both_ms - 1) for t, one in zip(guesses, pairs, strict=True))


def fit(pairs: Sequence[Pair]) -> tuple[float, float]:
    """overlap_slowdown and link_slowdown of the least error."""
    return min(product(FACTORS, FACTORS), key=lambda factors: error(pairs, factors))


def rows() -> list[Mapping[str, object]]:
    """A fit for each kind of GPU and of link, with its error on the pairs left out."""
    pairs = read_pairs()
    found: list[Mapping[str, object]] = []
    for gpu, is_inside in product(sorted({one.gpu for one in pairs}), (True, False)):
        own = [one for one in pairs if one.gpu == gpu and (one.nodes == 1) == is_inside]
        fitted = [one for one in own if not one.is_held_out]
        rest = [one for one in own if one.is_held_out]
        factors = fit(fitted)
        found.append(
            {
                "gpu": gpu,
                "where": "within a node" if is_inside else "between nodes",
                "overlap_slowdown": factors[0],
                "link_slowdown": factors[1],
                "fitted": len(fitted),
                "error": error(fitted, factors),
                "held_out": len(rest),
                "held_out_error": error(rest, factors),
                "held_out_without": error(rest, (1.0, 1.0)),
            }
        )
    return found


def main() -> int:
    for row in rows():
        print(
            f"{row['gpu']}, {row['where']}: overlap_slowdown {row['overlap_slowdown']:.2f}, "
            f"link_slowdown {row['link_slowdown']:.2f}; error {row['error']:.1%} of "
            f"{row['fitted']} pairs, {row['held_out_error']:.1%} of {row['held_out']} left out "
            f"({row['held_out_without']:.1%} if nothing is lost)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
